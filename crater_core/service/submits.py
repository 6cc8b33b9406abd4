"""Turns submits into inputs: admission against the newest state, and idempotency keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from crater_core.errors import Conflict, CraterError, ImpossibleRequest, InvalidRequest, QuotaExceeded, UnknownPool
from crater_core.lifecycle.inputs import Input, TaskSubmitted
from crater_core.model.plan import Refused
from crater_core.model.reason import ReasonCode, next_step, sentence
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import TaskSpec
from crater_core.scheduling import admit
from crater_core.service.dependencies import Find, Known, known_to, resolve
from crater_core.store.codec import encode
from crater_core.store.protocol import Store, SubmitKey

KeyLookup = Callable[[str, str], SubmitKey | None]

_REFUSALS: dict[ReasonCode, type[CraterError]] = {
    ReasonCode.UNKNOWN_POOL: UnknownPool,
    ReasonCode.LARGER_THAN_ANY_NODE: ImpossibleRequest,
    ReasonCode.MPS_ONE_GPU: ImpossibleRequest,
    ReasonCode.LARGER_THAN_CLUSTER: ImpossibleRequest,
    ReasonCode.GPU_TYPE_MISSING: ImpossibleRequest,
    ReasonCode.LABELS_MISMATCH: ImpossibleRequest,
    ReasonCode.LARGER_THAN_QUOTA: QuotaExceeded,
}


@dataclass(frozen=True, slots=True)
class Submission:
    """`id` is fresh; it is used only when the key is new."""

    id: str
    spec: TaskSpec
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    id: str
    new: bool


@dataclass(frozen=True, slots=True)
class Recalled:
    """What the store knew of a submit's idempotency keys, and of what its tasks come after, before the submit's turn."""

    keys: Mapping[tuple[str, str], SubmitKey]
    names: Mapping[str, Known]


def recalled(store: Store, keys: Iterable[tuple[str, str]], names: Iterable[str]) -> Recalled:
    """May wait for a network: not for an event loop."""
    found = {key: store.find_key(*key) for key in keys}
    known = {name: known_to(store, name) for name in names}
    return Recalled(
        {key: one for key, one in found.items() if one is not None},
        {name: one for name, one in known.items() if one is not None},
    )


def digest_of(spec: TaskSpec) -> bytes:
    """Tells whether two bodies with one key ask for the same."""
    return hashlib.blake2b(encode(spec), digest_size=16).digest()


def check_admission(spec: TaskSpec, snapshot: Snapshot, where: str = "") -> None:
    """Raise what a refused admission means to the caller; `where` stands before the field's name."""
    admission = admit(spec, snapshot)
    if isinstance(admission, Refused):
        reason = admission.reason
        kind = _REFUSALS.get(reason.code, InvalidRequest)
        facts = {name: value for name, value in reason.facts.items() if name not in ("field", "reason", "next_step")}
        raise kind(
            sentence(reason), field=where + admission.field, reason=reason.code.value, next_step=next_step(reason), **facts
        )


def prepare_submits(
    submissions: Sequence[Submission],
    snapshot: Snapshot,
    lookup: KeyLookup,
    find: Find,
) -> tuple[list[Input], list[SubmitKey], list[Submitted]]:
    """All of them, or an error that names the one that cannot be."""
    keys: dict[tuple[str, str], SubmitKey] = {}
    results: list[Submitted] = []
    for index, submission in enumerate(submissions):
        spec = submission.spec
        if submission.key is not None:
            name = (spec.user, submission.key)
            digest = digest_of(spec)
            known = keys.get(name) or lookup(*name)
            if known is not None:
                if known.digest != digest:
                    raise Conflict(
                        "the idempotency key was used before, for another body",
                        field=f"tasks.{index}.idempotency_key" if len(submissions) > 1 else "idempotency_key",
                        task=known.task,
                        key=submission.key,
                    )
                results.append(Submitted(known.task, new=False))
                continue
            keys[name] = SubmitKey(*name, submission.id, digest)
        results.append(Submitted(submission.id, new=True))
    return _admitted(submissions, results, snapshot, find), list(keys.values()), results


def _admitted(submissions: Sequence[Submission], results: Sequence[Submitted], snapshot: Snapshot, find: Find) -> list[Input]:
    """Inputs for those that are new, each with the ids of what it comes after."""
    inputs: list[Input] = []
    if not any(result.new for result in results):
        return inputs
    specs = resolve([submission.spec for submission in submissions], [result.id for result in results], find)
    for index, (spec, result) in enumerate(zip(specs, results, strict=True)):
        if result.new:
            check_admission(spec, snapshot, f"tasks.{index}." if len(submissions) > 1 else "")
            inputs.append(TaskSubmitted(result.id, spec))
    return inputs
