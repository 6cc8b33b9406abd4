"""The files in docs/gpu-sharing.md are right: they load, and what they ask for fits where the page says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import yaml
from builders import a_node, a_snapshot, a_task

from crater_agent.config import AgentConfig, GpuPool
from crater_core.configuration import parse_yaml
from crater_core.model.node import SharingMode
from crater_core.model.plan import Refused
from crater_core.model.reason import ReasonCode
from crater_core.model.resources import GpuRequest
from crater_core.scheduling import admit
from crater_core.scheduling.cycle import schedule
from crater_core.wire.services import ServiceBody
from crater_core.wire.tasks import TaskSubmission

PAGE = (Path(__file__).parents[3] / "docs" / "gpu-sharing.md").read_text()


def _file(name: str) -> str:
    found = re.findall(rf"```yaml\n# {re.escape(name)}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1, f"{name} stands once on the page"
    return found[0]


def test_four_inference_servers_fit_on_the_card_and_a_fifth_does_not():
    config = parse_yaml(_file("agent.yaml"), AgentConfig, "agent.yaml")
    service = ServiceBody.model_validate(yaml.safe_load(_file("service.yaml")))
    assert (config.gpu_sharing.mode, service.replicas) == (SharingMode.MPS, 4)
    pool = next(pool for pool in config.resource_pools or () if isinstance(pool, GpuPool))
    sharing, overcommit = config.gpu_sharing.mode, config.gpu_sharing.overcommit_milli
    node = a_node(
        cpu=32, memory_gib=220, gpus=1, gpu_memory_mib=81_920, sharing=sharing, overcommit_milli=overcommit, gpu_pool=pool.name
    )
    template = service.to_template("ann")
    tasks = [replace(a_task(f"r{number}"), spec=template) for number in range(5)]
    plan = schedule(a_snapshot([node], tasks), 0)
    grants = [placement.grants for placement in plan.placements]
    assert len(grants) == 4
    assert [(g.uuid, g.compute_milli, g.memory_mib) for (g,) in grants] == [("GPU-n1-0", 250, 18_432)] * 4


def test_the_training_job_takes_a_whole_card_or_a_slice():
    spec = TaskSubmission.model_validate(yaml.safe_load(_file("train.yaml"))).to_spec("ann")
    assert spec.request.gpu == GpuRequest(1, types=("3g.40gb", "a100", "h100"))
    model = "NVIDIA A100-SXM4-80GB MIG {}"
    nodes = [
        a_node("card", cpu=8, memory_gib=64, gpus=1, gpu_type="nvidia-h100", model="NVIDIA H100 80GB HBM3"),
        a_node(
            "large",
            cpu=32,
            memory_gib=256,
            gpus=1,
            gpu_type="nvidia-a100",
            model=model.format("3g.40gb"),
            sharing=SharingMode.MIG,
        ),
        a_node(
            "small",
            cpu=32,
            memory_gib=256,
            gpus=4,
            gpu_type="nvidia-a100",
            model=model.format("1g.10gb"),
            sharing=SharingMode.MIG,
        ),
        a_node("other", cpu=32, memory_gib=256, gpus=4, gpu_type="nvidia-l4", model="NVIDIA L4"),
    ]
    tasks = [replace(a_task(f"t{number}", at_ms=number), spec=spec) for number in range(3)]
    plan = schedule(a_snapshot(nodes, tasks), 0)
    assert {(placement.node, placement.grants[0].sharing) for placement in plan.placements} == {
        ("card", SharingMode.EXCLUSIVE),
        ("large", SharingMode.MIG),
    }
    assert plan.waiting["t2"].code is ReasonCode.NO_ROOM
    answer = admit(spec, a_snapshot([nodes[2]]))
    assert isinstance(answer, Refused)
    assert answer.reason.facts["present"] == "nvidia-a100 1g.10gb (mig)"
