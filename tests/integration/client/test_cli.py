"""The `crater` command against a real scheduler and agent: what it prints, and its exit codes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import pytest
import yaml
from harness import SchedulerProcess, start_scheduler, wait_until

from crater_core.cli.app import run
from crater_core.service.auth import hash_of


@pytest.fixture
def crater(world, capfd, monkeypatch):
    """`code, out, err = crater("list", "--json")`."""
    monkeypatch.setenv("CRATER_ENDPOINT", world.url)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CRATER_TOKEN", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        shown = capfd.readouterr()
        return code, shown.out, shown.err

    return call


SMALL = ("--cpu", "0.1", "--memory", "64MiB")


def test_submit_prints_the_id_and_show_tells_the_story(crater, world):
    code, out, _ = crater("submit", *SMALL, "--name", "hello", "--label", "a=b", "--", "echo", "hi")
    assert code == 0
    task = out.strip()
    world.client.wait(task, 20)
    code, out, _ = crater("show", task)
    assert code == 0
    for words in ("hello", task, "succeeded", "asked for  0.1 cores, 64 MiB memory", "node       n1", "labels     a=b", "queued"):
        assert words in out
    assert json.loads(crater("show", task, "--json")[1])["labels"] == {"a": "b"}
    assert crater("logs", task)[1] == "hi\n"
    assert json.loads(crater("logs", task, "--json")[1]) == {"task": task, "stdout": "hi\n", "stderr": ""}


def test_follow_passes_both_streams_on_and_ends_with_the_tasks_own_fate(crater):
    code, out, err = crater("submit", *SMALL, "--follow", "--", "sh", "-c", "echo out; echo aside >&2; exit 3")
    assert (code, out) == (1, "out\n")
    assert "aside\n" in err
    assert "failed" in err
    assert "It ended with exit code 3." in err
    assert crater("submit", *SMALL, "--follow", "true")[0] == 0


def test_wait_gives_one_object_and_the_tasks_own_fate(crater):
    code, out, _ = crater("submit", *SMALL, "--wait", "--json", "true")
    assert (code, json.loads(out)["status"]) == (0, "succeeded")
    assert crater("submit", *SMALL, "--wait", "false")[0] == 1
    task = crater("submit", *SMALL, "sleep", "100")[1].strip()
    code, _, err = crater("wait", task, "--timeout", "200ms")
    assert code == 1
    assert "has not ended within" in err
    assert crater("cancel", task)[0] == 0
    code, _, err = crater("wait", task, "--timeout", "20s")
    assert (code, "cancelled" in err) == (1, True)


def test_words_after_the_first_belong_to_the_command(crater):
    assert crater("submit", *SMALL, "--follow", "echo", "--gpu", "4", "--help")[1] == "--gpu 4 --help\n"


def test_a_file_is_submitted_and_flags_win_over_it(crater, tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump({"name": "filed", "command": ["echo", "filed"], "resources": {"cpu": 64, "memory": "64MiB"}}))
    code, _, err = crater("submit", "--file", str(path))
    assert code == 2
    assert "the largest node (n1) has 2" in err
    code, out, _ = crater("submit", "--file", str(path), "--cpu", "0.1", "--priority", "80", "--wait", "--json")
    shown = json.loads(out)
    assert (code, shown["name"], shown["priority"], shown["requested"]["memory_bytes"]) == (0, "filed", 80, 64 * 1024**2)


def test_how_gpus_are_named_may_be_chosen(crater):
    code, _, err = crater("submit", *SMALL, "--gpu-visible-devices", "0,1", "true")
    assert (code, "gpu_visible_devices" in err, "'uuid' or 'index'" in err) == (2, True, True)
    assert crater("submit", *SMALL, "--gpu-visible-devices", "index", "--wait", "true")[0] == 0


def test_the_same_key_gives_the_same_task(crater):
    ids = {crater("submit", *SMALL, "--key", "once", "true")[1] for _ in range(2)}
    assert len(ids) == 1


def test_a_waiting_task_says_why(crater, world):
    blocker = crater("submit", "--cpu", "2", "sleep", "100")[1].strip()
    wait_until(lambda: world.client.task(blocker).status == "running")
    code, out, err = crater("submit", "--cpu", "2", "--name", "second", "true")
    assert code == 0
    assert err.startswith("waiting: All nodes that could run this are busy")
    waiting = out.strip()
    code, out, err = crater("logs", waiting)
    assert (code, out) == (0, "")
    assert err.startswith(f"No output so far: {waiting} queued: All nodes")
    assert "no room" in crater("list", "--live")[1]
    code, out, _ = crater("explain", waiting)
    assert code == 0
    for words in ("place 1 in the queue", "→ Wait; `crater nodes`", "n1", "2 cores wanted, 0 free."):
        assert words in out
    assert json.loads(crater("explain", waiting, "--json")[1])["reason"]["code"] == "no_room"
    assert crater("cancel", blocker, waiting)[0] == 0
    assert world.client.wait(blocker, 20).status == "cancelled"


def test_ctrl_c_leaves_the_task_running_and_says_how_to_end_it(world):
    command = [sys.executable, "-m", "crater_core.cli", "--endpoint", world.url, "submit", *SMALL, "--follow", "--"]
    script = "import time; print('on', flush=True); time.sleep(100)"
    following = subprocess.Popen(
        [*command, sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert following.stdout is not None
    assert following.stdout.readline() == "on\n"
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=20)
    task = err.split()[0]
    assert following.returncode == 130
    assert f"Detached; the task goes on. `crater logs -f {task}` follows it, `crater cancel {task}` ends it." in err
    assert "Traceback" not in err
    assert world.client.task(task).status == "running"
    world.client.cancel(task)


def test_a_reader_that_has_seen_enough_is_no_error(world):
    env = {**os.environ, "CRATER_ENDPOINT": world.url}
    line = f"{sys.executable} -m crater_core.cli nodes --json | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_not_there_is_code_3_and_the_others_are_still_done(crater, world):
    assert crater("show", "t000000000000000000")[0] == 3
    assert crater("nodes", "show", "nowhere")[0] == 3
    task = crater("submit", *SMALL, "sleep", "100")[1].strip()
    code, _, err = crater("cancel", "t000000000000000000", task)
    assert code == 3
    assert "t000000000000000000" in err
    assert world.client.wait(task, 20).status == "cancelled"


def test_over_the_whole_quota_is_code_4(crater):
    assert crater("quotas", "set", "tiny", "--cpu", "1", "--memory", "1GB", "--user-cpu", "0.5")[0] == 0
    assert "1 / 1" not in crater("quotas")[1]
    code, _, err = crater("submit", "--quota", "tiny", "--cpu", "2", "true")
    assert (code, "more than the whole limit of quota policy tiny (1)" in err) == (4, True)
    assert crater("quotas", "set", "tiny", "--cpu", "2", "--guarantee-cpu", "1", "--lend")[0] == 0
    assert "guaranteed, lent" in crater("quotas")[1]
    code, _, err = crater("quotas", "set", "tiny", "--cpu", "1", "--guarantee-cpu", "2")
    assert (code, "guarantee.cpu is 2, more than limits.cpu, 1" in err) == (2, True)
    assert crater("quotas", "remove", "tiny")[0] == 0
    assert crater("quotas", "remove", "tiny")[0] == 3


def test_a_token_is_needed_where_tokens_are(tmp_path, capfd, monkeypatch):
    token = {"name": "ann", "role": "viewer", "sha256": hash_of("s3cret")}
    with start_scheduler(tmp_path, tokens=[token]) as scheduler:
        monkeypatch.setenv("CRATER_ENDPOINT", scheduler.url)
        monkeypatch.delenv("CRATER_TOKEN", raising=False)
        assert run(["list"]) == 4
        assert run(["--token", "wrong", "list"]) == 4
        monkeypatch.setenv("CRATER_TOKEN", "s3cret")
        assert run(["list"]) == 0
        assert run(["submit", "true"]) == 4
        shown = capfd.readouterr()
        assert "a token is needed" in shown.err
        assert "token ann is a viewer, which may not do this" in shown.err


def test_services_are_deployed_shown_scaled_and_removed(crater, tmp_path):
    path = tmp_path / "service.yaml"
    body = {"name": "pages", "command": [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]}
    body |= {"resources": {"cpu": 0.2, "memory": "64MiB"}, "health": {"path": "/", "interval": "200ms", "timeout": "5s"}}
    path.write_text(yaml.safe_dump(body))
    code, out, err = crater("services", "deploy", "-f", str(path), "--wait", "--timeout", "60")
    assert code == 0, err
    assert "pages  ready  1 of 1 replicas ready" in out
    assert "http://127.0.0.1:" in out
    assert json.loads(crater("services", "scale", "pages", "2", "--json")[1])["replicas"] == 2
    assert "pages" in crater("services")[1]
    assert json.loads(crater("services", "list", "--json")[1])[0]["name"] == "pages"
    assert crater("services", "remove", "pages")[0] == 0


def test_usage_is_a_table_csv_and_json(crater, world):
    assert crater("submit", *SMALL, "--project", "=cmd", "--wait", "true")[0] == 2
    assert crater("submit", *SMALL, "--project", "counted", "--wait", "true")[0] == 0
    assert "counted" in crater("usage", "--from", "1h")[1]
    rows = list(csv.DictReader(crater("usage", "--by", "project", "--csv")[1].splitlines()))
    assert [row["tasks"] for row in rows if row["project"] == "counted"] == ["1"]
    assert json.loads(crater("usage", "--json")[1])["by"] == "project"


def test_events_are_watched_line_by_line(crater):
    code, out, _ = crater("events", "--after", "0", "--count", "3", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, len(events)) == (0, 3)
    assert "node n1 registered" in crater("events", "--after", "0", "--count", "1", "--subject", "node")[1]


@pytest.mark.parametrize(
    "command", ["list", "nodes", "nodes list", "pools", "quotas", "quotas list", "services", "health", "usage", "shares"]
)
def test_every_answer_comes_as_json_too(crater, command):
    code, out, _ = crater(*command.split(), "--json")
    assert code == 0
    json.loads(out)


def test_a_real_cluster_fits_in_eighty_columns(bare: SchedulerProcess, declare_node, capfd, monkeypatch):
    monkeypatch.setenv("CRATER_ENDPOINT", bare.url)
    monkeypatch.setenv("COLUMNS", "80")
    for number in range(3):
        declare_node(bare.url, f"gpu-node-{number:02}.rack-17.example", gpus=8)
    assert run(["quotas", "set", "training-quota", "--gpu", "4", "--cpu", "32", "--memory", "128GB", "--disk", "1TB"]) == 0
    long_name = "cifar10-training-with-a-name-that-goes-on-and-on-for-ever"
    submit = ["submit", "--name", long_name, "--quota", "training-quota", "--gpu", "2", "--memory", "32GB", "--disk", "50GB"]
    for _ in range(3):
        assert run([*submit, "--label", "note=\x1b[31mred", "true"]) == 0
    task = json.loads(_shown(capfd, "list", "--json"))[0]["id"]
    shown = [
        _shown(capfd, *command)
        for command in (
            ["list"],
            ["nodes"],
            ["pools"],
            ["quotas"],
            ["show", task],
            ["explain", task],
            ["nodes", "show", "gpu-node-00.rack-17.example"],
            ["usage", "--by", "task"],
            ["health"],
        )
    ]
    for text in shown:
        assert max((len(line.rstrip()) for line in text.splitlines()), default=0) <= 80, text
        assert "\x1b" not in text
    assert "quota used up" in " ".join(shown[0].split())
    assert "4 / 4" in shown[3]


def _shown(capfd, *command: str) -> str:
    capfd.readouterr()
    assert run(command) == 0
    return capfd.readouterr().out


def test_an_array_is_submitted_waited_for_and_shown_as_one(crater, world):
    program = "import os, sys; print(os.environ['CRATER_ARRAY_INDEX'], sys.argv[1]); sys.exit(sys.argv[1] == '3')"
    code, out, _ = crater("submit", *SMALL, "--array", "1-3%2", "--name", "sweep", "--", sys.executable, "-c", program, "{index}")
    assert code == 0
    array = out.strip()
    code, _, err = crater("wait", array)
    assert (code, err.strip()) == (1, f"{array} 1 failed, 2 succeeded")
    shown = crater("show", array)[1]
    for words in ("sweep", "tasks      3, 2 at once", "[3]", "It ended with exit code 1."):
        assert words in shown
    listed = json.loads(crater("list", "--array", array, "--json")[1])
    assert sorted(task["array_index"] for task in listed) == [1, 2, 3]
    assert crater("logs", listed[-1]["id"])[1] == "1 1\n"
    assert crater("cancel", array)[0] == 0
    code, _, err = crater("submit", *SMALL, "--after", array, "true")
    assert code == 2
    assert "and was to start when that had succeeded, but it has failed." in err


def test_room_is_reserved_shown_and_given_up(crater):
    code, _, err = crater("reserve", "--project", "vision", "--gpus", "999", "--for", "1h")
    assert (code, "It asks for 999 GPU" in err) == (2, True)
    assert (
        crater("reserve", "--project", "vision", "--cpu", "0.1", "--for", "1h", "--from", "2999-01-01", "--name", "night")[0] == 0
    )
    assert "night" in crater("reservations")[1]
    assert json.loads(crater("reservations", "--json")[1])[0]["parts"][0]["node"] == "n1"
    assert crater("reserve", "--project", "vision", "--cpu", "1", "--for", "1h", "--name", "night")[0] == 1
    assert crater("unreserve", "night")[0] == 0
    assert crater("unreserve", "night")[0] == 3
    assert crater("reserve", "--project", "vision", "--cpu", "1", "--from", "soon")[0] == 2
