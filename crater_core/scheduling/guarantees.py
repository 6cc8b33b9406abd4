"""What quota policies are guaranteed: room kept free for them, what others have borrowed of it, and who may take that back.

A guarantee that is not lent is kept free in amount: whoever is not inside a guarantee of its own starts only where enough stays
free for all that is guaranteed and not used. One that is lent may be used by anybody, and is taken back by stopping borrowers.
A task inside its own guarantee is never held up by the guarantees of others, so that guarantees which add up to more than there
is cannot block each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from crater_core.model.allocation import AllocationStatus
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling.columns import CPU, DISK, MEMORY, Columns, Held, add, vector
from crater_core.scheduling.quotas import QUOTA_RESOURCES, QuotaBook, limits_of


class Guarantees:
    """Reads the use that a quota book keeps while a plan is made."""

    def __init__(self, snapshot: Snapshot, book: QuotaBook, columns: Columns) -> None:
        self._snapshot = snapshot
        self._book = book
        self._columns = columns
        self._policies = [policy for _, policy in sorted(snapshot.policies.items()) if policy.guarantees]
        self._kept = [policy for policy in self._policies if not policy.lend]
        self._free: Held | None = None
        """Free in all on nodes that take tasks, since somebody asked; None before that."""
        self._going: dict[str, Held] | None = None
        """By policy, what is held by allocations that are being stopped."""

    # --- room kept free

    def refusal(self, project: str, named: str | None, wanted: Held) -> Reason | None:
        """Why the amounts would take what is kept for others; None when they do not."""
        if not self._kept or self._inside(project, named, wanted) is not None:
            return None
        mine = self._book.policies_for(project, named)
        if self._free is None:
            self._free = _free_in_all(self._columns)
        for place, resource in enumerate(QUOTA_RESOURCES):
            kept = {policy.name: self._unused(policy, place) for policy in self._kept if policy not in mine}
            left, unused = self._free[place] - wanted[place], sum(kept.values())
            if wanted[place] and unused and left < unused:
                whose = ", ".join(name for name, amount in kept.items() if amount)
                facts = {"resource": resource, "wanted": wanted[place], "free": self._free[place], "kept": unused}
                return Reason(ReasonCode.KEPT_FOR_GUARANTEE, {**facts, "policy": whose})
        return None

    def take(self, amounts: Held) -> None:
        """Something was placed."""
        if self._free is not None:
            add(self._free, amounts, -1)

    def _unused(self, policy: QuotaPolicy, place: int) -> int:
        guarantee = limits_of(policy.guarantee)[place]
        return max(0, guarantee - self._book.used_of(policy.name)[place]) if guarantee is not None else 0

    # --- what may be taken back

    def lender(self, project: str, named: str | None, wanted: Held) -> str | None:
        """The lending policy within whose guarantee the amounts stay: it may take back what it lent."""
        policy = self._inside(project, named, wanted)
        return policy.name if policy is not None and policy.lend else None

    def _inside(self, project: str, named: str | None, wanted: Held) -> QuotaPolicy | None:
        """A policy of the caller that guarantees something of this, and whose guarantee the amounts do not pass."""
        for policy in self._book.policies_for(project, named):
            bounds, used = limits_of(policy.guarantee), self._book.used_of(policy.name)
            asked = [
                (bound, have + want)
                for bound, have, want in zip(bounds, used, wanted, strict=False)
                if bound is not None and want
            ]
            if asked and all(after <= bound for bound, after in asked):
                return policy
        return None

    def may_give(self, tasks: Iterable[str], own: Collection[str], own_too: bool) -> bool:
        """Whether stopping these tasks leaves every other policy what it is guaranteed. `own` are the policies of whom they make
        room for: tasks under those may be stopped only with `own_too`, and then without regard to the guarantee.
        """
        if own_too and not self._policies:
            return True
        taken: dict[str, Held] = {}
        for name in tasks:
            spec, held = self._snapshot.tasks[name].spec, self._held(name)
            for policy in self._book.policies_for(spec.project, spec.quota_policy):
                if policy.name in own and not own_too:
                    return False
                if policy.guarantees and policy.name not in own:
                    add(taken.setdefault(policy.name, [0] * 5), held)
        return all(self._stays_whole(name, amounts) for name, amounts in taken.items())

    def stop(self, tasks: Iterable[str]) -> None:
        """These are stopped in this cycle: what they hold counts as given back."""
        if not self._policies:
            return
        going = self._stopping()
        for name in tasks:
            self._add_going(going, name, self._held(name))

    def _stays_whole(self, name: str, amounts: Held) -> bool:
        bounds = limits_of(self._snapshot.policies[name].guarantee)
        used, going = self._book.used_of(name), self._stopping().get(name, [0] * 5)
        return all(
            bound is None or not taken or have - leaving - taken >= bound
            for bound, have, leaving, taken in zip(bounds, used, going, amounts, strict=False)
        )

    def _held(self, task: str) -> Held:
        """Of its allocations that are not being stopped yet."""
        held: Held = [0] * 5
        for allocation in self._snapshot.by_task.get(task, {}).values():
            if allocation.status is not AllocationStatus.STOPPING:
                add(held, vector(allocation))
        return held

    def _stopping(self) -> dict[str, Held]:
        if self._going is None:
            self._going = {}
            for row in sorted(self._columns.stopping):
                for allocation in self._snapshot.by_node.get(self._columns.names[row], {}).values():
                    if allocation.status is AllocationStatus.STOPPING and not allocation.control:
                        self._add_going(self._going, allocation.task, vector(allocation))
        return self._going

    def _add_going(self, going: dict[str, Held], task: str, held: Held) -> None:
        spec = self._snapshot.tasks[task].spec
        for policy in self._book.policies_for(spec.project, spec.quota_policy):
            add(going.setdefault(policy.name, [0] * 5), held)


def _free_in_all(columns: Columns) -> Held:
    open_rows = columns.profile >= 0
    free = np.maximum(columns.free[open_rows], 0).sum(0).tolist()
    return [int(columns.compute_free[open_rows].sum()), free[CPU], free[MEMORY], free[DISK], 0]
