"""Wrong requests are refused when they are submitted, with the field and the numbers: through the real HTTP door."""

from __future__ import annotations

from typing import Any

import pytest
from harness import SchedulerProcess

from .conftest import Api, FakeAgent

Json = dict[str, Any]


@pytest.fixture
def door(scheduler: SchedulerProcess, api: Api) -> Api:
    """Nodes with two GPUs, with one of unknown size, with two that MPS shares, and with a MIG slice."""
    FakeAgent(scheduler.url, "n1", gpus=2).register()
    device = {"uuid": "GPU-odd", "index": 0, "model": "Odd", "gpu_type": "odd", "memory_mib": 0, "pool": "n2-gpu"}
    pools = {"n2-cpu": "cpu", "n2-gpu": "gpu"}
    FakeAgent(scheduler.url, "n2", pools=pools, devices=[{**device, "sharing": "time_slice"}]).register()
    card = {**device, "model": "T4", "gpu_type": "t4", "memory_mib": 16_000, "pool": "n3-gpu", "sharing": "mps"}
    cards = [{**card, "uuid": f"GPU-t4-{index}", "index": index} for index in range(2)]
    FakeAgent(scheduler.url, "n3", pools={"n3-cpu": "cpu", "n3-gpu": "gpu"}, devices=cards).register()
    slice_ = {**card, "uuid": "MIG-l4", "gpu_type": "nvidia-l4", "model": "L4 MIG 2g.6gb", "pool": "n4-gpu", "sharing": "mig"}
    FakeAgent(scheduler.url, "n4", pools={"n4-cpu": "cpu", "n4-gpu": "gpu"}, devices=[slice_]).register()
    return api


@pytest.mark.parametrize(
    ("wrong", "status", "field", "words"),
    [
        ({"resources": {"gpu": -0.25}}, 422, "resources.gpu", "must not be negative, found -0.25"),
        ({"resources": {"gpu": "1001m"}}, 422, "resources", "whole number or below 1, found 1.001"),
        ({"resources": {"gpu": 0.5, "gpu_memory": "-1GiB"}}, 422, "resources.gpu_memory", "-1GiB"),
        ({"resources": {"gpu_memory": "1GiB", "gpu_type": "odd"}}, 422, "resources.gpu_memory", "has 0 B"),
        ({"resources": {"gpu_memory": "50GiB", "gpu_type": "a100"}}, 422, "resources.gpu_memory", "asks for 50 GiB"),
        ({"resources": {"gpu": 3}}, 422, "resources.gpu", "asks for 3 GPU, the largest node (n1) has 2"),
        ({"resources": {"mig_profile": "2g.20gb", "gpu": 0.5}}, 422, "resources", "mig_profile is for whole slices"),
        ({"resources": {"gpu": 2, "gpu_type": "a100 or 2g.20gb"}}, 422, "resources", "gpu: 2 could be a card and a slice"),
        ({"resources": {"gpu": 1, "gpu_type": "l4"}}, 422, "resources.gpu_type", "nvidia-l4 2g.6gb (mig)"),
        (
            {"resources": {"gpu": 0.5, "gpu_devices": 2, "gpu_type": "t4"}},
            422,
            "resources.gpu_devices",
            "By MPS, which shares 2 of the GPUs that could give one",
        ),
        (
            {"members": 3, "resources": {"gpu": 1, "gpu_type": "a100"}},
            422,
            "members",
            "3 members, all nodes together could",
        ),
        ({"members_min": 3, "members_max": 2}, 422, "", "members_min (3) must not be above members_max (2)"),
        ({"members": 5, "spread": "require"}, 422, "members", "5 members, all nodes together could"),
        ({"anti_affinity": "require"}, 400, "anti_affinity", "give the task a group"),
        ({"strategy": "magic"}, 400, "strategy", "No strategy is called magic; strategies are: affinity, best_fit"),
        ({"retry": {"on_oom": {"factor": 1}}}, 422, "retry.on_oom.factor", "1050"),
        ({"after": [{"task": "t" + "0" * 18, "when": "sometimes"}]}, 422, "after.0.when", "'succeeded', 'failed' or 'ended'"),
    ],
)
def test_a_wrong_request_is_refused_with_its_field_and_numbers(door: Api, wrong: Json, status: int, field: str, words: str):
    answer = door.http.post("/v1/tasks", json={"name": "wrong", "command": ["true"], **wrong})
    problem = answer.json()
    assert (answer.status_code, problem.get("field")) == (status, field), problem
    assert words in problem["detail"]
