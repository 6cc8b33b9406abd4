"""The scheduler's parts that need neither network nor disk."""

from __future__ import annotations

import asyncio

import pytest

from crater_core.clock import ManualClock, SystemClock
from crater_core.errors import NotAllowed, Unauthenticated
from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation, AllocationStatus, Use
from crater_core.model.quota import QuotaPolicy
from crater_core.model.resources import Amounts
from crater_core.model.snapshot import Snapshot, copy_of
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.model.usage import HOUR_MS, UsageRecord
from crater_core.service.auth import Guard, hash_of
from crater_core.service.batch import Batch
from crater_core.service.bell import Bell
from crater_core.service.config import TokenSettings
from crater_core.service.heard import Heard
from crater_core.service.ids import Ids
from crater_core.service.shown import Shown
from crater_core.service.usage_report import usage_report
from crater_core.store import Loaded


def a_task(task_id: str = "t1", status: TaskStatus = TaskStatus.QUEUED, attempt: int = 0) -> Task:
    return Task(task_id, TaskSpec("job", command=("true",), group="g"), status, 1, 1, attempt=attempt)


def an_allocation(name: str, attempt: int, status: AllocationStatus = AllocationStatus.ASSIGNED) -> Allocation:
    return Allocation(name, "t1", attempt, 0, "n1", attempt, Amounts(1000), status=status)


class TestIds:
    def test_ids_sort_by_the_time_they_were_made(self) -> None:
        clock = ManualClock(1_700_000_000_000)
        ids = Ids(clock)
        made = [ids.new("t") for _ in range(1000)]
        clock.advance(1)
        made.append(ids.new("t"))
        assert made == sorted(made)
        assert len(set(made)) == len(made)
        assert {len(one) for one in made} == {19}

    def test_two_makers_do_not_make_the_same(self) -> None:
        clock = SystemClock()
        assert set(Ids(clock).many("t", 500)).isdisjoint(Ids(clock).many("t", 500))


class TestBell:
    def test_a_ring_wakes_those_who_wait_for_its_key(self) -> None:
        async def story() -> list[bool]:
            bell = Bell()
            waiting = [asyncio.create_task(bell.wait(key, 5)) for key in ("a", "a", "b")]
            await asyncio.sleep(0)
            bell.ring(["a"])
            bell.close()
            return list(await asyncio.gather(*waiting))

        assert asyncio.run(story()) == [True, True, True]

    def test_a_wait_ends_with_its_time_and_leaves_nothing_behind(self) -> None:
        async def story() -> tuple[bool, int]:
            bell = Bell()
            return await bell.wait("a", 0.01), len(bell._waiting)

        assert asyncio.run(story()) == (False, 0)

    def test_after_closing_nobody_waits(self) -> None:
        async def story() -> bool:
            bell = Bell()
            bell.close()
            return await bell.wait("a", 60)

        assert asyncio.run(story()) is False


class TestHeard:
    def test_a_node_counts_as_heard_when_the_process_started(self) -> None:
        clock = ManualClock()
        heard = Heard(clock)
        clock.advance(500)
        assert heard.age_ms("n1") == 500
        heard.hear("n1")
        assert heard.age_ms("n1") == 0

    def test_our_own_sleep_is_no_nodes_fault(self) -> None:
        clock = ManualClock()
        heard = Heard(clock)
        heard.hear("n1")
        clock.advance(1000)
        assert heard.look(["n1"], 1000, 2000)[0].silent_ms == 1000
        clock.advance(60_000)
        assert heard.look(["n1"], 1000, 2000)[0].silent_ms <= 2000
        clock.advance(1000)
        assert heard.look(["n1"], 1000, 2000)[0].silent_ms <= 3000

    def test_what_is_forgotten_must_register_again(self) -> None:
        heard = Heard(ManualClock())
        heard.registered("n1", "secret")
        heard.used("n1", {"a1": Use(cpu_ms=5)})
        assert heard.use_of("n1", "a1") == Use(cpu_ms=5)
        heard.forget("n1")
        assert ("n1" in heard.secrets, heard.use_of("n1", "a1")) == (False, None)


class TestBatch:
    def test_an_entity_that_changed_twice_is_written_once_as_it_is_at_the_end(self) -> None:
        batch = Batch(Snapshot())
        batch.take(Changes((a_task(),)))
        batch.take(Changes((a_task(status=TaskStatus.ALLOCATED, attempt=1),)))
        assert batch.changes.puts == (a_task(status=TaskStatus.ALLOCATED, attempt=1),)

    def test_removed_and_put_again_is_put(self) -> None:
        batch = Batch(Snapshot())
        batch.take(Changes((QuotaPolicy("q"),)))
        batch.take(Changes(removed=((QuotaPolicy, "q"),)))
        assert (batch.changes.puts, batch.changes.removed) == ((), ((QuotaPolicy, "q"),))
        batch.take(Changes((QuotaPolicy("q", ("p",)),)))
        assert (batch.changes.puts, batch.changes.removed) == ((QuotaPolicy("q", ("p",)),), ())

    def test_a_start_makes_no_room_and_an_end_does(self) -> None:
        batch = Batch(Snapshot())
        batch.take(Changes((a_task(status=TaskStatus.RUNNING), an_allocation("a1", 1, AllocationStatus.RUNNING))))
        assert not batch.makes_room
        batch.take(Changes((an_allocation("a1", 1, AllocationStatus.FAILED),)))
        assert batch.makes_room

    def test_a_copy_of_a_snapshot_moves_on_by_itself(self) -> None:
        first = Snapshot(revision=7)
        first.advance([a_task(), QuotaPolicy("q")])
        twin = copy_of(first)
        twin.advance([a_task("t2")])
        assert (set(first.tasks), set(twin.tasks), twin.revision) == ({"t1"}, {"t1", "t2"}, 7)


class TestShown:
    def test_a_task_that_ended_can_still_be_seen_with_its_last_attempt(self) -> None:
        shown = Shown(Loaded(0, 1, 0), Snapshot().settings)
        shown.advance(Changes((a_task(), an_allocation("a1", 1))), 1, 0)
        # In one commit an attempt ends and the next begins; the order of the two must not matter.
        shown.advance(Changes((an_allocation("a2", 2), an_allocation("a1", 1, AllocationStatus.LOST))), 2, 0)
        rung = shown.advance(
            Changes((a_task(status=TaskStatus.FAILED, attempt=2), an_allocation("a2", 2, AllocationStatus.FAILED))), 3, 0
        )
        record = shown.record("t1")
        assert record is not None
        assert (record.task.status, list(record.allocations), record.revision) == (TaskStatus.FAILED, ["a2"], 3)
        assert {("task", "t1"), ("group", "g"), "tasks", ("node", "n1")} <= set(rung)

    def test_only_what_an_agent_must_know_changes_its_list(self) -> None:
        shown = Shown(Loaded(5, 1, 0), Snapshot().settings)
        assert shown.leases_changed_at("n1") == 5
        shown.advance(Changes((a_task(), an_allocation("a1", 1))), 6, 0)
        assert shown.leases_changed_at("n1") == 6
        shown.advance(Changes((an_allocation("a1", 1, AllocationStatus.RUNNING),)), 7, 0)
        assert shown.leases_changed_at("n1") == 6
        shown.advance(Changes((an_allocation("a1", 1, AllocationStatus.STOPPING),)), 8, 0)
        assert shown.leases_changed_at("n1") == 8


class TestGuard:
    def test_without_tokens_every_caller_is_an_administrator(self) -> None:
        assert Guard(()).identify("DELETE", "/v1/quotas/q", None, None).role == "admin"

    def test_a_token_is_known_by_its_hash(self) -> None:
        guard = Guard((TokenSettings(name="ann", role="viewer", sha256=hash_of("s3cret")),))
        assert guard.identify("GET", "/v1/tasks", "bearer s3cret", None).name == "ann"
        for wrong in (None, "", "Bearer", "Bearer s3cre", "Basic s3cret"):
            with pytest.raises(Unauthenticated):
                guard.identify("GET", "/v1/tasks", wrong, None)

    def test_only_an_administrator_names_another_user(self) -> None:
        assert Guard(()).identify("POST", "/v1/tasks", None, "bob").user == "bob"
        guard = Guard((TokenSettings(name="ann", role="submitter", sha256=hash_of("s")),))
        with pytest.raises(NotAllowed):
            guard.identify("POST", "/v1/tasks", "Bearer s", "bob")


class TestUsageReport:
    def record(self, name: str, from_h: float, to_h: float, project: str = "ml", **more: object) -> UsageRecord:
        held = Amounts(cpu_milli=2000, memory_bytes=10**9, gpu_milli=500)
        return UsageRecord(
            name, f"t-{name}", "job", project, "ann", None, "n1", held, round(from_h * HOUR_MS), round(to_h * HOUR_MS), **more
        )  # type: ignore[arg-type]

    def test_hours_are_clipped_to_the_window(self) -> None:
        report = usage_report([self.record("a1", 0, 10)], "project", 2 * HOUR_MS, 3 * HOUR_MS)
        (row,) = report.rows
        assert (row.gpu_hours, row.core_hours, row.gb_hours, row.tasks) == (0.5, 2.0, 1.0, 1)

    def test_neighbouring_windows_add_up_to_the_whole(self) -> None:
        records = [self.record("a1", 0.3, 2.7), self.record("a2", 1.1, 1.9)]
        parts = [usage_report(records, "user", h * HOUR_MS, (h + 1) * HOUR_MS).rows for h in range(3)]
        whole = usage_report(records, "user", 0, 3 * HOUR_MS).rows[0].core_hours
        assert sum(row.core_hours for rows in parts for row in rows) == pytest.approx(whole)

    def test_an_allocation_counts_once_and_its_closed_record_wins(self) -> None:
        records = [self.record("a1", 0, 1), self.record("a1", 0, 5)]
        assert usage_report(records, "project", 0, 9 * HOUR_MS).rows[0].core_hours == 2.0

    def test_rows_are_grouped_and_the_largest_comes_first(self) -> None:
        records = [self.record("a1", 0, 1, "small"), self.record("a2", 0, 3, "large")]
        assert [row.key for row in usage_report(records, "project", 0, 9 * HOUR_MS).rows] == ["large", "small"]
        assert [row.key for row in usage_report(records, "quota_policy", 0, 9 * HOUR_MS).rows] == ["(none)"]
