"""How the command reads its words and shows things, without a scheduler."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
import typer.main

from crater_core import errors
from crater_core.cli.app import app, code_of, run
from crater_core.cli.show import clean, short
from crater_core.cli.submit import _default_name, _environment, _mount, _pairs, read_task_file
from crater_core.cli.usage import _cell, time_ms
from crater_core.errors import InvalidRequest


def _every(command: Any, name: tuple[str, ...] = ()) -> list[list[str]]:
    """The words of a command and of all below it."""
    below = getattr(command, "commands", {})
    return [list(name), *(found for word, one in below.items() for found in _every(one, (*name, word)))]


COMMANDS = _every(typer.main.get_command(app))
WITHOUT_JSON = ("backup", "restore", "history", "history export", "debug", "debug snapshot", "unreserve", "quotas remove")
"""They write a file, remove something, or hold other commands."""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_in_eighty_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: crater" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "[bold]" not in shown
    assert not command or ("--json" in shown) is (" ".join(command) not in WITHOUT_JSON)


def test_help_does_not_wait_for_what_it_does_not_need():
    script = (
        "import sys; from crater_core.cli.app import run; run(['--version'])\n"
        "print([name for name in ('httpx', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nodes", "--foo"], "No such option: --foo"),
        (["nonsense"], "No such command 'nonsense'"),
        (["show"], "Missing argument 'TASK'"),
        (["list", "--endpoint", "x"], "--endpoint stands before the command: crater --endpoint ... list"),
        (["list", "--limit", "0"], "--limit"),
        (["cancel"], "give the tasks to cancel, or --group"),
        (["cancel", "--group", "g", "t1"], "give the tasks to cancel, or --group"),
        (["submit"], "command is missing"),
        (["submit", "--json", "--follow", "ls"], "--json goes with --wait"),
        (["submit", "--memory", "3QB", "ls"], "resources.memory: size has an unknown unit 'QB'"),
        (["submit", "--env", "CRATER_X=1", "ls"], "names that start with CRATER_"),
        (["--endpoint", "ftp://x", "list"], "endpoint must be like http://HOST:8080"),
        (["usage", "--from", "yesterday"], "--from must be a date (2026-12-01)"),
        (["usage", "--csv", "--json"], "--csv or --json, not both"),
        (["quotas", "set", "q"], "a policy needs a limit"),
        (["services", "deploy", "-f", "/nowhere.yaml"], "/nowhere.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_on_standard_error_with_code_2(arguments, words, capsys):
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.startswith("crater: ")
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_each_kind_of_error_has_its_exit_code():
    codes = {
        errors.InvalidRequest: 2,
        errors.UnknownPool: 2,
        errors.ImpossibleRequest: 2,
        errors.BadConfiguration: 2,
        errors.NotFound: 3,
        errors.NotAllowed: 4,
        errors.Unauthenticated: 4,
        errors.QuotaExceeded: 4,
        errors.SchedulerUnreachable: 5,
        errors.StoreUnavailable: 5,
        errors.Conflict: 1,
    }
    assert {kind: code_of(kind("x")) for kind in codes} == codes


def test_an_unreachable_scheduler_is_code_5_with_what_to_check(capsys, monkeypatch):
    monkeypatch.setattr("crater_core.cli.session.RETRY_S", 0.1)
    assert run(["--endpoint", "http://127.0.0.1:9", "list"]) == 5
    assert "check that crater-scheduler runs there" in capsys.readouterr().err


def test_a_task_file_must_hold_names_and_values(tmp_path, monkeypatch):
    path = tmp_path / "task.yaml"
    path.write_text("name: train\ncommand: [python, train.py]\nresources: {gpu: 1}\n")
    assert read_task_file(str(path))["resources"] == {"gpu": 1}
    monkeypatch.setattr("sys.stdin", io.StringIO("name: piped"))
    assert read_task_file("-") == {"name": "piped"}
    for text, words in (
        ("- a", "names and values"),
        ("a: [", r"not YAML \(line"),
        ("a: !!python/object:os.system x", "not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidRequest, match=words):
            read_task_file(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_task_file(str(path))


def test_a_task_without_a_name_gets_one_people_recognise():
    assert _default_name({"command": ["/usr/bin/python3", "-u", "jobs/train.py", "--n", "3"]}) == "train.py"
    assert _default_name({"command": ["/bin/sleep", "3"]}) == "sleep"
    assert _default_name({"image": "pytorch:2.4"}) == "pytorch:2.4"
    assert _default_name({}) == "task"


def test_mounts_labels_and_variables_are_read_as_written(monkeypatch):
    assert _mount("/a:/b") == {"source": "/a", "target": "/b", "read_only": True}
    assert _mount("/a:/b:rw")["read_only"] is False
    assert _pairs(["a=1", "b=x=y", "c="], "label") == {"a": "1", "b": "x=y", "c": ""}
    monkeypatch.setenv("SECRET", "s3cret")
    assert _environment(["SECRET", "A=1"]) == {"SECRET": "s3cret", "A": "1"}
    for wrong in ("/a", ":/b", "/a:/b:x"):
        with pytest.raises(InvalidRequest, match="--mount"):
            _mount(wrong)
    with pytest.raises(InvalidRequest, match="there is no such variable here"):
        _environment(["NOT_THERE_AT_ALL"])
    with pytest.raises(InvalidRequest, match="--label must be KEY=VALUE"):
        _pairs(["a"], "label")


def test_times_are_dates_or_ages():
    assert time_ms(None, "--from") is None
    day, hour = time_ms("2026-12-01", "--from"), time_ms("2026-12-01T01:00", "--from")
    assert hour - day == 3_600_000
    assert time_ms("2026-12-01T00:00:00Z", "--from") == 1_796_083_200_000
    assert time_ms("24h", "--from") - time_ms("48h", "--from") == pytest.approx(86_400_000, abs=1000)


def test_text_from_elsewhere_cannot_steer_the_terminal_or_a_spreadsheet():
    assert clean("a\x1b[31mb\x07c\r") == "a�[31mb�c�"
    assert clean("tab\tand\nline") == "tab\tand\nline"
    assert [_cell(text) for text in ("=1+1", "@x", "plain")] == ["'=1+1", "'@x", "plain"]


def test_durations_stay_short():
    assert [short(ms) for ms in (-5, 0, 12, 999, 1_500, 61_000, 3_600_000, 90_000_000)] == [
        "0 s",
        "0 s",
        "12 ms",
        "999 ms",
        "1 s",
        "1m 1s",
        "1h",
        "1d 1h",
    ]
