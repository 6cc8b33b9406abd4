"""The stand-ins of NVIDIA's libraries are strict: what the real ones do not take, or what is not built into them, fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mps
import nvml
import pytest

WHAT = """
import sys, ctypes, pynvml as n
n.nvmlInit()
card = n.nvmlDeviceGetHandleByIndex(0)
try:
    print(eval(sys.argv[1]))
except n.NVMLError as error:
    print(type(error).__name__, error.value)
"""


@pytest.fixture
def ask(tmp_path: Path):
    """What the real pynvml says of a card that stands in."""
    library, file = nvml.build(tmp_path), tmp_path / "gpus"

    def said(question: str, *lines: str) -> subprocess.CompletedProcess[str]:
        nvml.write(file, [nvml.gpu("GPU-a"), *lines])
        environ = {**os.environ, **nvml.environ(library, file)}
        command = [sys.executable, "-c", WHAT, question]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)

    return said


def test_a_function_that_is_not_built_in_fails(ask):
    assert ask("n.nvmlDeviceGetUUID(card)").stdout.strip() == "GPU-a"
    assert ask("n.nvmlDeviceGetFanSpeed(card)").stdout.split() == ["NVMLError_FunctionNotFound", "13"]


def test_a_struct_of_another_version_is_refused(ask):
    """As `nvmlDeviceGetMemoryInfo_v2` of the driver refuses it."""
    right = ask("n.nvmlDeviceGetMemoryInfo(card, n.nvmlMemory_v2).total // 2**20")
    assert right.stdout.strip() == "81920"
    wrong = ask("n.nvmlDeviceGetMemoryInfo(card, n.nvmlMemory_v2 + 1)")
    assert wrong.stdout.split() == ["NVMLError_ArgumentVersionMismatch", "25"]


@pytest.mark.parametrize("line", ["gpu GPU-b", "set GPU-a colour 3", "fan GPU-a 40"])
def test_a_line_that_cannot_be_read_ends_the_process(ask, line: str):
    answer = ask("n.nvmlDeviceGetUUID(card)", line)
    assert answer.returncode != 0
    assert "GPU-a" not in answer.stdout


@pytest.fixture
def tell(tmp_path: Path) -> Iterator[object]:
    """What the control program answers: its exit code and its words."""
    program = mps.build(tmp_path) / mps.NAME
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipe.mkdir()
    log.mkdir()
    environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}

    def said(*words: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        text = "".join(f"{word}\n" for word in words)
        answer = subprocess.run(
            [str(program), *arguments], env=environ, input=text, stdout=subprocess.PIPE, text=True, timeout=30, check=False
        )
        return answer.returncode, answer.stdout.strip()

    yield said
    said("quit")


def test_the_control_program_knows_its_commands_and_no_others(tell):
    assert tell("get_server_list") == (1, "Cannot find MPS control daemon process")
    assert tell(arguments=("-f",)) == (1, "unknown arguments: ['-f']")
    assert tell(arguments=("-d",)) == (0, "")
    assert tell(arguments=("-d",)) == (1, "An instance of this daemon is already running")
    assert tell("get_server_list") == (0, "")
    assert tell("restart") == (1, "unknown command")
    assert tell("set_default_active_thread_percentage 101") == (1, "wrong arguments")
    assert tell("set_default_device_pinned_mem_limit GPU-a 4096M") == (1, "no such device")
    assert tell("set_default_device_pinned_mem_limit 0 4096M", "get_default_device_pinned_mem_limit 0") == (0, "4096M")
    assert tell("terminate_client 1 2") == (1, "no such server")
    assert tell("quit") == (0, "")
