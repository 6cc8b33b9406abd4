"""What is refused at submit, and which field is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import a_node, a_snapshot, a_spec, a_task

from crater_core.model.node import NodeStatus, SharingMode
from crater_core.model.plan import Admitted, Refused
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode, next_step, sentence
from crater_core.model.resources import GpuRequest, Request
from crater_core.model.units import GIB
from crater_core.scheduling import admit, schedule


def refusal(nodes: list[Any], policies: list[QuotaPolicy] | None = None, **spec: Any) -> tuple[ReasonCode, str] | None:
    answer = admit(a_spec(**spec), a_snapshot(nodes, (), policies or []))
    return (answer.reason.code, answer.field) if isinstance(answer, Refused) else None


def test_a_request_that_some_node_could_run_is_admitted() -> None:
    assert refusal([a_node(gpus=2)], gpu=2000, cpu=8000, memory_gib=64, disk_gib=100) is None


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"cpu": 9000}, "resources.cpu"),
        ({"memory_gib": 65}, "resources.memory"),
        ({"disk_gib": 101}, "resources.disk"),
        ({"gpu": 3000}, "resources.gpu"),
        ({"gpu_memory_mib": 50_000}, "resources.gpu_memory"),
        ({"gpu": 100, "gpu_count": 3}, "resources.gpu"),
        ({"ports": 1001}, "ports"),
    ],
)
def test_larger_than_any_node_names_the_field(spec: dict[str, int], field: str) -> None:
    assert refusal([a_node(gpus=2, sharing=SharingMode.TIME_SLICE)], **spec) == (ReasonCode.LARGER_THAN_ANY_NODE, field)


def test_shares_of_several_gpus_by_mps_are_refused_with_the_numbers_and_the_fix() -> None:
    """A program has one MPS daemon, and each daemon one device: such a task would be placed only to fail."""
    nodes = [a_node("a", gpus=4, sharing=SharingMode.MPS), a_node("b", gpus=1, sharing=SharingMode.TIME_SLICE)]
    answer = admit(a_spec(gpu=500, gpu_count=2), a_snapshot(nodes))
    assert answer == Refused(Reason.of(ReasonCode.MPS_ONE_GPU, count=2, devices=4), "resources.gpu_devices")
    assert sentence(answer.reason) == (
        "It asks for shares of 2 GPUs of one node. By MPS, which shares 4 of the GPUs that could give one, "
        "a program has a share of one GPU only, and no node has 2 others."
    )
    assert next_step(answer.reason).startswith("Leave out gpu_devices for a share of one GPU, or ask for whole GPUs (gpu: 2)")
    assert refusal(nodes, gpu_memory_mib=1_000, gpu_count=2) == (ReasonCode.MPS_ONE_GPU, "resources.gpu_devices")
    assert refusal(nodes, gpu=500) is None
    assert refusal(nodes, gpu=2000) is None, "whole devices are nobody else's, whatever their mode"


def test_what_mps_has_no_part_in_is_told_as_before() -> None:
    mps = a_node("a", gpus=4, sharing=SharingMode.MPS)
    spec = {"gpu": 500, "gpu_count": 2}
    assert refusal([mps, a_node("b", gpus=2, sharing=SharingMode.TIME_SLICE)], **spec) is None
    assert refusal([mps], **spec, cpu=9000) == (ReasonCode.MPS_ONE_GPU, "resources.gpu_devices")
    assert refusal([a_node("b", gpus=2)], **spec) == (ReasonCode.GPU_TYPE_MISSING, "resources.gpu")
    assert refusal([mps], gpu_memory_mib=50_000, gpu_count=2) == (ReasonCode.LARGER_THAN_ANY_NODE, "resources.gpu_memory")


def test_the_largest_node_is_told_with_its_numbers() -> None:
    answer = admit(a_spec(cpu=10_000), a_snapshot([a_node("a", cpu=4), a_node("b", cpu=8)]))
    assert answer == Refused(
        Reason.of(ReasonCode.LARGER_THAN_ANY_NODE, resource="cpu", wanted=10_000, largest=8000, node="b"), "resources.cpu"
    )


def test_lost_and_cordoned_nodes_count_as_known() -> None:
    nodes = [replace(a_node("a", gpus=4), status=NodeStatus.LOST), replace(a_node("b", cpu=64), cordoned=True)]
    assert refusal(nodes, gpu=4000) is None
    assert refusal(nodes, cpu=64_000) is None
    assert refusal(nodes, gpu=5000) == (ReasonCode.LARGER_THAN_ANY_NODE, "resources.gpu")


def test_a_request_for_a_kind_of_gpu_that_nodes_have_in_another_form_only_says_what_they_have() -> None:
    mig = a_node("mig", gpus=2, model="NVIDIA A100-SXM4-80GB MIG 2g.20gb", sharing=SharingMode.MIG)
    answer = admit(a_spec(gpu=1000, gpu_types=("a100",)), a_snapshot([mig]))
    assert answer == Refused(
        Reason.of(ReasonCode.GPU_TYPE_MISSING, types="a100", present="a100 2g.20gb (mig)"), "resources.gpu_type"
    )
    assert refusal([mig], gpu=1000) == (ReasonCode.GPU_TYPE_MISSING, "resources.gpu")
    assert refusal([a_node(gpus=2)], gpu=500) == (ReasonCode.GPU_TYPE_MISSING, "resources.gpu")
    assert refusal([mig], gpu=1000, gpu_types=("a100", "2g.20gb")) is None
    assert refusal([mig], gpu=3000, gpu_types=("2g.20gb",)) == (ReasonCode.LARGER_THAN_ANY_NODE, "resources.gpu")
    slices = replace(a_spec(), request=Request(1000, GIB, 0, GpuRequest(1, mig_profile="3g.40gb")))
    answer = admit(slices, a_snapshot([mig, a_node("card", gpus=1)]))
    assert isinstance(answer, Refused)
    assert (answer.reason.facts["types"], answer.field) == ("MIG slice 3g.40gb", "resources.mig_profile")


def test_overcommit_is_between_tasks_and_no_share_is_larger_than_its_card() -> None:
    node = a_node(gpus=1, sharing=SharingMode.TIME_SLICE, gpu_memory_mib=40_960, overcommit_milli=1500)
    assert refusal([node], gpu_memory_mib=40_960) is None
    for compute in (0, 100):
        answer = admit(a_spec(gpu=compute, gpu_memory_mib=40_961), a_snapshot([node]))
        assert answer == Refused(
            Reason.of(ReasonCode.LARGER_THAN_ANY_NODE, resource="gpu_memory", wanted=40_961, largest=40_960, node="n1"),
            "resources.gpu_memory",
        )
    tasks = [a_task(f"t{i}", gpu=100, gpu_memory_mib=30_720, at_ms=i) for i in range(3)]
    assert len(schedule(a_snapshot([node], tasks), 0).placements) == 2, "half as much memory again is given out in all"


def test_with_no_node_registered_everything_may_wait() -> None:
    assert refusal([], cpu=10**9, pools=("later",)) is None


def test_only_nodes_of_the_kind_asked_for_are_measured() -> None:
    nodes = [a_node("a", gpus=8, gpu_type="t4", model="T4"), a_node("b", gpus=2)]
    assert refusal(nodes, gpu=8000, gpu_types=("a100",)) == (ReasonCode.LARGER_THAN_ANY_NODE, "resources.gpu")
    assert refusal(nodes, gpu=8000, gpu_types=("h100",)) is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"pools": ("nowhere",)}, (ReasonCode.UNKNOWN_POOL, "pools")),
        ({"quota_policy": "none"}, (ReasonCode.UNKNOWN_QUOTA_POLICY, "quota_policy")),
        ({"strategy": "magic"}, (ReasonCode.UNKNOWN_STRATEGY, "strategy")),
        ({"priority": 101}, (ReasonCode.BAD_REQUEST, "priority")),
        ({"priority": -1}, (ReasonCode.BAD_REQUEST, "priority")),
        ({"cpu": -1}, (ReasonCode.BAD_REQUEST, "resources.cpu")),
        ({"memory_gib": -1}, (ReasonCode.BAD_REQUEST, "resources.memory")),
        ({"time_limit_ms": 0}, (ReasonCode.BAD_REQUEST, "time_limit")),
        ({"command": ()}, (ReasonCode.BAD_REQUEST, "command")),
        ({"members": 0}, (ReasonCode.BAD_REQUEST, "members")),
        ({"type": "control", "gpu": 1000}, (ReasonCode.BAD_REQUEST, "resources.gpu")),
    ],
)
def test_wrong_values_and_unknown_names_are_refused(spec: dict[str, Any], expected: tuple[ReasonCode, str]) -> None:
    assert refusal([a_node(gpus=1)], **spec) == expected


@pytest.mark.parametrize(
    "gpu",
    [GpuRequest(0), GpuRequest(1, 500), GpuRequest(1, 0, 0, exclusive=False), GpuRequest(1, 1001, 0, exclusive=False)],
)
def test_an_inconsistent_gpu_request_is_refused(gpu: GpuRequest) -> None:
    spec = replace(a_spec(), request=Request(1000, GIB, 0, gpu))
    answer = admit(spec, a_snapshot([a_node(gpus=2, sharing=SharingMode.MPS)]))
    assert isinstance(answer, Refused)
    assert (answer.reason.code, answer.field) == (ReasonCode.BAD_REQUEST, "resources.gpu")


def test_larger_than_the_whole_quota_is_refused_and_used_up_is_not() -> None:
    policies = [QuotaPolicy("q", ("default",), Limits(cpu_milli=2000), Limits(memory_bytes=GIB))]
    assert refusal([a_node()], policies, cpu=3000) == (ReasonCode.LARGER_THAN_QUOTA, "resources.cpu")
    assert refusal([a_node()], policies, cpu=2000, memory_gib=2) == (ReasonCode.LARGER_THAN_QUOTA, "resources.memory")
    assert refusal([a_node()], policies, cpu=2000) is None


def test_a_policy_of_other_projects_is_refused() -> None:
    policies = [QuotaPolicy("q", ("ml",))]
    assert refusal([a_node()], policies, quota_policy="q") == (ReasonCode.BAD_REQUEST, "quota_policy")


def test_an_admitted_answer_is_remembered_only_until_a_node_declares_otherwise() -> None:
    snapshot = a_snapshot([a_node("a", cpu=4)])
    assert isinstance(admit(a_spec(cpu=8000), snapshot), Refused)
    snapshot.advance([a_node("b", cpu=8)])
    assert admit(a_spec(cpu=8000), snapshot) == Admitted()
    snapshot.advance([a_node("b", cpu=4)])
    assert isinstance(admit(a_spec(cpu=8000), snapshot), Refused)
