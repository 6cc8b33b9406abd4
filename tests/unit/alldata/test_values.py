"""Tasks and services in the platform's words: what is refused, and what is sent."""

from __future__ import annotations

import pytest

from crater_core.alldata import Cluster, OnlineService, TrainingTask
from crater_core.errors import InvalidRequest
from crater_core.wire.services import ServiceBody
from crater_core.wire.tasks import TaskSubmission

TRAINING = {
    "name": "cifar10-training",
    "image": "pytorch:2.4",
    "gpu": 1,
    "cpu": 8,
    "memory_gb": 32,
    "disk_gb": 50,
    "quota_policy": "training-quota",
    "mounts": {"/data/cifar10": "/workspace/data"},
    "output": "/output/cifar10-model",
}
SERVICE = {
    "name": "cifar10-inference",
    "image": "serve:1",
    "cpu": 4,
    "memory_gb": 16,
    "disk_gb": 10,
    "quota_policy": "inference-quota",
}


def test_a_training_task_means_what_the_form_says():
    sent = TaskSubmission.model_validate(TrainingTask(**TRAINING, external_id="7").body())
    request = sent.to_spec("ann").request
    assert (request.cpu_milli, request.memory_bytes, request.disk_bytes) == (8000, 32 * 10**9, 50 * 10**9)
    assert (request.gpu.count, request.gpu.exclusive) == (1, True)
    assert (sent.type, sent.quota_policy, sent.output_path) == ("training", "training-quota", "/output/cifar10-model")
    assert [(m.source, m.target, m.read_only) for m in sent.mounts] == [("/data/cifar10", "/workspace/data", True)]
    assert sent.labels == {"alldata.external_id": "7"}


def test_a_service_means_what_the_form_says():
    sent = ServiceBody.model_validate(OnlineService(**SERVICE).body())
    assert (sent.replicas, sent.health.path, sent.resources.memory) == (2, "/health", 16 * 10**9)
    assert (sent.type, sent.resources.gpu, sent.labels) == ("inference", 0, {"alldata.port": "8000"})


def test_part_of_a_gpu_and_of_a_gigabyte_are_exact():
    sent = TaskSubmission.model_validate(
        TrainingTask(name="x", command=["a"], gpu=0.25, gpu_memory_gb=10, memory_gb=0.1, gpu_type="a100 or h100").body()
    )
    assert (sent.resources.gpu, sent.resources.memory, sent.resources.gpu_type) == (250, 10**8, ("a100", "h100"))
    tiny = TrainingTask(name="x", command=["a"], memory_gb=1e-9).body()["resources"]["memory"]
    assert tiny == "0.000000001GB"


def test_gpus_are_named_by_index_for_programs_that_want_it():
    task = TaskSubmission.model_validate(TrainingTask(name="x", command=["a"], gpu=2, gpu_visible_devices="index").body())
    service = ServiceBody.model_validate(OnlineService(**SERVICE, gpu_visible_devices="index").body())
    assert (task.gpu_visible_devices, service.gpu_visible_devices) == ("index", "index")


def test_each_task_has_an_external_id_and_keeps_it():
    task, other = TrainingTask(name="x", command=["a"]), TrainingTask(name="x", command=["a"])
    assert task.external_id
    assert task.external_id != other.external_id
    assert task.body() == task.body()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu", 0),
        ("cpu", True),
        ("cpu", "8"),
        ("memory_gb", -1),
        ("memory_gb", float("nan")),
        ("disk_gb", -0.1),
        ("gpu", float("inf")),
        ("gpu_visible_devices", "0"),
        ("command", "python train.py"),
        ("mounts", {"data": "/x"}),
        ("mounts", {"/data/../etc": "/x"}),
        ("external_id", ""),
        ("retries", -1),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_name(field: str, value: object):
    with pytest.raises(InvalidRequest) as refused:
        TrainingTask(**{"name": "x", "command": ["a"], field: value})
    assert refused.value.fields["field"] == field
    assert str(refused.value).startswith(f"{field} must be ")


@pytest.mark.parametrize(("field", "value"), [("name", "a b"), ("port", 0), ("replicas", -1), ("health_path", "health")])
def test_a_service_is_checked_likewise(field: str, value: object):
    with pytest.raises(InvalidRequest) as refused:
        OnlineService(**{**SERVICE, field: value})
    assert refused.value.fields["field"] == field


def test_something_to_run_is_needed():
    with pytest.raises(InvalidRequest, match="image must be given, or else a command"):
        TrainingTask(name="x")


def test_a_clusters_token_does_not_show():
    cluster = Cluster(name="crater-prod", scheduler_address="http://a:1", token="s3cret")
    assert "s3cret" not in repr(cluster)
    with pytest.raises(InvalidRequest, match="sync_interval_s must be a number above 0"):
        Cluster(name="c", scheduler_address="http://a:1", sync_interval_s=0)
