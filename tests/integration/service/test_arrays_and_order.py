"""Task arrays, and tasks that come after others, over HTTP and through a restart."""

from __future__ import annotations

from typing import Any

import httpx
from harness import SchedulerProcess, start_scheduler

from .conftest import Api, FakeAgent

Json = dict[str, Any]


def batch(api: Api, *tasks: Json) -> httpx.Response:
    return api.http.post("/v1/tasks:batch", json={"tasks": [{"command": ["true"], **task} for task in tasks]})


def array(api: Api, indices: object, key: str = "", running_max: int | None = None, **task: Any) -> httpx.Response:
    body = {"task": {"name": "sweep", "command": ["run", "{index}"], **task}, "indices": indices, "running_max": running_max}
    return api.http.post("/v1/arrays", json=body, headers={"Idempotency-Key": key} if key else {})


def test_an_array_is_submitted_listed_limited_and_cancelled_as_one(scheduler: SchedulerProcess, api: Api):
    agent = FakeAgent(scheduler.url, "rows")
    agent.register()
    made = array(api, "0-6:2,9", running_max=2, node_labels={}, pools=["rows-cpu"])
    assert made.status_code == 201, made.text
    view = made.json()
    assert (view["size"], view["counts"], view["reason"]["code"]) == (5, {"allocated": 2, "queued": 3}, "array_limit")

    members = api.get("/v1/tasks", array=view["id"])["tasks"]
    assert sorted(member["array_index"] for member in members) == [0, 2, 4, 6, 9]
    lease = agent.leases()["leases"][0]
    assert (lease["array"], lease["array_index"], lease["array_size"]) == (view["id"], 0, 5)

    agent.run(lease["task"])
    after = api.get(f"/v1/arrays/{view['id']}")
    assert after["counts"] == {"allocated": 2, "queued": 2, "succeeded": 1}
    cancelled = api.http.post(f"/v1/arrays/{view['id']}/cancel", json={}).json()
    assert cancelled["counts"] == {"allocated": 2, "cancelled": 2, "succeeded": 1}


def test_the_same_key_gives_the_same_array_and_another_body_is_a_conflict(api: Api):
    first = array(api, 3, key="sweep-1")
    again = array(api, 3, key="sweep-1")
    assert (first.status_code, again.status_code, again.json()["id"]) == (201, 200, first.json()["id"])
    assert array(api, 4, key="sweep-1").status_code == 409


def test_wrong_indices_are_told_by_field(api: Api):
    for indices, words in (("5-1", "a range goes up"), ("1,1", "given twice"), (0, "at least one"), ("0-99999", "at most 10000")):
        answer = array(api, indices)
        assert (answer.status_code, answer.json()["field"]) == (422, "indices")
        assert words in answer.json()["detail"]


def test_tasks_of_a_batch_come_after_each_other_by_name(scheduler: SchedulerProcess, api: Api):
    agent = FakeAgent(scheduler.url, "chain")
    agent.register()
    pools = {"pools": ["chain-cpu"]}
    made = batch(api, {"name": "train", "after": ["fetch"], **pools}, {"name": "fetch", **pools})
    assert made.status_code == 201, made.text
    train, fetch = made.json()["tasks"]
    assert train["after"] == [{"task": fetch["id"], "when": "succeeded"}]
    assert (train["status"], train["reason"]["code"], fetch["status"]) == ("queued", "waiting_for_tasks", "allocated")
    report = api.submit(name="report", after=[{"task": train["id"], "when": "ended"}], **pools)
    agent.run(fetch["id"], exit_code=3)
    cancelled = api.task(train["id"])
    assert cancelled["status"] == "cancelled"
    assert cancelled["reason"]["facts"] == {
        "task": f"fetch ({fetch['id']})",
        "wanted": "succeeded",
        "status": "failed",
    }
    assert api.task(report["id"])["status"] == "allocated"


def test_what_cannot_come_after_anything_is_refused_with_its_field(scheduler: SchedulerProcess, api: Api):
    agent = FakeAgent(scheduler.url, "bad")
    agent.register()
    unknown = api.http.post("/v1/tasks", json={"name": "a", "command": ["true"], "after": ["t" + "0" * 18]})
    assert (unknown.status_code, unknown.json()["field"]) == (400, "after.0")
    circle = batch(api, {"name": "a", "after": ["b"]}, {"name": "b", "after": ["c"]}, {"name": "c", "after": ["b"]})
    assert (circle.status_code, circle.json()["field"], circle.json()["circle"]) == (400, "tasks.1.after", ["b", "c", "b"])
    twice = batch(api, {"name": "a"}, {"name": "a"}, {"name": "b", "after": ["a"]})
    assert (twice.status_code, twice.json()["field"]) == (400, "tasks.2.after.0")
    failed = api.submit(pools=["bad-cpu"])
    agent.run(failed["id"], exit_code=1)
    late = api.http.post("/v1/tasks", json={"name": "late", "command": ["true"], "after": [failed["id"]]})
    assert (late.status_code, late.json()["reason"], late.json()["status"]) == (422, "dependency_failed", 422)


def test_a_restart_forgets_neither_order_nor_limit_nor_counts(tmp_path, own: list[SchedulerProcess]):
    own.append(scheduler := start_scheduler(tmp_path))
    api = Api(scheduler.url)
    agent = FakeAgent(scheduler.url, "n1")
    agent.register()
    rows = array(api, 3, running_max=1).json()["id"]
    last = api.submit(name="collect", after=[rows])
    agent.run(agent.leases()["leases"][0]["task"])
    scheduler.kill()
    scheduler.start()
    agent.register()
    assert api.get(f"/v1/arrays/{rows}")["counts"] == {"allocated": 1, "queued": 1, "succeeded": 1}
    assert (
        api.task(last["id"])["reason"]["message"] == f"It comes after 1 task(s) that have not ended; the first is array {rows}."
    )
    for _ in range(2):
        agent.run(agent.leases()["leases"][0]["task"])
    assert api.get(f"/v1/arrays/{rows}") | {"revision": 0} == api.get(f"/v1/arrays/{rows}") | {"revision": 0, "ended": True}
    assert agent.leases()["leases"][0]["task"] == last["id"]


def test_ten_thousand_members_are_one_quick_commit(tmp_path, own: list[SchedulerProcess]):
    own.append(scheduler := start_scheduler(tmp_path))
    api = Api(scheduler.url)
    FakeAgent(scheduler.url, "n1").register()
    before = api.get("/health")["revision"]
    view = array(api, 10_000, running_max=4).json()
    assert (view["counts"], view["revision"] - before) == ({"allocated": 4, "queued": 9_996}, 1)
