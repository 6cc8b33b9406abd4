"""Limits on what the tasks of some projects may hold at one time, and what is guaranteed to them."""

from __future__ import annotations

from dataclasses import dataclass

RESOURCES = ("gpu", "cpu", "memory", "disk", "gpu_memory")


@dataclass(frozen=True, slots=True)
class Limits:
    """An upper bound for each resource; None leaves it unbounded. Units as in `Amounts`."""

    gpu_milli: int | None = None
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None


_NOTHING = Limits()


@dataclass(frozen=True, slots=True)
class QuotaPolicy:
    """A limit for the projects it names (none named: any project may use it by name), and one for each user inside it.

    `guarantee` is room that others do not take: it is kept free, or with `lend` lent and taken back when it is wanted. Use above
    the guarantee, up to the limit, is borrowed.

    A task counts against the policy it names; without one, against every policy that names its project.
    """

    name: str
    projects: tuple[str, ...] = ()
    limits: Limits = Limits()
    user_limits: Limits = Limits()
    guarantee: Limits = Limits()
    lend: bool = False

    @property
    def guarantees(self) -> bool:
        """Whether anything is guaranteed."""
        return self.guarantee != _NOTHING
