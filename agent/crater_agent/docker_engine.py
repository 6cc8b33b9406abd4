"""The one door to Docker: calls of its engine over a Unix socket, through the `docker` SDK. Every call blocks: use a thread."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from crater_agent.cgroup_common import core_list
from crater_agent.docker_errors import away, pull_failed, refusal
from crater_agent.docker_spec import EngineFacts, Image, with_tag
from crater_core.errors import RuntimeFailed

log = logging.getLogger("crater.agent.docker")
CALL_TIMEOUT_S = 30
SILENT_PULL_S = 120
"""A registry that sends nothing for so long counts as gone."""
MISSING, CONFLICT = 404, 409


@dataclass(frozen=True, slots=True)
class Container:
    """A container as the engine describes it."""

    id: str
    name: str
    allocation: str
    token: int
    running: bool
    started: bool
    """It has run at least once."""
    pid: int = 0
    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""
    upper_dir: str = ""
    """Where what it writes outside its mounts lies on the node; empty where the storage driver has no such place."""


class Engine:
    """`mark` is the value of the label `crater.agent` by which this agent's containers are told from all others."""

    def __init__(self, socket: str, mark: str) -> None:
        self.socket = socket
        self._label = f"crater.agent={mark}"
        self._client: Any = None
        self._lock = threading.Lock()

    @functools.cached_property
    def _docker(self) -> Any:
        # Only when it is needed: an agent that runs no containers does without its memory.
        return importlib.import_module("docker")

    # ---- the engine itself

    def connect(self) -> EngineFacts:
        """Speak with it anew, as after it was started again. Raises EngineAway."""
        with self._lock:
            self._client = None
        info = self._call("look at the engine", lambda api: api.info())
        return facts_of(info)

    def reachable(self) -> bool:
        """Whether it takes new connections."""
        try:
            with contextlib.closing(self._new_client()) as client:
                client.ping()
        except Exception:  # whatever it is, it is no answer
            return False
        return True

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # ---- images

    def image(self, name: str) -> Image | None:
        found = self._look("look for the image", lambda api: api.inspect_image(with_tag(name)))
        if found is None:
            return None
        config = _part(found, "Config")
        has_command = bool(config.get("Entrypoint") or config.get("Cmd"))
        return Image(found["Id"], config.get("WorkingDir") or "", has_command)

    def pull(self, name: str, auth: Mapping[str, str], progress: Callable[[int, int], None], go_on: Callable[[], bool]) -> None:
        """Fetch an image; `progress` hears done and total bytes, `go_on` is asked between two messages of the engine."""
        layers: dict[str, tuple[int, int]] = {}
        with contextlib.closing(self._new_client(SILENT_PULL_S)) as client:
            stream = self._guard(f"fetch image {name}", lambda: _pull(client, name, auth))
            for line in self._guarded(f"fetch image {name}", stream):
                if not go_on():
                    return
                if "error" in line:
                    raise pull_failed(name, str(line["error"]))
                detail, layer = _part(line, "progressDetail"), str(line.get("id", ""))
                if line.get("status") == "Downloading" and detail.get("total"):
                    layers[layer] = (int(detail.get("current", 0)), int(detail["total"]))
                elif line.get("status") in ("Download complete", "Pull complete") and layer in layers:
                    layers[layer] = (layers[layer][1], layers[layer][1])
                else:
                    continue
                progress(sum(done for done, _ in layers.values()), sum(total for _, total in layers.values()))

    # ---- containers

    def create(self, name: str, body: Mapping[str, Any]) -> str:
        made = self._call("make the container", lambda api: api.create_container_from_config(dict(body), name))
        for warning in made.get("Warnings") or ():
            log.warning("%s: the engine says: %s", name, warning)
        return str(made["Id"])

    def start(self, name: str) -> None:
        self._call("start the container", lambda api: api.start(name))

    def signal(self, name: str, number: int) -> None:
        """Nothing happens to one that has ended or is gone."""
        self._look("signal the container", lambda api: api.kill(name, number), statuses=(MISSING, CONFLICT))

    def keep_on(self, name: str, cores: Sequence[int]) -> None:
        """From now on it runs on these cores only. Nothing happens to one that is gone."""
        self._look("keep the container on its cores", lambda api: api.update_container(name, cpuset_cpus=core_list(cores)))

    def inspect(self, name: str) -> Container | None:
        found = self._look("look at the container", lambda api: api.inspect_container(name))
        return None if found is None else _container(found)

    def ours(self) -> list[Container]:
        listed = self._call(
            "list this agent's containers", lambda api: api.containers(all=True, filters={"label": [self._label]})
        )
        found = [self.inspect(one["Id"]) for one in listed]
        return [one for one in found if one is not None]

    def remove(self, name: str) -> bool:
        """Kill and remove it, with its anonymous volumes. False when the engine could not do it now."""
        try:
            self._look("remove the container", lambda api: api.remove_container(name, force=True, v=True))
        except RuntimeFailed as error:
            log.debug("%s: %s", name, error.message)
            return False
        return True

    # ---- what goes on for long

    def output(self, name: str, stream: str, since_s: int) -> Iterator[tuple[str, bytes]]:
        """What it wrote and writes, one (time, piece) for each line or part of a long line; ends when it has ended."""
        with contextlib.closing(self._new_client()) as client:
            wanted = {"stdout": stream == "stdout", "stderr": stream == "stderr", "since": since_s or None}
            pieces = self._guard(
                "read the output", lambda: client.logs(name, stream=True, follow=True, timestamps=True, **wanted)
            )
            for piece in self._guarded("read the output", pieces):
                time, _, data = piece.partition(b" ")
                yield time.decode(), data

    def ends(self, listening: Callable[[], None]) -> Iterator[str]:
        """The allocation of each of our containers as it ends. `listening` is called once nothing more can be missed."""
        with contextlib.closing(self._new_client()) as client:
            filters = {"label": [self._label], "type": ["container"], "event": ["die"]}
            events = self._guard("listen to the engine", lambda: client.events(filters=filters, decode=True))
            listening()
            for event in self._guarded("listen to the engine", events):
                yield str(event["Actor"]["Attributes"].get("crater.allocation", ""))

    # ---- errors

    def _new_client(self, timeout_s: int = CALL_TIMEOUT_S) -> Any:
        return self._guard(
            "reach the engine",
            lambda: self._docker.APIClient(base_url=f"unix://{self.socket}", version="auto", timeout=timeout_s),
        )

    def _call(self, what: str, call: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._new_client()
            client = self._client
        return self._guard(what, lambda: call(client))

    def _look(self, what: str, call: Callable[[Any], Any], statuses: tuple[int, ...] = (MISSING,)) -> Any:
        """The answer, or None where the engine says by one of these statuses that there is nothing."""
        try:
            return self._call(what, call)
        except RuntimeFailed as error:
            if error.fields.get("status") in statuses:
                return None
            raise

    def _guarded(self, what: str, stream: Any) -> Iterator[Any]:
        pieces = iter(stream)
        while True:
            try:
                piece = self._guard(what, lambda: next(pieces))
            except StopIteration:
                return
            yield piece

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        """The call, with its failures in our words: what the engine refuses, and an engine that is not there."""
        errors, requests = self._docker.errors, importlib.import_module("requests").exceptions
        try:
            return call()
        except errors.APIError as error:
            raise refusal(what, error) from None
        except (errors.DockerException, requests.RequestException, OSError, ValueError) as error:
            raise away(what, error, self.socket) from None


def facts_of(info: Any) -> EngineFacts:
    """From the engine's description of itself."""
    devices = frozenset(str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or ())
    notes = ["the container engine's kernel holds no CPU quota: only the weight of containers is enforced"]
    quota = bool(info.get("CPUCfsQuota", info.get("CpuCfsQuota", True)))
    return EngineFacts(
        version=str(info.get("ServerVersion", "")),
        cpu_quota=quota,
        cdi_devices=devices,
        notes=() if quota else tuple(notes),
    )


def _container(raw: Any) -> Container:
    state, labels = _part(raw, "State"), _part(_part(raw, "Config"), "Labels")
    token = str(labels.get("crater.token", ""))
    return Container(
        id=raw["Id"],
        name=str(raw["Name"]).lstrip("/"),
        allocation=str(labels.get("crater.allocation", "")),
        token=int(token) if token.isdigit() else -1,
        running=bool(state.get("Running")),
        # A container that was made and never started has no time of start.
        started=not str(state.get("StartedAt", "")).startswith("0001-"),
        pid=int(state.get("Pid") or 0),
        exit_code=None if state.get("Running") else state.get("ExitCode"),
        oom_killed=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        upper_dir=str(_part(_part(raw, "GraphDriver"), "Data").get("UpperDir") or ""),
    )


def _part(raw: Any, name: str) -> dict[str, Any]:
    """An object inside an answer; the engine writes null for an empty one."""
    return cast("dict[str, Any]", raw.get(name) or {})


def _pull(client: Any, name: str, auth: Mapping[str, str]) -> Any:
    # An empty one keeps the SDK from looking for credentials in this user's home.
    return client.pull(with_tag(name), stream=True, decode=True, auth_config=dict(auth))
