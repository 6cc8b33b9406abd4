"""The forms in which traces come: public data sets, and Crater's own history. Which one a file has is told by its header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crater_core.errors import InvalidRequest
from crater_core.model.node import Node
from crater_core.model.resources import GpuRequest, Request
from crater_core.model.task import TaskSpec, TaskType
from crater_core.model.units import GB, GIB, MIB, MILLI
from crater_core.simulation.rows import Row, columns_of, rows_of
from crater_core.simulation.traces import Arrival, Trace, a_machine, in_order, nodes_for_load

COMMAND = ("replayed",)
OPENB = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
OPENB_MORE = ("gpu_spec", "qos", "pod_phase", "creation_time", "deletion_time", "scheduled_time")
JOBS, JOBS_MORE = ("vc", "arrival_s", "num_gpus", "duration_v100_s"), ("job_type",)
TIRESIAS, TIRESIAS_MORE = ("job_id", "num_gpu", "submit_time", "duration"), ("iterations", "model_name", "interval")
DLRM = ("instance_sn", "role", "app_name", "cpu_request", "gpu_request", "memory_request", "disk_request")
DLRM_MORE = (
    *("cpu_limit", "gpu_limit", "rdma_request", "rdma_limit", "memory_limit", "disk_limit", "max_instance_per_node"),
    *("creation_time", "scheduled_time", "deletion_time"),
)
HISTORY = ("task", "name", "project", "user", "submitted_at_ms", "ran_ms", "cpu_milli", "memory_bytes")
HISTORY_MORE = (
    *("type", "priority", "members", "disk_bytes", "gpu_count", "gpu_milli", "gpu_memory_mib", "gpu_types", "quota_policy"),
    *("strategy", "time_limit_ms", "started_at_ms", "ended_at_ms", "status", "exit_code", "preemptions", "node"),
    "checkpoint_every_ms",
)
HISTORY_COLUMNS = (*HISTORY, *HISTORY_MORE)
NODES = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
CLUSTER, CLUSTER_MORE = ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node"), ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the nodes that are made where a trace names none. `count` None: as many as bring the load to `load_milli`."""

    count: int | None = None
    gpus: int = 8
    cpu_milli: int = 64_000
    memory_bytes: int = 512 * GIB
    load_milli: int = 750

    def nodes(self, arrivals: list[Arrival]) -> list[Node]:
        count = self.count or nodes_for_load(arrivals, max(1, self.gpus), self.load_milli)
        return [a_machine(f"node-{i:04d}", self.cpu_milli, self.memory_bytes, self.gpus, "V100") for i in range(count)]


def read_trace(tasks_file: Path, nodes_file: Path | None = None, shape: Shape | None = None) -> Trace:
    """Any of the known forms. Raises InvalidRequest with file, line and column for what cannot be read."""
    shape = shape or Shape()
    columns = set(columns_of(tasks_file))
    for needed, known, read in _forms(shape):
        if columns.issuperset(needed[:2]):
            arrivals = [arrival for row in rows_of(tasks_file, needed, known) if (arrival := read(row)) is not None]
            if not arrivals:
                raise InvalidRequest(f"{tasks_file} holds no task that ever ran", file=str(tasks_file))
            nodes = read_nodes(nodes_file) if nodes_file is not None else shape.nodes(arrivals)
            return in_order(tasks_file.stem, nodes, arrivals)
    forms = "; ".join(", ".join(needed) for needed, _, _ in _forms(shape))
    raise InvalidRequest(f"{tasks_file} has no form that is known; headers of those are: {forms}", file=str(tasks_file))


def read_nodes(path: Path) -> list[Node]:
    """Machines one by one (`sn,cpu_milli,...`), or a cluster of equal ones (`num_switch,num_node_p_switch,...`)."""
    if "num_node_p_switch" in columns_of(path):
        (row, *_) = rows_of(path, CLUSTER, CLUSTER_MORE)
        count = row.whole("num_switch", at_least=1) * row.whole("num_node_p_switch", at_least=1)
        memory, cpu, gpus = row.whole("mem_p_node") * GB, row.whole("num_cpu_p_node") * MILLI, row.whole("num_gpu_p_node")
        return [a_machine(f"node-{i:04d}", cpu, memory, gpus) for i in range(count)]
    return [
        a_machine(
            row.text("sn"),
            row.whole("cpu_milli"),
            row.whole("memory_mib") * MIB,
            row.whole("gpu", 0),
            row.text("model", "gpu"),
            card_mib=row.whole("gpu_memory_mib", 16_384),
            disk_bytes=row.whole("disk_bytes", 1 << 50),
        )
        for row in rows_of(path, NODES, ("gpu_memory_mib", "disk_bytes"))
    ]


def read_openb(nodes_file: Path, tasks_file: Path) -> Trace:
    """The Alibaba 2023 GPU trace."""
    arrivals = [_openb(row) for row in rows_of(tasks_file, OPENB, OPENB_MORE)]
    return in_order(tasks_file.stem, read_nodes(nodes_file), arrivals)


def read_jobs(jobs_file: Path, *, gpus_per_node: int = 8, load_milli: int = 750) -> Trace:
    """Jobs of virtual clusters. The trace names no nodes: as many are made as bring the load to `load_milli`.

    A job of more GPUs than a node has is a gang of full nodes.
    """
    shape = Shape(None, gpus_per_node, 8000 * gpus_per_node, 64 * GIB * gpus_per_node, load_milli)
    return read_trace(jobs_file, None, shape)


Form = tuple[tuple[str, ...], tuple[str, ...], Callable[[Row], Arrival | None]]


def _forms(shape: Shape) -> list[Form]:
    gpus = max(1, shape.gpus)
    return [
        (HISTORY, HISTORY_MORE, _history),  # First: its columns hold those by which the next is told.
        (OPENB, OPENB_MORE, _openb),
        (JOBS, JOBS_MORE, lambda row: _job(row, gpus)),
        (TIRESIAS, TIRESIAS_MORE, lambda row: _tiresias(row, gpus)),
        (DLRM, DLRM_MORE, _dlrm),
    ]


def _openb(row: Row) -> Arrival:
    count, share = row.whole("num_gpu"), row.whole("gpu_milli", 0)
    types = tuple(name.lower() for name in row.text("gpu_spec", "").split("|") if name)
    gpu: GpuRequest | None = None
    if count:
        whole = count > 1 or share in (0, MILLI)
        gpu = GpuRequest(count, types=types) if whole else GpuRequest(1, min(share, MILLI), 0, exclusive=False, types=types)
    request = Request(row.whole("cpu_milli"), row.whole("memory_mib") * MIB, 0, gpu)
    at, start, end = (row.whole(column, 0) for column in ("creation_time", "scheduled_time", "deletion_time"))
    return Arrival(TaskSpec(row.text("name"), command=COMMAND, request=request), at * 1000, max(0, end - (start or at)) * 1000)


def _whole_gpus(name: str, project: str, gpus: int, per_node: int) -> TaskSpec:
    """A job of more GPUs than a node has is a gang of full nodes."""
    members = max(1, -(-gpus // per_node))
    each = min(gpus, per_node)
    request = Request(4000 * max(1, each), 16 * GIB, 0, GpuRequest(each) if each else None)
    return TaskSpec(name, project=project, user=project, command=COMMAND, request=request, members=members)


def _job(row: Row, per_node: int) -> Arrival:
    spec = _whole_gpus(row.text("job_type", "job"), row.text("vc"), row.whole("num_gpus", at_least=1), per_node)
    return Arrival(spec, int(row.number("arrival_s") * 1000), max(1, int(row.number("duration_v100_s") * 1000)))


def _tiresias(row: Row, per_node: int) -> Arrival:
    spec = _whole_gpus(row.text("model_name", "job"), "default", row.whole("num_gpu", at_least=1), per_node)
    return Arrival(spec, int(row.number("submit_time") * 1000), max(1, int(row.number("duration") * 1000)))


def _dlrm(row: Row) -> Arrival:
    """Instances of inference services; one that was never deleted runs to the end of time (a year)."""
    gpus = row.whole("gpu_request", 0)
    request = Request(
        round(row.number("cpu_request", 0) * MILLI),
        round(row.number("memory_request", 0) * GB),
        round(row.number("disk_request", 0) * GB),
        GpuRequest(gpus) if gpus else None,
    )
    app = row.text("app_name")
    spec = TaskSpec(app, TaskType.INFERENCE, project=app, user=app, command=COMMAND, request=request)
    at = row.number("creation_time", 0)
    end = row.number("deletion_time", at + 365 * 86_400)
    return Arrival(spec, int(at * 1000), max(1, int((end - at) * 1000)))


def _history(row: Row) -> Arrival | None:
    """What `crater history export` wrote. Control tasks, and what never started, are left out."""
    if row.text("type", "batch") == "control" or not row.text("started_at_ms", ""):
        return None
    count, compute = row.whole("gpu_count", 0), row.whole("gpu_milli", MILLI)
    memory = row.whole("gpu_memory_mib", 0)
    types = tuple(name for name in row.text("gpu_types", "").split("|") if name)
    whole = compute == MILLI and not memory
    gpu = GpuRequest(count, compute, memory, exclusive=whole, types=types) if count else None
    limit_ms = row.whole("time_limit_ms", 0)
    saves = row.text("checkpoint_every_ms", "")
    spec = TaskSpec(
        row.text("name"),
        project=row.text("project"),
        user=row.text("user"),
        priority=row.whole("priority", 50),
        command=COMMAND,
        request=Request(row.whole("cpu_milli"), row.whole("memory_bytes"), row.whole("disk_bytes", 0), gpu),
        members=row.whole("members", 1, at_least=1),
        time_limit_ms=limit_ms or None,
        checkpoint_every_ms=row.whole("checkpoint_every_ms") if saves else None,
    )
    return Arrival(spec, row.whole("submitted_at_ms"), max(1, row.whole("ran_ms")))
