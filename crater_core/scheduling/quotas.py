"""Quota policies: which count for a task, what is used of them, and whether one more task stays inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import Amounts
from crater_core.scheduling.columns import Bucket, Held, add

QUOTA_RESOURCES = ("gpu", "cpu", "memory", "disk")


def applicable(policies: Mapping[str, QuotaPolicy], project: str, named: str | None) -> tuple[QuotaPolicy, ...]:
    """The policy the task names; without one, every policy that names its project, by name."""
    if named is not None:
        return (policies[named],) if named in policies else ()
    return tuple(policy for _, policy in sorted(policies.items()) if project in policy.projects)


def limits_of(limits: Limits) -> tuple[int | None, ...]:
    """In the order of `QUOTA_RESOURCES`."""
    return limits.gpu_milli, limits.cpu_milli, limits.memory_bytes, limits.disk_bytes


def held_of(amounts: Amounts) -> Held:
    return [amounts.gpu_milli, amounts.cpu_milli, amounts.memory_bytes, amounts.disk_bytes, amounts.gpu_memory_mib]


class QuotaBook:
    """Use of every policy, in all and by user, while a plan is made. Starts from what live allocations hold."""

    def __init__(self, policies: Mapping[str, QuotaPolicy], held: Mapping[Bucket, Held]) -> None:
        self._policies = policies
        self._cache: dict[tuple[str, str | None], tuple[QuotaPolicy, ...]] = {}
        self.used: dict[tuple[str, str | None], Held] = {}
        """By policy and user; None is the policy in all."""
        for (project, user, named), amounts in held.items():
            self.take(project, user, named, amounts)

    def policies_for(self, project: str, named: str | None) -> tuple[QuotaPolicy, ...]:
        key = (project, named)
        if key not in self._cache:
            self._cache[key] = applicable(self._policies, project, named)
        return self._cache[key]

    def take(self, project: str, user: str, named: str | None, amounts: Held, sign: int = 1) -> None:
        for policy in self.policies_for(project, named):
            for key in ((policy.name, None), (policy.name, user)):
                add(self.used.setdefault(key, [0] * 5), amounts, sign)

    def used_of(self, policy: str) -> Held:
        return self.used.get((policy, None), _NONE)

    def refusal(self, project: str, user: str, named: str | None, wanted: Held) -> Reason | None:
        """The first limit that the amounts would pass."""
        if named is not None and named not in self._policies:
            return Reason.of(ReasonCode.UNKNOWN_QUOTA_POLICY, policy=named, known=listed(self._policies))
        for policy in self.policies_for(project, named):
            for limits, key, label in (
                (policy.limits, (policy.name, None), policy.name),
                (policy.user_limits, (policy.name, user), f"{policy.name} (for each user)"),
            ):
                used = self.used.get(key, _NONE)
                for resource, limit, have, want in zip(QUOTA_RESOURCES, limits_of(limits), used, wanted, strict=False):
                    if limit is not None and want and have + want > limit:
                        return Reason.of(
                            ReasonCode.QUOTA_USED_UP, policy=label, resource=resource, limit=limit, used=have, wanted=want
                        )
        return None


_NONE = [0] * 5


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
