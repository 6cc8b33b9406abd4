"""Tasks from submit to end, told over HTTP with an agent that is nothing but its calls."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from harness import SchedulerProcess, wait_until

from .conftest import GIB, Api, FakeAgent


@pytest.fixture
def agent(scheduler: SchedulerProcess, request: pytest.FixtureRequest) -> FakeAgent:
    """A node of this test's own, and tasks that ask for its pool go nowhere else."""
    made = FakeAgent(scheduler.url, f"n-{abs(hash(request.node.name)) % 10**8}", cpu=4, gpus=1)
    made.register()
    return made


def on(agent: FakeAgent, **fields: Any) -> dict[str, Any]:
    return {"pools": [f"{agent.name}-cpu"], **fields}


def test_a_task_runs_and_ends(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    assert (task["status"], task["node"]) == ("allocated", agent.name)
    lease = agent.lease_of(task["id"])
    assert agent.report(lease, "starting") == []
    assert agent.report(lease, "running") == []
    assert api.task(task["id"])["status"] == "running"
    use = {"cpu_ms": 1500, "memory_peak_bytes": GIB}
    assert agent.report(lease, "succeeded", exit_code=0, use=use) == []
    ended = api.task(task["id"])
    assert (ended["status"], ended["exit_code"], ended["memory_peak_bytes"]) == ("succeeded", 0, GIB)
    assert api.whats(task["id"]) == ["queued", "allocated", "started", "succeeded"]
    assert agent.leases()["leases"] == []


def test_a_failure_keeps_its_reason_with_numbers(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    reason = {"code": "oom_killed", "facts": {"limit_bytes": GIB, "peak_bytes": 2 * GIB}}
    agent.report(agent.lease_of(task["id"]), "failed", exit_code=137, reason=reason)
    ended = api.task(task["id"])
    assert ended["status"] == "failed"
    assert ended["reason"]["message"] == "It was killed for using more memory than its limit: limit 1 GiB, peak 2 GiB."


def test_a_report_that_comes_twice_changes_nothing(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    lease = agent.lease_of(task["id"])
    agent.report(lease, "running")
    revision = api.task(task["id"])["revision"]
    agent.report(lease, "running")
    agent.report(lease, "starting")
    assert api.task(task["id"])["revision"] == revision
    agent.report(lease, "succeeded", exit_code=0)
    assert agent.report(lease, "failed", exit_code=1) == [lease["allocation"]]
    assert api.task(task["id"])["status"] == "succeeded"


def test_a_report_under_another_token_is_stale(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    lease = agent.lease_of(task["id"])
    assert agent.report({**lease, "token": lease["token"] + 1}, "failed") == [lease["allocation"]]
    assert api.task(task["id"])["status"] == "allocated"


def test_what_does_not_fit_waits_with_a_reason_and_runs_when_there_is_room(api: Api, agent: FakeAgent) -> None:
    first = api.submit(**on(agent, resources={"cpu": 3}))
    second = api.submit(**on(agent, resources={"cpu": 3}))
    assert (second["status"], second["reason"]["code"]) == ("queued", "no_room")
    agent.run(first["id"])
    assert api.task(second["id"])["status"] == "allocated"


def test_a_submit_wakes_the_agent_that_waits(api: Api, agent: FakeAgent) -> None:
    revision = agent.leases()["revision"]
    got: dict[str, Any] = {}

    def wait() -> None:
        got.update(agent.leases(after=revision, wait=30), at=time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    assert not got
    began = time.monotonic()
    task = api.submit(**on(agent))
    waiting.join(10)
    assert [lease["task"] for lease in got["leases"]] == [task["id"]]
    assert got["at"] - began < 1


def test_a_long_poll_ends_after_its_time_with_the_whole_list(agent: FakeAgent) -> None:
    revision = agent.leases()["revision"]
    began = time.monotonic()
    assert agent.leases(after=revision, wait=0.3)["leases"] == []
    assert 0.25 < time.monotonic() - began < 5


def test_an_agent_that_knows_a_later_revision_than_there_is_gets_the_list_at_once(agent: FakeAgent) -> None:
    began = time.monotonic()
    agent.leases(after=10**9, wait=20)
    assert time.monotonic() - began < 5


def test_waiting_for_a_task_ends_with_the_task(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    ends = threading.Timer(0.3, agent.run, (task["id"],))
    ends.start()
    seen, view = [], task
    while view["status"] not in ("succeeded", "failed"):
        view = api.task(task["id"], wait=20, after=view["revision"])
        seen.append(view["status"])
    ends.join()
    assert seen == ["running", "succeeded"]
    assert api.task(task["id"], wait=20)["status"] == "succeeded"


def test_a_queued_task_is_cancelled_at_once(api: Api, agent: FakeAgent) -> None:
    blocker = api.submit(**on(agent, resources={"cpu": 4}))
    task = api.submit(**on(agent, resources={"cpu": 4}))
    answer = api.http.post(f"/v1/tasks/{task['id']}/cancel", json={"reason": "not needed"})
    assert answer.json()["status"] == "cancelled"
    assert answer.json()["reason"]["message"] == "It was cancelled by local: not needed."
    again = api.http.post(f"/v1/tasks/{task['id']}/cancel")
    assert (again.status_code, again.json()["revision"]) == (200, answer.json()["revision"])
    agent.run(blocker["id"])


def test_a_running_task_is_stopped_by_its_agent(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    lease = agent.lease_of(task["id"])
    agent.report(lease, "running")
    answer = api.http.post(f"/v1/tasks/{task['id']}/cancel", json={})
    assert (answer.json()["status"], answer.json()["cancelling"]) == ("running", True)
    assert agent.lease_of(task["id"])["stop"] is True
    agent.report(lease, "cancelled", exit_code=143)
    assert api.task(task["id"])["status"] == "cancelled"


def test_a_group_is_cancelled_together(api: Api, agent: FakeAgent) -> None:
    group = f"run/{agent.name}"
    tasks = [api.submit(**on(agent, resources={"cpu": 3}, group=group)) for _ in range(3)]
    answer = api.http.post(f"/v1/groups/{group}/cancel", json={})
    assert answer.status_code == 200, answer.text
    assert sorted(t["id"] for t in answer.json()["tasks"]) == sorted(t["id"] for t in tasks)
    agent.report(agent.lease_of(tasks[0]["id"]), "cancelled")
    assert {t["status"] for t in api.get("/v1/tasks", group=group)["tasks"]} == {"cancelled"}


def test_a_repeat_with_the_same_key_is_the_same_task(api: Api, agent: FakeAgent) -> None:
    first = api.submit(key=f"k-{agent.name}", **on(agent))
    answer = api.http.post(
        "/v1/tasks", json={"name": "job", "command": ["true"], **on(agent)}, headers={"Idempotency-Key": f"k-{agent.name}"}
    )
    assert (answer.status_code, answer.json()["id"]) == (200, first["id"])
    other = api.http.post(
        "/v1/tasks", json={"name": "other", "command": ["true"]}, headers={"Idempotency-Key": f"k-{agent.name}"}
    )
    assert (other.status_code, other.json()["type"], other.json()["task"]) == (409, "urn:crater:conflict", first["id"])
    agent.run(first["id"])
    assert api.submit(key=f"k-{agent.name}", **on(agent))["status"] == "succeeded"
    assert [t["id"] for t in api.get("/v1/tasks", key=f"k-{agent.name}")["tasks"]] == [first["id"]]


def test_a_batch_is_taken_whole_or_not_at_all(api: Api, agent: FakeAgent) -> None:
    good = {"name": "job", "command": ["true"], **on(agent, group=f"b-{agent.name}", resources={"cpu": 2})}
    bad = {**good, "resources": {"cpu": 500}}
    answer = api.http.post("/v1/tasks:batch", json={"tasks": [good, bad]})
    assert (answer.status_code, answer.json()["field"][:8]) == (422, "tasks.1.")
    assert api.get("/v1/tasks", group=f"b-{agent.name}")["tasks"] == []
    answer = api.http.post("/v1/tasks:batch", json={"tasks": [good] * 5})
    assert answer.status_code == 201
    ids = [task["id"] for task in answer.json()["tasks"]]
    assert ids == sorted(ids)
    page = api.get("/v1/tasks", group=f"b-{agent.name}", limit=3)
    rest = api.get("/v1/tasks", group=f"b-{agent.name}", limit=3, cursor=page["next_cursor"])
    assert [t["id"] for t in page["tasks"] + rest["tasks"]] == ids[::-1]
    assert rest["next_cursor"] is None


def test_an_impossible_task_is_refused_with_the_largest_nodes_numbers(api: Api, agent: FakeAgent) -> None:
    answer = api.http.post("/v1/tasks", json={"name": "huge", "command": ["true"], **on(agent, resources={"cpu": 1000})})
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (422, "urn:crater:impossible_request")
    assert problem["field"] == "resources.cpu"
    assert "1000 cores" in problem["detail"]
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_unknown_pool_is_refused_by_name(api: Api) -> None:
    answer = api.http.post("/v1/tasks", json={"name": "x", "command": ["true"], "pools": ["no-such-pool"]})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:crater:unknown_pool")


def test_a_task_can_be_explained(api: Api, agent: FakeAgent) -> None:
    first = api.submit(**on(agent, resources={"cpu": 4}))
    second = api.submit(**on(agent, resources={"cpu": 4}))
    explanation = api.get(f"/v1/tasks/{second['id']}/explain")
    assert explanation["reason"]["code"] == "no_room"
    assert any(c["node"] == agent.name and c["rejection"]["code"] == "cpu_short" for c in explanation["candidates"])
    agent.run(first["id"])
    agent.run(second["id"])
    assert api.get(f"/v1/tasks/{second['id']}/explain")["reason"]["code"] == "finished"


def test_a_share_of_a_gpu_is_granted_and_shown(api: Api, agent: FakeAgent) -> None:
    task = api.submit(resources={"gpu": 0.25}, pools=[f"{agent.name}-gpu"])
    assert task["devices"][0]["compute_milli"] == 250
    node = api.get(f"/v1/nodes/{agent.name}")
    assert (node["devices"][0]["used_compute_milli"], node["free"]["gpu_milli"]) == (250, 750)
    pool = next(p for p in api.get("/v1/pools")["pools"] if p["name"] == f"{agent.name}-gpu")
    assert (pool["devices"], pool["devices_free"], pool["free"]["gpu_milli"]) == (1, 0, 750)


def test_a_cordoned_node_takes_nothing_new(api: Api, agent: FakeAgent) -> None:
    assert api.http.post(f"/v1/nodes/{agent.name}/cordon").json()["cordoned"] is True
    task = api.submit(**on(agent))
    assert task["status"] == "queued"
    assert api.http.post(f"/v1/nodes/{agent.name}/uncordon").json()["cordoned"] is False
    assert api.task(task["id"])["status"] == "allocated"


def test_a_drained_node_is_emptied_at_its_deadline(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    agent.report(agent.lease_of(task["id"]), "running")
    revision = agent.leases()["revision"]
    node = api.http.post(f"/v1/nodes/{agent.name}/drain", json={"deadline": "300ms", "reason": "new driver"}).json()
    assert (node["cordoned"], node["drain"]["reason"], node["allocations"]) == (True, "new driver", 1)
    (lease,) = agent.leases(after=revision, wait=20)["leases"]
    assert lease["stop"], "the deadline asks the agent to stop it"
    agent.report(lease, "cancelled")
    waiting = api.task(task["id"])
    assert (waiting["status"], api.whats(task["id"])[3:5]) == ("queued", ["draining", "queued_again"])
    explained = api.get(f"/v1/tasks/{task['id']}/explain")["candidates"]
    assert next(c for c in explained if c["node"] == agent.name)["rejection"]["code"] == "draining"
    assert api.http.post(f"/v1/nodes/{agent.name}/uncordon").json()["drain"] is None
    assert api.task(task["id"])["attempt"] == 2
    wrong = api.http.post(f"/v1/nodes/{agent.name}/drain", json={"deadline": "soon"})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "deadline")


def test_over_its_quota_a_task_waits_and_says_so(api: Api, agent: FakeAgent) -> None:
    policy = f"q-{agent.name}"
    assert api.http.put(f"/v1/quotas/{policy}", json={"limits": {"cpu": 2}}).status_code == 200
    first = api.submit(**on(agent, quota_policy=policy, resources={"cpu": 2}))
    second = api.submit(**on(agent, quota_policy=policy, resources={"cpu": 1}))
    assert (first["status"], second["reason"]["code"]) == ("allocated", "quota_used_up")
    view = api.get(f"/v1/quotas/{policy}")
    assert (view["used"]["cpu_milli"], view["used_by_user"]["local"]["cpu_milli"]) == (2000, 2000)
    refused = api.http.post("/v1/tasks", json={"name": "x", "command": ["true"], "quota_policy": policy, "resources": {"cpu": 3}})
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:crater:quota_exceeded")
    assert api.http.delete(f"/v1/quotas/{policy}").status_code == 409
    agent.run(first["id"])
    agent.run(second["id"])
    assert api.http.delete(f"/v1/quotas/{policy}").status_code == 204
    assert api.http.get(f"/v1/quotas/{policy}").status_code == 404


def test_changes_of_a_group_wake_its_watcher(api: Api, agent: FakeAgent) -> None:
    group = f"w-{agent.name}"
    task = api.submit(**on(agent, group=group))
    revision = api.get("/v1/changes", group=group, after=0)["revision"]
    ends = threading.Timer(0.3, agent.run, (task["id"],))
    ends.start()
    seen: list[str] = []
    while "succeeded" not in seen:
        changes = api.get("/v1/changes", group=group, after=revision, wait=20)
        revision = changes["revision"]
        seen += [t["status"] for t in changes["tasks"]]
    ends.join()
    assert seen == ["running", "succeeded"]
    assert api.get("/v1/changes", group=group, after=revision, wait=0.1)["tasks"] == []


def test_events_stream_from_where_the_watcher_was(scheduler: SchedulerProcess, api: Api, agent: FakeAgent) -> None:
    group = f"s-{agent.name}"
    task = api.submit(**on(agent, group=group))
    ends = threading.Timer(0.3, agent.run, (task["id"],))
    ends.start()
    seen = _read_events(f"{scheduler.url}/v1/events?after=0&group={group}", "succeeded")
    ends.join()
    assert seen == ["queued", "allocated", "started", "succeeded"]


def _read_events(url: str, last: str) -> list[str]:
    seen: list[str] = []
    with httpx.stream("GET", url, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(httpx.Response(200, text=line.removeprefix("data: ")).json()["what"])
                if seen[-1] == last:
                    break
    return seen


def test_use_from_heartbeats_is_shown(api: Api, agent: FakeAgent) -> None:
    task = api.submit(**on(agent))
    lease = agent.lease_of(task["id"])
    agent.report(lease, "running")
    assert agent.heartbeat(uses={lease["allocation"]: {"memory_peak_bytes": 7, "cpu_percent_milli": 500}}).status_code == 200
    assert (api.task(task["id"])["memory_peak_bytes"], api.task(task["id"])["cpu_percent_milli"]) == (7, 500)
    agent.report(lease, "failed", exit_code=1)  # Without a measurement of its own: the last one closes the record.
    assert api.task(task["id"])["memory_peak_bytes"] == 7


def test_usage_counts_live_and_ended_work_inside_the_window(api: Api, agent: FakeAgent) -> None:
    project = f"p-{agent.name}"
    task = api.submit(**on(agent, project=project, resources={"cpu": 2}))
    time.sleep(0.2)

    def hours(**params: Any) -> float:
        rows = api.get("/v1/usage", by="project", **params)["rows"]
        return sum(row["core_hours"] for row in rows if row["key"] == project)

    assert hours() > 2 * 0.19 / 3600
    agent.run(task["id"])
    total = hours()
    assert hours() == total
    middle = task["submitted_at_ms"] + 100
    assert hours(to_ms=middle) == pytest.approx(2 * 0.1 / 3600)
    assert hours(to_ms=middle) + hours(from_ms=middle) == pytest.approx(total)


def test_two_nodes_cannot_declare_one_device(scheduler: SchedulerProcess, agent: FakeAgent) -> None:
    twin = FakeAgent(scheduler.url, f"{agent.name}-twin", devices=agent.declaration["devices"])
    answer = twin.http.post("/register", json=twin.declaration)
    assert (answer.status_code, answer.json()["node"]) == (409, agent.name)


def test_an_unregistered_agent_is_told_to_register(scheduler: SchedulerProcess) -> None:
    stranger = FakeAgent(scheduler.url, "stranger")
    for answer in (stranger.heartbeat(), stranger.http.get("/leases"), stranger.http.post("/reports", json={})):
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:crater:not_found")


def test_a_service_keeps_its_replicas(api: Api, agent: FakeAgent) -> None:
    name = f"web-{agent.name}"
    body = {"name": name, "command": ["serve", "{port}"], "replicas": 2, "pools": [f"{agent.name}-cpu"]}
    assert api.http.put(f"/v1/services/{name}", json=body).status_code == 201
    assert api.http.put(f"/v1/services/{name}", json=body).status_code == 200
    replicas = api.get(f"/v1/services/{name}")["replica_list"]
    assert [r["status"] for r in replicas] == ["allocated", "allocated"]
    for replica in replicas:
        agent.report(agent.lease_of(replica["task"]), "running", ready=True)
    ready = api.get(f"/v1/services/{name}")
    assert (ready["status"], ready["ready"]) == ("ready", 2)
    assert ready["replica_list"][0]["url"].startswith("http://127.0.0.1:2")
    agent.report(agent.lease_of(replicas[0]["task"]), "failed", exit_code=1)
    wait_until(lambda: len(api.get(f"/v1/services/{name}")["replica_list"]) == 2, what="a replacement")
    assert api.http.post(f"/v1/services/{name}/scale", json={"replicas": 0}).status_code == 200
    assert all(lease["stop"] for lease in agent.leases()["leases"] if lease["name"].startswith(name))
    assert api.http.delete(f"/v1/services/{name}").json()["status"] == "removing"
    for lease in agent.leases()["leases"]:
        agent.report(lease, "cancelled")
    wait_until(lambda: api.http.get(f"/v1/services/{name}").status_code == 404, what="the service to go")
