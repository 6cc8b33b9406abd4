"""Shares by MPS: what a client is told, what its daemon allows, and what the daemon's answers say."""

from __future__ import annotations

from pathlib import Path

import pytest

from crater_agent.mps import Limits, ceiling, client_environment, is_memory, is_percent, limits_of, numbers, too_long, without_mps
from crater_core.errors import RuntimeFailed
from crater_core.wire.agents import Lease
from crater_core.wire.resources import GrantView


def a_lease(*grants: GrantView) -> Lease:
    return Lease(
        allocation="a", task="t", token=1, name="n", project="p", user="u", attempt=1, member=0, members=1, cpu_milli=0,
        memory_bytes=0, disk_bytes=0, grace_ms=0, command=["true"], devices=list(grants),
    )  # fmt: skip


def a_share(index: int = 3, compute_milli: int = 250, memory_mib: int = 2_048, sharing: str = "mps") -> GrantView:
    return GrantView(uuid=f"GPU-{index}", index=index, compute_milli=compute_milli, memory_mib=memory_mib, sharing=sharing)


def test_a_client_has_its_daemons_directory_and_limits_keyed_by_the_daemons_own_count():
    assert client_environment(a_lease(a_share()), "/run/x") == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/x/3/pipe",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M",
    }


@pytest.mark.parametrize("sharing", ["time_slice", "exclusive", "mig"])
def test_other_modes_have_no_daemon(sharing: str):
    assert client_environment(a_lease(a_share(sharing=sharing)), "/run/x") == {}


def test_shares_of_two_devices_are_refused():
    with pytest.raises(RuntimeFailed, match="a share of one GPU by MPS, not of several"):
        client_environment(a_lease(a_share(0), a_share(1)), "/run/x")


@pytest.mark.parametrize(("milli", "percent"), [(1000, 100), (333, 33), (250, 25), (9, 1), (1, 1)])
def test_per_cent_are_whole_and_at_least_one(milli: int, percent: int):
    assert limits_of(milli, 5) == Limits(percent, 5)


def test_the_ceiling_is_the_largest_share():
    assert ceiling([Limits(25, 4_096), Limits(50, 1_024)]) == Limits(50, 4_096)
    assert ceiling([Limits(25, 4_096), Limits(10, 0)]) == Limits(25, 0)
    assert ceiling([]) == Limits(100, 0)


@pytest.mark.parametrize(
    ("answer", "percent", "same"),
    [("25.0\n", 25, True), ("25", 25, True), ("100.0", 25, False), ("", 25, False), ("?", 0, False)],
)
def test_per_cent_are_read_back(answer: str, percent: int, same: bool):
    assert is_percent(answer, percent) is same


@pytest.mark.parametrize(
    ("answer", "mib", "same"),
    [
        ("2048M\n", 2_048, True),
        ("2G", 2_048, True),
        ("2GB", 2_048, True),
        (str(2 * 1024**3), 2_048, True),
        ("0M", 2_048, False),
        ("", 2_048, False),
        ("GPU-x", 0, False),
    ],
)
def test_memory_is_read_back(answer: str, mib: int, same: bool):
    assert is_memory(answer, mib) is same


def test_lists_are_process_ids_and_nothing_else():
    assert numbers("12\n34\n") == [12, 34]
    assert numbers("") == []
    with pytest.raises(ValueError, match="Cannot"):
        numbers("Cannot find MPS control daemon process")


def test_a_process_past_mps_keeps_the_time_when_it_was_first_seen():
    first = without_mps({1: "a", 2: "b"}, {2}, {}, 100)
    assert first == {1: 100}
    assert without_mps({1: "a", 2: "b", 3: "a"}, {2}, first, 200) == {1: 100, 3: 200}
    assert without_mps({2: "b"}, {2}, first, 300) == {}


def test_sockets_need_a_short_path():
    assert not too_long(Path("/run/crater-mps/0123abcd"))
    assert too_long(Path("/" + "x" * 90))
