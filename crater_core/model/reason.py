"""Why a task waits, was refused or ended: a closed set of codes, each with its numbers, and one sentence for each.

Other modules make and compare `Reason` values; only `sentence` and `next_step` turn them into words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from crater_core.model.units import show_bytes, show_duration, show_mib, show_milli


class ReasonCode(StrEnum):
    # Refused at submit, in the order in which they are looked for.
    BAD_REQUEST = "bad_request"
    UNKNOWN_POOL = "unknown_pool"
    UNKNOWN_QUOTA_POLICY = "unknown_quota_policy"
    UNKNOWN_STRATEGY = "unknown_strategy"
    LARGER_THAN_ANY_NODE = "larger_than_any_node"
    MPS_ONE_GPU = "mps_one_gpu"
    LARGER_THAN_CLUSTER = "larger_than_cluster"
    LARGER_THAN_QUOTA = "larger_than_quota"
    CANNOT_RESERVE = "cannot_reserve"
    # Waiting, most useful to the person first.
    QUOTA_USED_UP = "quota_used_up"
    KEPT_FOR_GUARANTEE = "kept_for_guarantee"
    NO_NODE_READY = "no_node_ready"
    LABELS_MISMATCH = "labels_mismatch"
    GPU_TYPE_MISSING = "gpu_type_missing"
    POOL_MISSING = "pool_missing"
    FRAGMENTED = "fragmented"
    NO_ROOM = "no_room"
    NO_CONTROL_SLOT = "no_control_slot"
    WAITING_FOR_PREEMPTION = "waiting_for_preemption"
    WAITING_FOR_TASKS = "waiting_for_tasks"
    ARRAY_LIMIT = "array_limit"
    WAITING_FOR_GANG = "waiting_for_gang"
    KEPT_APART = "kept_apart"
    RESERVED = "reserved"
    HELD_FOR_ANOTHER = "held_for_another"
    BACKOFF = "backoff"
    NOT_YET_LOOKED_AT = "not_yet_looked_at"
    # A node was passed over (explain only).
    CORDONED = "cordoned"
    DRAINING = "draining"
    NODE_LOST = "node_lost"
    CPU_SHORT = "cpu_short"
    MEMORY_SHORT = "memory_short"
    DISK_SHORT = "disk_short"
    GPU_SHORT = "gpu_short"
    GPU_MEMORY_SHORT = "gpu_memory_short"
    GPU_UNHEALTHY = "gpu_unhealthy"
    MPS_USER = "mps_user"
    PORTS_SHORT = "ports_short"
    RUNTIME_MISSING = "runtime_missing"
    SPREAD = "spread"
    # Running, and warned.
    OVER_MEMORY = "over_memory"
    OVER_DISK = "over_disk"
    DISK_NEARLY_FULL = "disk_nearly_full"
    OVER_GPU_MEMORY = "over_gpu_memory"
    GPU_XID = "gpu_xid"
    GPU_DEVICES_LOST = "gpu_devices_lost"
    GPU_IDLE = "gpu_idle"
    # Being started.
    IMAGE_PULLING = "image_pulling"
    # Ended.
    FINISHED = "finished"
    EXIT_CODE = "exit_code"
    SIGNALLED = "signalled"
    OOM_KILLED = "oom_killed"
    MEMORY_EXCEEDED = "memory_exceeded"
    GPU_MEMORY_EXCEEDED = "gpu_memory_exceeded"
    NO_MORE_MEMORY = "no_more_memory"
    DISK_EXCEEDED = "disk_exceeded"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    RECLAIMED = "reclaimed"
    GAVE_WAY = "gave_way"
    DRAINED = "drained"
    START_FAILED = "start_failed"
    EXIT_UNKNOWN = "exit_unknown"
    ENGINE_LOST = "engine_lost"
    GPU_FAULT = "gpu_fault"
    GPU_WITHOUT_MPS = "gpu_without_mps"
    GPU_IDLE_STOPPED = "gpu_idle_stopped"
    UNHEALTHY = "unhealthy"
    SCALED_DOWN = "scaled_down"
    SUPERSEDED = "superseded"
    DEPENDENCY_FAILED = "dependency_failed"


TAKEN_FOR_ANOTHER = frozenset({ReasonCode.PREEMPTED, ReasonCode.RECLAIMED, ReasonCode.GAVE_WAY})
"""Stopped for the task that the fact `by` names."""
ROOM_WANTED_BACK = TAKEN_FOR_ANOTHER | {ReasonCode.DRAINED}
"""An attempt that ended so was not its task's doing: the task goes back to the queue, and has used up no retry."""

WARNINGS = frozenset(
    {
        ReasonCode.OVER_MEMORY,
        ReasonCode.OVER_DISK,
        ReasonCode.DISK_NEARLY_FULL,
        ReasonCode.OVER_GPU_MEMORY,
        ReasonCode.GPU_XID,
        ReasonCode.GPU_DEVICES_LOST,
        ReasonCode.GPU_IDLE,
    }
)
"""Of a task that goes on running."""

Fact = int | str


def _no_facts() -> Mapping[str, Fact]:
    return {}


@dataclass(frozen=True, slots=True)
class Reason:
    """One code with the facts its sentence needs.

    A whole-number fact says its unit in the last part of its name (`limit_bytes`). Where a fact `resource` (cpu, memory,
    disk, gpu, gpu_memory) stands beside `wanted`, `free`, `best`, `largest`, `limit`, `used` or `kept`, those are in that
    resource's unit: thousandths, bytes, bytes, thousandths, MiB.
    """

    code: ReasonCode
    facts: Mapping[str, Fact] = field(default_factory=_no_facts)

    @staticmethod
    def of(code: ReasonCode, **facts: Fact) -> Reason:
        return Reason(code, facts)


def sentence(reason: Reason) -> str:
    """One clear sentence for a person, with the numbers."""
    return _told(reason.code, tuple(reason.facts.items()))[0]


def next_step(reason: Reason) -> str:
    """What a person can do about it; empty when there is nothing to do."""
    return _told(reason.code, tuple(reason.facts.items()))[1]


@lru_cache(4096)
def _told(code: ReasonCode, facts: tuple[tuple[str, Fact], ...]) -> tuple[str, str]:
    """Both texts. Most tasks of a queue wait for the same thing."""
    shown = _Shown(dict(facts))
    return _SENTENCES[code].format_map(shown), _NEXT_STEPS.get(code, "").format_map(shown)


class _Shown(dict[str, str]):
    """Facts as readable text: the unit at the end of a fact's name says how to show it; a missing fact shows as "?"."""

    def __init__(self, facts: Mapping[str, Fact]) -> None:
        resource = facts.get("resource", "")
        super().__init__({name: _show(name, fact, str(resource)) for name, fact in facts.items()})
        self["resource"] = _RESOURCE_WORDS.get(str(resource), str(resource))

    def __missing__(self, key: str) -> str:
        return "?"


_UNITS: dict[str, Callable[[int], str]] = {"bytes": show_bytes, "mib": show_mib, "milli": show_milli, "ms": show_duration}
_RESOURCE_UNITS = {"cpu": "milli", "memory": "bytes", "disk": "bytes", "gpu": "milli", "gpu_memory": "mib"}
_RESOURCE_WORDS = {"cpu": "cores", "memory": "of memory", "disk": "of disk", "gpu": "GPU", "gpu_memory": "of GPU memory"}
_OF_THE_RESOURCE = {"wanted", "free", "best", "largest", "limit", "used", "kept"}


def _show(name: str, fact: Fact, resource: str) -> str:
    if not isinstance(fact, int):
        return fact
    unit = _RESOURCE_UNITS.get(resource, "") if name in _OF_THE_RESOURCE else name.rpartition("_")[2]
    return _UNITS[unit](fact) if unit in _UNITS else str(fact)


_C = ReasonCode
_SENTENCES: dict[ReasonCode, str] = {
    _C.BAD_REQUEST: "The request is not valid: {why}.",
    _C.UNKNOWN_POOL: "No pool is called {pool}; pools are: {known}.",
    _C.UNKNOWN_QUOTA_POLICY: "No quota policy is called {policy}; policies are: {known}.",
    _C.UNKNOWN_STRATEGY: "No strategy is called {strategy}; strategies are: {known}.",
    _C.LARGER_THAN_ANY_NODE: "No node could ever run this: it asks for {wanted} {resource}, "
    "the largest node ({node}) has {largest}.",
    _C.MPS_ONE_GPU: "It asks for shares of {count} GPUs of one node. By MPS, which shares {devices} of the GPUs that could give "
    "one, a program has a share of one GPU only, and no node has {count} others.",
    _C.LARGER_THAN_CLUSTER: "It asks for {members} members, all nodes together could run {largest} at most.",
    _C.LARGER_THAN_QUOTA: "It asks for {wanted} {resource}, more than the whole limit of quota policy {policy} ({limit}).",
    _C.CANNOT_RESERVE: "It asks for {wanted} {resource}; {largest} can be reserved for that time ({kept} are reserved already).",
    _C.QUOTA_USED_UP: "Quota policy {policy} allows {limit} {resource}; {used} are in use and this asks for {wanted}.",
    _C.KEPT_FOR_GUARANTEE: "{free} {resource} are free, of which {kept} are kept for what is guaranteed to {policy}; "
    "this asks for {wanted}.",
    _C.NO_NODE_READY: "No node is ready ({nodes} known).",
    _C.LABELS_MISMATCH: "No ready node has the labels {labels}.",
    _C.GPU_TYPE_MISSING: "No ready node has such a GPU: wanted {types}; present {present}.",
    _C.POOL_MISSING: "No ready node gives to pool {pool}.",
    _C.FRAGMENTED: "{free} {resource} are free in all, but no single {place} has the {wanted} asked for (most on one: {best}).",
    _C.NO_ROOM: "All nodes that could run this are busy: it asks for {wanted} {resource}, {free} are free in all.",
    _C.NO_CONTROL_SLOT: "All {slots} control slots are taken by run workers.",
    _C.WAITING_FOR_PREEMPTION: "Room is being made by stopping {victims} other task(s).",
    _C.WAITING_FOR_TASKS: "It comes after {count} task(s) that have not ended; the first is {first}.",
    _C.ARRAY_LIMIT: "Of its array {running} run already, the most that may at one time ({limit}).",
    _C.WAITING_FOR_GANG: "{placed} of {members} members would fit; a gang starts whole or not at all.",
    _C.KEPT_APART: "{nodes} node(s) have room, but each runs {whom} already, and they are to be kept apart.",
    _C.RESERVED: "The free room is reserved for project {project} for the next {wait_ms} (reservation {reservation}).",
    _C.HELD_FOR_ANOTHER: "The free room is kept for {holder}, which is ahead in the queue.",
    _C.BACKOFF: "The next try comes in {wait_ms}; the last one ended: {why}.",
    _C.NOT_YET_LOOKED_AT: "The scheduler has not looked at it yet.",
    _C.CORDONED: "The node is cordoned: it takes nothing new.",
    _C.DRAINING: "The node is being drained{why}: it takes nothing new.",
    _C.NODE_LOST: "The node {node} has not been heard from for {silent_ms}.",
    _C.CPU_SHORT: "{wanted_milli} cores wanted, {free_milli} free.",
    _C.MEMORY_SHORT: "{wanted_bytes} of memory wanted, {free_bytes} free.",
    _C.DISK_SHORT: "{wanted_bytes} of disk wanted, {free_bytes} free.",
    _C.GPU_SHORT: "{wanted} GPU(s) of {wanted_milli} wanted, {fit} device(s) have that free.",
    _C.GPU_MEMORY_SHORT: "{wanted_mib} of GPU memory wanted, at most {free_mib} free on one device.",
    _C.GPU_UNHEALTHY: "{count} GPU(s) of the node are in quarantine{why}.",
    _C.MPS_USER: "The GPUs with room serve another user's MPS processes, and one device serves one user at a time.",
    _C.PORTS_SHORT: "{wanted} port(s) wanted, {free} free.",
    _C.RUNTIME_MISSING: "It needs a node that runs {runtime} tasks.",
    _C.SPREAD: "It runs {whom} already, and they are to be kept apart.",
    _C.OVER_MEMORY: "It uses more memory than it asked for: limit {limit_bytes}, seen {peak_bytes}; it is stopped if it goes on.",
    _C.OVER_DISK: "It has written more than it asked for: limit {limit_bytes}, seen {peak_bytes}; it is stopped if it goes on.",
    _C.DISK_NEARLY_FULL: "Its scratch space is nearly full: {peak_bytes} of {limit_bytes}.",
    _C.OVER_GPU_MEMORY: "It uses more than its share of the memory of GPU {device}: share {limit_mib}, seen {peak_mib}; "
    "it is stopped if it goes on.",
    _C.GPU_XID: "The driver reported {what} on GPU {device}, which a program causes.",
    _C.GPU_DEVICES_LOST: "Its container can no longer open its GPU(s), as after a reload of the host's systemd; what it has open "
    "goes on.",
    _C.GPU_IDLE: "Its GPU(s) have not been used for {idle_ms}{what_follows}.",
    _C.IMAGE_PULLING: "The node {node} is fetching image {image}: {done_bytes} of {total_bytes} so far.",
    _C.FINISHED: "It ended by itself.",
    _C.EXIT_CODE: "It ended with exit code {exit_code}.",
    _C.SIGNALLED: "It was ended by signal {signal}, which Crater did not send.",
    _C.OOM_KILLED: "It was killed for using more memory than its limit: limit {limit_bytes}, peak {peak_bytes}.",
    _C.MEMORY_EXCEEDED: "It was stopped for using more memory than its limit: limit {limit_bytes}, seen {peak_bytes}.",
    _C.GPU_MEMORY_EXCEEDED: "It was stopped for using more GPU memory than its share: share {limit_mib}, seen {peak_mib}.",
    _C.NO_MORE_MEMORY: "It ran out of its {limit} {resource}, and no next try can have more: {bound} allows {largest}.",
    _C.DISK_EXCEEDED: "It wrote as much as its disk limit lets it or more: limit {limit_bytes}, seen {peak_bytes}.",
    _C.TIME_LIMIT: "It was stopped at its time limit of {limit_ms}.",
    _C.CANCELLED: "It was cancelled by {by}{why}.",
    _C.PREEMPTED: "It made room for {by}, which has a higher priority.",
    _C.DRAINED: "The node {node} was drained by {by}{why}.",
    _C.GAVE_WAY: "It made room for {by}, for whose project the node is reserved ({reservation}).",
    _C.RECLAIMED: "It made room for {by}: quota policy {policy} took back what it had lent.",
    _C.START_FAILED: "It could not be started on {node}: {why}.",
    _C.EXIT_UNKNOWN: "It ended while nobody watched; its exit code is not known.",
    _C.ENGINE_LOST: "The container engine of {node} stopped or was started anew while it ran.",
    _C.GPU_FAULT: "Its GPU {device} on {node} failed: {why}.",
    _C.GPU_WITHOUT_MPS: "Its process {pid} used GPU {device} past MPS, so without the limits of its share.",
    _C.GPU_IDLE_STOPPED: "It was stopped for not using its GPU(s) for {idle_ms}; its gpu_idle_stop is {limit_ms}.",
    _C.UNHEALTHY: "Its health check failed {failures} times in a row: {why}.",
    _C.SCALED_DOWN: "The service needs fewer replicas.",
    _C.SUPERSEDED: "A newer version of the service took its place.",
    _C.DEPENDENCY_FAILED: "It comes after {task} and was to start when that had {wanted}, but it has {status}.",
}

_NEXT_STEPS: dict[ReasonCode, str] = {
    _C.UNKNOWN_POOL: "Use one of those names, or declare the pool in an agent's resource_pools.",
    _C.UNKNOWN_QUOTA_POLICY: "Use one of those names, or create the policy with `crater quotas set`.",
    _C.UNKNOWN_STRATEGY: "Use one of those names.",
    _C.LARGER_THAN_ANY_NODE: "Ask for less, or add a larger node.",
    _C.MPS_ONE_GPU: "Leave out gpu_devices for a share of one GPU, or ask for whole GPUs (gpu: {count}); nodes whose "
    "compute_mode is time_slice give shares of several.",
    _C.LARGER_THAN_CLUSTER: "Ask for fewer or smaller members, or add nodes.",
    _C.LARGER_THAN_QUOTA: "Ask for less, or have an administrator raise the policy's limit.",
    _C.QUOTA_USED_UP: "Wait for a task under this policy to end; `crater quotas` shows who uses it.",
    _C.KEPT_FOR_GUARANTEE: "Wait, or have an administrator let the policy lend what it does not use (`crater quotas`).",
    _C.RESERVED: "Wait, or give it a time_limit that ends before the reservation begins; `crater reservations` shows them.",
    _C.CANNOT_RESERVE: "Ask for less or for another time; `crater reservations` shows what is reserved.",
    _C.NO_NODE_READY: "Start an agent, or look at `crater nodes` for lost and cordoned ones.",
    _C.LABELS_MISMATCH: "Change the label selector, or label a node in its agent.yaml; `crater nodes` shows the labels.",
    _C.GPU_TYPE_MISSING: "Name a type that is present, a MIG slice by its profile (gpu_type: 3g.40gb), or leave the type open.",
    _C.POOL_MISSING: "Wait for a node of the pool to come back, or name another pool.",
    _C.FRAGMENTED: "Ask for less on one node, or wait for a running task on one node to end.",
    _C.NO_ROOM: "Wait; `crater nodes` shows what runs where. A higher priority moves it ahead in the queue.",
    _C.KEPT_APART: "Wait for one of them to end, or say prefer instead of require.",
    _C.NO_CONTROL_SLOT: "Wait for a run to end, or raise control.slots in an agent.yaml.",
    _C.OVER_MEMORY: "Cancel it and ask for more memory, or let it free some.",
    _C.OVER_DISK: "Let it remove what it no longer needs, or cancel it and ask for more disk.",
    _C.DISK_NEARLY_FULL: "Let it remove what it no longer needs, or cancel it and ask for more disk.",
    _C.OVER_GPU_MEMORY: "Cancel it and ask for more gpu_memory, or let it free some.",
    _C.GPU_XID: "Look for an error in its output: `crater logs`.",
    _C.GPU_DEVICES_LOST: "If it fails now it is tried again where its policy says so. CDI, or links that the container toolkit "
    "makes in /dev/char, keep this from happening.",
    _C.GPU_IDLE: "Cancel it if it no longer needs them, or ask for none.",
    _C.GPU_IDLE_STOPPED: "Ask for no GPU for the part that needs none, or raise gpu_idle_stop.",
    _C.GPU_WITHOUT_MPS: "Let the program keep the CUDA_MPS_... variables that it is given, or ask for a whole GPU.",
    _C.GPU_FAULT: "It is tried again elsewhere where its retry policy says so; `crater nodes show` shows the state of the GPU.",
    _C.OOM_KILLED: "Ask for more memory than {peak_bytes}, or make the task use less.",
    _C.MEMORY_EXCEEDED: "Ask for more memory than {peak_bytes}, or make the task use less.",
    _C.GPU_MEMORY_EXCEEDED: "Ask for more gpu_memory, or make the task use less.",
    _C.NO_MORE_MEMORY: "Make it use less, or have that bound raised.",
    _C.DISK_EXCEEDED: "Ask for more disk, or make the task write less.",
    _C.TIME_LIMIT: "Raise time_limit, or make the task faster.",
    _C.EXIT_CODE: "Look at its output: `crater logs`.",
    _C.ENGINE_LOST: "Look at the engine's own log on that node, such as `journalctl -u docker`.",
    _C.START_FAILED: "Look at the agent's log on that node; `crater nodes` shows its state.",
}
