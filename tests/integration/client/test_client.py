"""The client against a real scheduler and agent."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import SchedulerProcess, wait_until

from crater_core.client import AsyncCraterClient, CraterClient, calls
from crater_core.errors import Conflict, ImpossibleRequest, NotFound, SchedulerUnreachable
from crater_core.wire.tasks import TaskSubmission, TaskView

NEVER = {"name": "later", "command": ["true"], "resources": {"cpu": 2}}


def test_a_task_runs_and_its_story_and_output_can_be_read(world):
    task = world.client.submit(world.python("import sys; print('hello'); print('oh', file=sys.stderr); sys.exit(3)"))
    seen: list[str] = []
    ended = world.client.wait(task.id, 30, on_change=lambda view: seen.append(view.status))
    assert (ended.status, ended.exit_code, ended.reason.code) == ("failed", 3, "exit_code")
    assert seen[-1] == "failed"
    assert [event.what for event in world.client.events(task.id)][-3:] == ["allocated", "started", "failed"]
    chunk = world.client.logs(task.id)
    assert (chunk.data, chunk.next_offset, chunk.complete) == (b"hello\n", 6, True)
    assert world.client.logs(task.id, "stderr").data == b"oh\n"
    assert world.client.logs(task.id, offset=2, limit=3).data == b"llo"


def test_both_streams_are_followed_while_they_are_written_and_through_every_attempt(world, tmp_path):
    mark, go = tmp_path / "mark", tmp_path / "go"
    tmp_path.chmod(0o777)
    script = (
        "import os,sys,time\n"
        f"first = not os.path.exists({str(mark)!r}); open({str(mark)!r}, 'a').close()\n"
        "print('try', 1 if first else 2); print('aside', file=sys.stderr)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print('after'); sys.exit(first)"
    )
    task = world.client.submit(world.python(script, retry={"attempts": 2, "on_failure": True, "backoff": "100ms"}))
    got: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    for stream, data in world.client.follow_logs(task.id):
        got[stream] += data
        if b"try 1" in got["stdout"]:
            assert go.exists() or b"after" not in got["stdout"]
            go.touch()
    assert got == {"stdout": b"try 1\nafter\ntry 2\nafter\n", "stderr": b"aside\naside\n"}
    assert world.client.task(task.id).status == "succeeded"


def test_waiting_too_long_says_what_the_task_is_doing(world):
    task = world.client.submit(world.python("import time; time.sleep(100)"))
    wait_until(lambda: world.client.task(task.id).status == "running")
    with pytest.raises(TimeoutError, match=rf"task {task.id} \(script\) has not ended within 0.2 s: it is running on n1"):
        world.client.wait(task.id, 0.2)
    world.client.cancel(task.id, "enough")
    ended = world.client.wait(task.id, 20)
    assert (ended.status, "enough" in ended.reason.message) == ("cancelled", True)


def test_the_same_key_gives_the_same_task_and_another_body_is_a_conflict(world):
    body = TaskSubmission(name="once", command=("true",))
    first = world.client.submit(body, idempotency_key="k1")
    assert world.client.submit(body, idempotency_key="k1").id == first.id
    assert [task.id for task in world.client.tasks(key="k1")] == [first.id]
    with pytest.raises(Conflict):
        world.client.submit({"name": "other", "command": ["true"]}, idempotency_key="k1")
    assert world.client.submit(body).id != world.client.submit(body).id


def test_a_task_that_can_never_run_is_refused_with_field_and_next_step(world):
    with pytest.raises(ImpossibleRequest, match="the largest node") as refused:
        world.client.submit({"name": "x", "command": ["true"], "resources": {"memory": "100TB"}})
    assert refused.value.fields["field"] == "resources.memory"
    assert refused.value.fields["next_step"] == "Ask for less, or add a larger node."


def test_lists_come_page_by_page(world, monkeypatch):
    monkeypatch.setattr(calls, "PAGE", 2)
    made = world.client.submit_many([{**NEVER, "group": "pages", "labels": {"n": str(i)}} for i in range(5)])
    found = list(world.client.tasks(group="pages"))
    assert {task.id for task in found} == {task.id for task in made}
    assert len(list(world.client.tasks(group="pages", limit=3))) == 3
    assert [task.labels["n"] for task in world.client.tasks(labels={"n": "4"})] == ["4"]
    cancelled = world.client.cancel_group("pages", "done with")
    assert all(world.client.wait(task.id, 20).ended for task in made)
    assert {task.group for task in cancelled} <= {"pages"}


def test_changes_of_a_group_wake_who_waits_for_them(world):
    start = world.client.changes(None, wait_s=0).revision
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.extend(t.id for t in world.client.changes(start, group="g", wait_s=20).tasks))
    waiting.start()
    task = world.client.submit({**NEVER, "group": "g"})
    waiting.join(20)
    assert found == [task.id]


def test_what_happens_can_be_watched(world):
    seen: list[tuple[str, str]] = []
    ready = threading.Event()

    def watch() -> None:
        with CraterClient(world.url) as client:
            for event in client.watch("watched", after=0, subject="task"):
                ready.set()
                seen.append((event.id, event.what))
                if event.what == "succeeded":
                    return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    task = world.client.submit({**NEVER, "group": "watched"})
    watching.join(30)
    assert not watching.is_alive()
    assert [what for found, what in seen if found == task.id][-3:] == ["allocated", "started", "succeeded"]


def test_nodes_can_be_closed_and_opened_and_tasks_say_that_none_takes_them(world):
    assert world.client.cordon("n1").cordoned
    task = world.client.submit(NEVER)
    assert world.client.explain(task.id).candidates[0].rejection.code == "cordoned"
    assert not world.client.uncordon("n1").cordoned
    assert world.client.node("n1").name == "n1"
    assert {pool.name for pool in world.client.pools()} == {"cpu-pool", "memory-pool", "disk-pool"}
    assert world.client.wait(task.id, 20).status == "succeeded"
    with pytest.raises(NotFound):
        world.client.node("n2")


def test_quota_policies_are_set_shown_and_removed(world):
    set_to = world.client.set_quota("dev-quota", {"limits": {"gpu": 1, "cpu": 8, "memory": "32GB", "disk": "100GB"}})
    assert (set_to.limits.gpu_milli, set_to.limits.memory_bytes) == (1000, 32 * 10**9)
    assert world.client.quota("dev-quota") == set_to
    assert [policy.name for policy in world.client.quotas()] == ["dev-quota"]
    world.client.remove_quota("dev-quota")
    with pytest.raises(NotFound):
        world.client.quota("dev-quota")


def test_the_share_of_a_project_is_shown(world):
    client = world.client
    task = client.submit({"name": "holds", "project": "sharing", "command": ["sleep", "60"], "resources": {"cpu": 0.1}})
    share = next(one for one in client.shares().shares if one.project == "sharing")
    assert (share.held.cpu_milli, share.weight_milli) == (100, 1000)
    assert share.average_milli <= share.share_milli <= share.held_milli
    client.cancel(task.id)


def test_usage_is_reported_by_what_was_asked(world):
    task = world.client.submit({**NEVER, "project": "metered"})
    world.client.wait(task.id, 20)
    report = world.client.usage("project", from_ms=task.submitted_at_ms - 1)
    assert [(row.key, row.tasks) for row in report.rows if row.key == "metered"] == [("metered", 1)]


def test_threads_share_one_client(world):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: world.client.health().status, range(80)))
    assert answers == ["ok"] * 80


def test_a_forked_child_goes_on_with_connections_of_its_own(world):
    assert world.client.health().status == "ok"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if world.client.health().status == "ok" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert world.client.health().status == "ok"


def test_the_async_client_serves_one_event_loop_after_another(world):
    client = AsyncCraterClient(world.url)

    async def story() -> list[str]:
        made = await client.submit_many([{**NEVER, "group": "loop"} for _ in range(3)])
        ended: list[TaskView] = await asyncio.gather(*(client.wait(task.id, 30) for task in made))
        listed = [task.id async for task in client.tasks(group="loop", limit=3)]
        output = [data async for _, data in client.follow_logs(made[0].id)]
        first = None
        async for event in client.watch("loop", after=0):
            first = event.what
            break
        await client.close()
        assert (len(listed), output, first) == (3, [], "queued")
        return [task.status for task in ended]

    assert asyncio.run(story()) == ["succeeded"] * 3
    assert asyncio.run(story()) == ["succeeded"] * 3


def test_waiting_goes_on_over_a_scheduler_that_is_killed_and_started_again(bare: SchedulerProcess, declare_node):
    declare_node(bare.url, "n1", cpu=2)
    with CraterClient(bare.url) as client:
        client.submit({"name": "first", "command": ["true"], "resources": {"cpu": 2}})
        second = client.submit({"name": "second", "command": ["true"], "resources": {"cpu": 2}})
        assert second.status == "queued"
        ended: list[str] = []
        waiting = threading.Thread(target=lambda: ended.append(client.wait(second.id, 60).status))
        waiting.start()
        bare.kill()
        asked: list[str] = []
        cancelling = threading.Thread(target=lambda: asked.append(client.cancel(second.id).status))
        cancelling.start()
        bare.start()
        for thread in (cancelling, waiting):
            thread.join(30)
        assert (asked, ended) == (["cancelled"], ["cancelled"])
        bare.kill()
    with CraterClient(bare.url, retry_for_s=0.2) as client, pytest.raises(SchedulerUnreachable, match="connection refused"):
        client.health()
