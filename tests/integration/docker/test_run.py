"""A task with an image: it runs as a container, with what it was given, and its end and output are told as of any task."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from agent_harness import SchedulerStandIn, poll_until
from docker_world import DockerWorld, busybox_layer
from registry_stand_in import registry


def _mount(source: Path | str, target: str, read_only: bool = True) -> dict[str, object]:
    return {"source": str(source), "target": target, "read_only": read_only}


def test_a_command_runs_in_its_image_and_its_output_and_exit_code_are_told(start, scheduler: SchedulerStandIn, image: str):
    start()
    scheduler.give("a", ["sh", "-c", "echo out; echo err >&2; exit 3"], image=image)
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value, end.exit_code) == ("failed", "exit_code", 3)
    assert scheduler.read_log_text("a") == "out\n"
    assert scheduler.read_log_text("a", "stderr") == "err\n"
    assert scheduler.declaration.runtimes == ("process", "docker")


def test_it_is_told_what_a_process_is_told_and_knows_nothing_of_the_agent(start, scheduler: SchedulerStandIn, image: str):
    agent = start(environ={"AGENT_SECRET": "s3cret"}, env_profiles={"p": {"FROM_PROFILE": "profile"}})
    scheduler.give("a", ["env"], image=image, env={"OWN": "task"}, env_profile="p", ports=[21_000], cpu_milli=1500)
    assert scheduler.final("a").status == "succeeded"
    env = dict(line.split("=", 1) for line in scheduler.read_log_text("a").splitlines())
    assert (env["OWN"], env["FROM_PROFILE"], env["PATH"], env["OMP_NUM_THREADS"]) == ("task", "profile", "/bin", "1")
    assert (env["CRATER_NODE"], env["CRATER_ALLOCATION_ID"], env["CRATER_PORT"]) == ("n1", "a", "21000")
    assert (env["CUDA_VISIBLE_DEVICES"], env["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")
    assert env["CRATER_SCRATCH_DIR"] == str(agent.data_dir / "scratch" / "a") == env["TMPDIR"]
    assert "AGENT_SECRET" not in env


def test_without_a_command_the_images_own_is_needed(start, scheduler: SchedulerStandIn, image: str):
    start()
    scheduler.give("a", [], image=image)
    end = scheduler.final("a")
    assert (end.reason.code.value, end.reason.facts["retryable"]) == ("start_failed", 0)
    assert "the task has no command, and image crater-busybox:1 has none of its own" in end.reason.facts["why"]


def test_a_program_that_the_image_lacks_fails_the_task_and_not_the_node(start, scheduler, image: str, engine: DockerWorld):
    start()
    scheduler.give("a", ["no-such-program"], image=image)
    end = scheduler.final("a")
    assert (end.status.value, end.exit_code) == ("failed", 127)
    assert "exec no-such-program failed: No such file or directory" in scheduler.read_log_text("a", "stderr")
    with contextlib.closing(engine.client()) as client:
        poll_until(lambda: not client.containers(all=True), what="the container removed")


def test_mounts_and_output_appear_where_they_were_asked_for(start, place: Path, scheduler: SchedulerStandIn, image: str):
    data, more = place / "data", place / "more"
    for directory in (data, more):
        directory.mkdir()
    (data / "x").write_text("content\n")
    start(mount_roots=[str(place)])
    script = "cat /workspace/data/x; touch /workspace/data/y; touch /more/z; echo r > $CRATER_OUTPUT_PATH/result"
    mounts = [_mount(data, "/workspace/data"), _mount(more, "/more", read_only=False)]
    scheduler.give("a", ["sh", "-c", script], image=image, mounts=mounts, output_path=f"{place}/output/model")
    assert scheduler.final("a").status == "succeeded"
    assert scheduler.read_log_text("a") == "content\n"
    assert "Read-only file system" in scheduler.read_log_text("a", "stderr")
    assert not (data / "y").exists()
    assert (more / "z").exists()
    assert (place / "output/model/result").read_text() == "r\n"


def test_no_mount_leads_out_of_the_roots(start, place: Path, scheduler: SchedulerStandIn, image: str):
    (place / "roots").mkdir()
    (place / "roots/link").symlink_to("/etc")
    (place / "roots/inside").symlink_to(place / "roots")
    start(mount_roots=[str(place / "roots")])
    wrong = {
        "plain": ({"mounts": [_mount("/etc", "/x")]}, "/etc is outside this node's mount_roots"),
        "link": ({"mounts": [_mount(place / "roots/link", "/x")]}, "(it leads to /etc) is outside this node's mount_roots"),
        "deep": ({"mounts": [_mount(place / "roots/link/ssl", "/x")]}, "is outside this node's mount_roots"),
        "output": ({"output_path": str(place / "roots/link/new")}, "is outside this node's mount_roots"),
        "missing": ({"mounts": [_mount(place / "roots/none", "/x")]}, "does not exist on this node"),
        "over": ({"mounts": [_mount(place / "roots", "/")]}, "nothing can be mounted at /"),
    }
    for name, (fields, _) in wrong.items():
        scheduler.give(name, ["true"], image=image, **fields)
    scheduler.give("good", ["true"], image=image, mounts=[_mount(place / "roots/inside", "/x")])
    for name, (_, why) in wrong.items():
        end = scheduler.final(name)
        assert (end.reason.code.value, why in end.reason.facts["why"]) == ("start_failed", True), end
    assert scheduler.final("good").status == "succeeded"
    assert not Path("/etc/new").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as another user")
def test_it_runs_as_the_user_of_the_agents_file(start, place: Path, scheduler: SchedulerStandIn, image: str):
    place.chmod(0o755)
    agent = start(run_as="nobody")
    scheduler.give("a", ["sh", "-c", "id -u; id -g; touch $CRATER_SCRATCH_DIR/mine; echo $HOME"], image=image)
    assert scheduler.final("a").status == "succeeded"
    assert scheduler.read_log_text("a") == f"65534\n65534\n{agent.data_dir}/scratch/a\n"


def test_its_labels_say_whose_it_is(start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld):
    agent = start()
    scheduler.give("a", ["sleep", "600"], image=image, token=42)
    scheduler.running("a")
    with contextlib.closing(engine.client()) as client:
        found = client.inspect_container(f"{agent.group_name}-a")
    assert found["Config"]["Labels"] == {
        "crater.agent": agent.group_name,
        "crater.node": "n1",
        "crater.cluster": scheduler.url,
        "crater.allocation": "a",
        "crater.task": "task-a",
        "crater.token": "42",
        "crater.project": "p",
    }


def test_an_image_is_fetched_with_the_registrys_password_and_how_far_it_is_is_told(
    start, place: Path, scheduler: SchedulerStandIn, engine: DockerWorld
):
    (place / "password").write_text("s3cret-password\n")
    with registry(busybox_layer(4_000_000), ("robot", "s3cret-password")) as images:
        credentials = {f"127.0.0.1:{images.port}": {"username": "robot", "password": {"file": str(place / "password")}}}
        agent = start(docker={"registries": credentials}, log={"level": "debug"})
        scheduler.give("a", [], image=images.name())

        def far() -> list[tuple[str, int, int]]:
            news = [(report.status.value, report.reason) for report in scheduler.reports_of("a") if report.reason]
            return [(status, reason.facts["done_bytes"], reason.facts["total_bytes"]) for status, reason in news]

        poll_until(lambda: far() and far()[-1][1], 20, "something of it")
        status, done_bytes, total_bytes = far()[-1]
        assert (status, total_bytes) == ("starting", len(images.blob))
        assert 0 < done_bytes < total_bytes
        images.gate.set()
        assert scheduler.final("a").status == "succeeded"
    assert scheduler.read_log_text("a") == "from the image\n"
    kept = b"".join(path.read_bytes() for path in agent.data_dir.rglob("*") if path.is_file())
    assert b"s3cret-password" not in kept + agent.log.encode()


def test_an_image_that_is_nowhere_fails_the_task_and_a_registry_that_is_away_may_be_tried_elsewhere(start, scheduler):
    with registry(busybox_layer()) as images:
        start()
        scheduler.give("nowhere", ["true"], image=images.name("2"))
        scheduler.give("away", ["true"], image="127.0.0.1:1/team/tool:1")
        nowhere, away = scheduler.final("nowhere"), scheduler.final("away")
    assert (nowhere.reason.code.value, nowhere.reason.facts["retryable"]) == ("start_failed", 0)
    assert "manifest unknown" in nowhere.reason.facts["why"]
    assert (away.reason.code.value, away.reason.facts["retryable"]) == ("start_failed", 1)
    assert "could not be fetched from 127.0.0.1:1" in away.reason.facts["why"]


def test_a_pull_ends_at_its_time_out_and_when_its_task_is_cancelled(start, scheduler: SchedulerStandIn):
    with registry(busybox_layer(4_000_000)) as images:
        impatient = start(docker={"pull_timeout": "1s"})
        scheduler.give("late", [], image=images.name())
        end = scheduler.final("late")
        assert (end.reason.code.value, end.reason.facts["retryable"]) == ("start_failed", 1)
        assert "was not there after 1 s (docker.pull_timeout)" in end.reason.facts["why"]
        impatient.stop()
        start("n2", docker={"pull_timeout": "1h"})
        images.half_sent.clear()
        scheduler.give("unwanted", [], image=images.name())
        assert images.half_sent.wait(10)
        scheduler.change("unwanted", stop=True)
        assert scheduler.final("unwanted").status == "cancelled"


def test_only_images_of_the_nodes_list_are_run(start, scheduler: SchedulerStandIn, image: str):
    start(docker={"images": ["crater-*:1"], "pull": "never"})
    scheduler.give("yes", ["true"], image=image)
    scheduler.give("no", ["true"], image="other:1")
    scheduler.give("absent", ["true"], image="crater-none:1")
    assert scheduler.final("yes").status == "succeeded"
    assert "is not among those that this node runs" in scheduler.final("no").reason.facts["why"]
    absent = scheduler.final("absent").reason.facts
    assert (absent["retryable"], "docker.pull is never" in absent["why"]) == (1, True)


def test_a_node_offers_containers_while_an_engine_answers(start, place: Path, scheduler: SchedulerStandIn):
    start(docker={"socket": str(place / "none.sock"), "enabled": True})
    assert scheduler.declaration.runtimes == ("process",)
    assert f"no containers are run: no engine listens at {place}/none.sock" in scheduler.declaration.notes
    scheduler.give("a", ["true"], image="x")
    why = scheduler.final("a").reason.facts
    assert (why["retryable"], "no engine listens at" in why["why"]) == (1, True)
