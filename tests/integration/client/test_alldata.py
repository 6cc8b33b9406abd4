"""The data platform's API where a real agent runs what it asks for."""

from __future__ import annotations

import sys
import time

import pytest

from crater_core.alldata import AllDataClient, Cluster, OnlineService, TrainingTask
from crater_core.errors import NotFound


@pytest.fixture
def platform(world):
    with AllDataClient(Cluster(name="crater-test", scheduler_address=world.url), user="ann") as client:
        yield client


def a_training(script: str, **fields) -> TrainingTask:
    return TrainingTask(name="train", command=[sys.executable, "-c", script], cpu=0.1, memory_gb=0.1, **fields)


def test_a_training_task_runs_and_is_read_by_its_external_id(platform):
    state = platform.submit_training(a_training("print('epoch 1'); raise SystemExit(3)", external_id="job-1"))
    ended = platform.wait("job-1", 20)
    assert (ended.task_id, ended.state, ended.exit_code, ended.ended) == (state.task_id, "failed", 3, True)
    assert (ended.why, ended.node) == ("It ended with exit code 3.", "n1")
    assert "".join(platform.logs("job-1")) == "epoch 1\n"
    assert list(platform.follow(state)) == [("stdout", "epoch 1\n")]
    assert [event.what for event in platform.events(state.task_id)][-1] == "failed"
    with pytest.raises(NotFound, match="no task has the external id job-2"):
        platform.state("job-2")


def test_a_failed_training_is_tried_again_as_often_as_asked(platform):
    ended = platform.wait(platform.submit_training(a_training("raise SystemExit(1)", retries=1)), 30)
    assert [event.what for event in platform.events(ended)].count("started") == 2


def test_tasks_are_for_the_platforms_user(platform, world):
    state = platform.for_user("bob").submit_training(a_training("pass"))
    assert world.client.task(state.task_id).user == "bob"
    assert world.client.task(platform.submit_training(a_training("pass")).task_id).user == "ann"


def test_a_service_is_deployed_until_its_replicas_answer(platform):
    service = OnlineService(
        name="pages",
        command=[sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"],
        cpu=0.2,
        memory_gb=0.1,
        replicas=1,
        health_path="/",
    )
    platform.deploy_service(service)
    ready = platform.wait_service("pages", 60)
    (replica,) = ready.replica_states
    assert (ready.state, ready.ready, replica.ready, replica.node) == ("ready", 1, True, "n1")
    assert replica.url is not None
    assert platform.service_state("pages").version == 1
    platform.remove("pages")


def test_an_overview_is_as_old_as_the_interval_allows(platform, world):
    first = platform.overview()
    assert platform.overview() is first
    assert platform.overview(fresh=True) is not first
    assert first.nodes_ready == 1
    with AllDataClient(Cluster(name="c", scheduler_address=world.url, sync_interval_s=0.01)) as eager:
        before = eager.overview()
        time.sleep(0.02)
        assert eager.overview() is not before
