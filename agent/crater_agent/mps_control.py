"""The control program of one device's MPS daemon: starts it, asks it, ends it. Commands are words on its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crater_agent.environment import SYSTEM_PATH
from crater_agent.mps import DEVICE, Limits, is_memory, is_percent, numbers, pipe_directory
from crater_core.errors import RuntimeFailed

PROGRAM = "nvidia-cuda-mps-control"
NAME = "nvidia-cuda-mps"
"""How the names of the daemon and of its servers begin, as far as the kernel keeps them (15 characters)."""
ANSWER_S = 5.0
START_S = 10.0
QUIT_S = 3
"""How long clients have to leave when the daemon ends; then they are ended."""
PROBE_S = 30.0
"""The first program on a cold device may take long to begin."""
PROBE = Path(__file__).with_name("mps_probe.py")
OWNER = "CRATER_MPS_OF"
"""In a daemon's environment: the data directory of the agent that started it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose daemons these are, and who uses them."""

    root: Path
    """Of all devices' directories; short, as sockets lie below it."""
    data_dir: Path
    uid: int
    gid: int
    """The user that the tasks run as: a server serves one."""
    groups: tuple[int, ...] = ()


class Control:
    """Of one device. Everything raises RuntimeFailed in words, and takes a bounded time."""

    def __init__(self, owner: Owner, index: int, uuid: str) -> None:
        self._owner, self._uuid = owner, uuid
        self._directory = owner.root / str(index)
        self.probing = 0
        """The pid of the probe that runs."""
        self.pipe = Path(pipe_directory(str(owner.root), index))

    @property
    def there(self) -> bool:
        """Whether something was started here that has not been taken away."""
        return self._directory.exists()

    @property
    def lives(self) -> bool:
        """Whether the daemon's process is there, whether or not it answers."""
        return any(is_mps(pid) for pid in self._daemon())

    async def start(self) -> None:
        program = _program()
        try:
            self._make_directories()
        except OSError as error:
            raise RuntimeFailed(f"no place for the MPS daemon: {error.strerror}: {error.filename}") from None
        said = await self._run([program, "-d"], "", START_S, self._environment())
        if said is None:
            raise RuntimeFailed(f"the MPS daemon did not start within {START_S:g} s")
        code, text = said
        if code != 0:
            raise RuntimeFailed(f"the MPS daemon did not start: {_short(text) or f'exit code {code}'}")

    async def ask(self, command: str) -> str:
        program = _program()
        said = await self._run([program], f"{command}\n", ANSWER_S, self._environment())
        if said is None:
            raise RuntimeFailed(f"the MPS daemon did not answer {command.split()[0]} within {ANSWER_S:g} s")
        code, text = said
        if code != 0:
            raise RuntimeFailed(f"the MPS daemon refused {command.split()[0]}: {_short(text) or f'exit code {code}'}")
        return text

    async def servers(self) -> list[int]:
        return await self._pids("get_server_list")

    async def clients(self, servers: list[int]) -> dict[int, int]:
        """The server of each client."""
        return {client: server for server in servers for client in await self._pids(f"get_client_list {server}")}

    async def _pids(self, command: str) -> list[int]:
        answer = await self.ask(command)
        try:
            return numbers(answer)
        except ValueError:
            raise RuntimeFailed(f"the MPS daemon answered {command.split()[0]} with {_short(answer)!r}") from None

    async def limit(self, most: Limits, whole_mib: int) -> None:
        """Allow no client more, of the servers there and of later ones; read back, as a limit may be taken and not applied."""
        memory_mib = most.memory_mib or whole_mib
        await self.ask(f"set_default_active_thread_percentage {most.percent}")
        await self.ask(f"set_default_device_pinned_mem_limit {DEVICE} {memory_mib}M")
        self._compare(await self.ask("get_default_active_thread_percentage"), most.percent, None)
        self._compare(await self.ask(f"get_default_device_pinned_mem_limit {DEVICE}"), None, memory_mib)
        for server in await self.servers():
            await self.ask(f"set_active_thread_percentage {server} {most.percent}")
            await self.ask(f"set_device_pinned_mem_limit {server} {DEVICE} {memory_mib}M")
            self._compare(await self.ask(f"get_active_thread_percentage {server}"), most.percent, None)
            self._compare(await self.ask(f"get_device_pinned_mem_limit {server} {DEVICE}"), None, memory_mib)

    @staticmethod
    def _compare(answer: str, percent: int | None, memory_mib: int | None) -> None:
        if percent is not None and not is_percent(answer, percent):
            raise RuntimeFailed(f"the MPS daemon was told {percent} % of the threads and says {_short(answer)!r}")
        if memory_mib is not None and not is_memory(answer, memory_mib):
            raise RuntimeFailed(f"the MPS daemon was told {memory_mib} MiB and says {_short(answer)!r}")

    async def probe(self) -> None:
        """A real client of the user that the tasks run as: it must come up, and the daemon must know it."""
        environ = {**self._environment(), "PYTHONDONTWRITEBYTECODE": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(PROBE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environ,
            cwd="/",
            **self._as_user(),
        )
        assert process.stdout is not None
        self.probing = process.pid
        try:
            async with asyncio.timeout(PROBE_S):
                line = (await process.stdout.readline()).decode(errors="replace").strip()
                if line != "ready":
                    raise RuntimeFailed(f"a CUDA program could not use it through MPS: {_short(line) or 'it ended at once'}")
                if process.pid not in await self.clients(await self.servers()):
                    raise RuntimeFailed("a CUDA program ran on it past MPS: its daemon does not know it")
        except TimeoutError:
            raise RuntimeFailed(f"a CUDA program got no answer through MPS within {PROBE_S:g} s") from None
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            self.probing = 0

    async def terminate_client(self, server: int, client: int) -> None:
        await self.ask(f"terminate_client {server} {client}")

    async def quit(self, servers: Iterable[int] = ()) -> None:
        """End the daemon and its servers, by force where they do not answer, and take their directory away."""
        if not self.there:
            return
        with contextlib.suppress(RuntimeFailed):
            await self.ask(f"quit -t {QUIT_S}")
        for pid in {*servers, *self._daemon()}:
            if is_mps(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(shutil.rmtree, self._directory, True)
        with contextlib.suppress(OSError):  # Other devices have their daemons there.
            self._owner.root.rmdir()

    def _daemon(self) -> list[int]:
        try:
            return [int((self.pipe / f"{PROGRAM}.pid").read_text())]
        except (OSError, ValueError):
            return []

    def _environment(self) -> dict[str, str]:
        library_path = os.environ.get("LD_LIBRARY_PATH")
        return {
            "PATH": os.environ.get("PATH", SYSTEM_PATH),
            **({"LD_LIBRARY_PATH": library_path} if library_path else {}),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": self._uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self._directory / "log"),
            OWNER: str(self._owner.data_dir),
        }

    def _make_directories(self) -> None:
        """Below a root that is this agent's own: the parent may be a place where others can write."""
        for directory in (self._owner.root.parent, self._owner.root, self._directory):
            directory.mkdir(mode=0o711, exist_ok=True)
            if directory.lstat().st_uid != os.geteuid() or directory.is_symlink():
                raise PermissionError(1, "it belongs to another user", str(directory))
        for directory in (self.pipe, self._directory / "log"):
            directory.mkdir(mode=0o755, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(directory, self._owner.uid, self._owner.gid)

    def _as_user(self) -> dict[str, Any]:
        if os.geteuid() != 0 or self._owner.uid == 0:
            return {}
        return {"user": self._owner.uid, "group": self._owner.gid, "extra_groups": list(self._owner.groups)}

    @staticmethod
    async def _run(argv: list[str], said: str, limit_s: float, environ: Mapping[str, str]) -> tuple[int, str] | None:
        """Exit code and output; None when it took too long. By files: a daemon may keep the ends of pipes open for ever."""
        with tempfile.TemporaryFile() as asks, tempfile.TemporaryFile() as answers:
            asks.write(said.encode())
            asks.seek(0)
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asks, stdout=answers, stderr=answers, env=dict(environ), cwd="/"
            )
            try:
                async with asyncio.timeout(limit_s):
                    code = await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
                return None
            answers.seek(0)
            return code, answers.read().decode(errors="replace")


def why_no_program() -> str:
    """Why no daemon can be started on this node; empty when one can."""
    return "" if shutil.which(PROGRAM) else f"{PROGRAM} was not found on the agent's PATH"


def _program() -> str:
    if why := why_no_program():
        raise RuntimeFailed(why)
    return str(shutil.which(PROGRAM))


def is_mps(pid: int) -> bool:
    """Whether this process is a daemon or a server of MPS, by the name that the kernel keeps of it."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(NAME)
    except OSError:
        return False


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
