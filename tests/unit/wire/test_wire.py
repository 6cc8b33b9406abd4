"""Messages: strict on the way in, the same after a round trip, and errors that find their way back."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from crater_core import errors
from crater_core.model.allocation import Allocation
from crater_core.model.quota import Limits
from crater_core.model.resources import Amounts, GpuRequest
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.store.codec import decode, encode
from crater_core.wire.agents import lease_of
from crater_core.wire.nodes import QuotaBody
from crater_core.wire.problems import error_of, problem_of, status_of
from crater_core.wire.resources import Resources
from crater_core.wire.services import ServiceBody
from crater_core.wire.tasks import TaskSubmission

COMMAND = ("python", "train.py")


def refusal(**fields) -> str:
    with pytest.raises(ValidationError) as refused:
        TaskSubmission.model_validate({"name": "x", "command": COMMAND, **fields})
    return str(refused.value)


def test_a_submission_survives_being_sent():
    task = TaskSubmission(
        name="train",
        command=COMMAND,
        resources={"cpu": "500m", "memory": "1GiB", "gpu": 0.25, "gpu_memory": "10GiB", "gpu_type": "A100"},
        time_limit="2m",
        prefer_labels={"zone": "a"},
        data_bytes={"n1": "3GiB"},
        retry={"attempts": 3, "on_failure": True, "backoff": "5s"},
    )
    assert TaskSubmission.model_validate_json(task.model_dump_json()) == task
    spec = task.to_spec("ann")
    assert spec.request.gpu == GpuRequest(1, 250, 10_240, exclusive=False, types=("a100",))
    assert (spec.prefer_labels, spec.data_bytes) == ({"zone": "a"}, {"n1": 3 * 2**30})
    assert (spec.time_limit_ms, spec.retry.backoff_ms, spec.user) == (120_000, 5_000, "ann")


def test_how_gpus_are_named_reaches_the_node_through_store_and_lease():
    tasks = [TaskSubmission(name="x", command=COMMAND, **fields) for fields in ({}, {"gpu_visible_devices": "index"})]
    specs = [decode(TaskSpec, encode(task.to_spec("ann"))) for task in tasks]
    specs.append(ServiceBody(name="web", command=COMMAND, gpu_visible_devices="index").to_template("ann"))
    held = Allocation("a", "t", 1, 0, "n1", 1, Amounts())
    leases = [lease_of(Task("t", spec, TaskStatus.ALLOCATED, 0, 0), held, restartable=True) for spec in specs]
    assert [lease.gpu_visible_devices for lease in leases] == ["uuid", "index", "index"]


def test_a_service_survives_being_sent():
    body = ServiceBody(name="web", command=("serve", "{port}"), replicas=2, resources={"cpu": 2}, health={"interval": "1s"})
    assert ServiceBody.model_validate_json(body.model_dump_json()) == body
    template = body.to_template("ann")
    assert (template.service, template.request.cpu_milli, template.health.interval_ms) == ("web", 2000, 1_000)


@pytest.mark.parametrize(
    ("asked", "request_"),
    [
        ({"gpu": 2}, GpuRequest(2)),
        ({"gpu": 0.25}, GpuRequest(1, 250, 0, exclusive=False)),
        ({"gpu_memory": "10GiB"}, GpuRequest(1, 0, 10_240, exclusive=False)),
        ({"gpu": 0.5, "gpu_devices": 2}, GpuRequest(2, 500, 0, exclusive=False)),
        ({"gpu": 1, "gpu_type": "A100 or 3g.40gb"}, GpuRequest(1, types=("3g.40gb", "a100"))),
        ({"gpu": 1, "gpu_type": ["h100", "a100 or 1c.3g.40gb"]}, GpuRequest(1, types=("1c.3g.40gb", "a100", "h100"))),
        ({"gpu": 2, "gpu_type": "1g.10gb+me or 1g.10gb"}, GpuRequest(2, types=("1g.10gb", "1g.10gb+me"))),
        ({"mig_profile": "1c.3g.40gb", "gpu_type": "a100"}, GpuRequest(1, types=("a100",), mig_profile="1c.3g.40gb")),
        ({}, None),
    ],
)
def test_gpus_are_asked_for_whole_or_in_shares(asked, request_):
    assert Resources.model_validate(asked).to_request().gpu == request_


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"colour": "red"}, "colour"),
        ({"resources": {"gpus": 1}}, "resources.gpus"),
        ({"resources": {"gpu": 1.5}}, "whole number or below 1"),
        ({"resources": {"gpu": -1}}, "negative"),
        ({"resources": {"memory": "10 parsecs"}}, "unknown unit"),
        ({"resources": {"gpu": 1, "gpu_memory": "1GiB"}}, "comes with all its memory"),
        ({"resources": {"gpu_type": "a100"}}, "need gpu or gpu_memory"),
        ({"resources": {"gpu": 0.5, "gpu_type": "a100 or 3g.40gb"}}, "a MIG slice (3g.40gb) is given whole"),
        ({"resources": {"gpu": 2, "gpu_type": "a100 or 3g.40gb"}}, "gpu: 2 could be a card and a slice"),
        ({"resources": {"mig_profile": "any", "gpu_type": "3g.40gb"}}, "in gpu_type (3g.40gb) or in mig_profile, not in both"),
        ({"priority": 101}, "priority"),
        ({"gpu_visible_devices": "number"}, "'uuid' or 'index'"),
        ({"command": []}, "command is missing"),
        ({"command": ["a\0b"]}, "NUL"),
        ({"env": {"1A": "x"}}, "not a variable name"),
        ({"env": {"CRATER_NODE": "x"}}, "set by the agent"),
        ({"working_dir": "../up"}, "absolute path"),
        ({"mounts": [{"source": "/data/../etc", "target": "/x"}]}, "absolute path"),
        ({"time_limit": "1 fortnight"}, "unknown unit"),
        ({"name": ""}, "name"),
        ({"image": "-rm"}, "image"),
        ({"members": 0}, "members"),
        ({"warm_preload": ["json"]}, "python -m MODULE"),
        ({"command": ["python", "-m", "x"], "warm_preload": ["os; import sys"]}, "warm_preload"),
    ],
)
def test_what_is_wrong_is_named(fields, says):
    assert says in refusal(**fields)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ImpossibleRequest("too large", field="resources.gpu"), 422),
        (errors.NotFound("no such task", task="t1"), 404),
        (errors.QuotaExceeded("too much"), 403),
        (errors.Unauthenticated("who are you"), 401),
        (errors.StaleTerm("old"), 409),
        (errors.NotLeader("ask there", leader="http://b"), 421),
        (errors.StoreUnavailable("disk full"), 503),
        (errors.RuntimeFailed("no docker"), 502),
    ],
)
def test_an_error_finds_its_way_back_as_the_same_error(error, status):
    assert status_of(error) == status
    back = error_of(status, problem_of(error))
    assert (type(back), back.message, back.fields) == (type(error), error.message, error.fields)


def test_an_unknown_problem_becomes_the_nearest_error():
    assert type(error_of(404, {"detail": "gone"})) is errors.NotFound
    assert type(error_of(500, {})) is errors.Unavailable
    assert type(error_of(418, {"type": "urn:crater:teapot"})) is errors.InvalidRequest


def test_a_guarantee_above_its_limit_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match=r"guarantee.gpu is 4, more than limits.gpu, 2"):
        QuotaBody.model_validate({"limits": {"gpu": 2}, "guarantee": {"gpu": 4}})
    with pytest.raises(ValidationError, match="lend needs a guarantee"):
        QuotaBody.model_validate({"limits": {"gpu": 2}, "lend": True})
    policy = QuotaBody.model_validate({"guarantee": {"gpu": 2, "memory": "1GB"}, "lend": True}).to_policy("q")
    assert (policy.guarantee, policy.lend) == (Limits(gpu_milli=2000, memory_bytes=10**9), True)
