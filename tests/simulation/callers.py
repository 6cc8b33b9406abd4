"""Those who submit, repeat, cancel, deploy and scale, over the same unreliable network as everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import httpx
from simulation.checks import Broken, Ledger
from simulation.loop import Process, VirtualLoop
from simulation.machine import NEVER_MS
from simulation.network import Network, Transport

GIVE_UP_S = 2_000
KINDS = ("cpu", "cpu", "gpu", "share", "share", "gang", "elastic", "gpu-gang", "control", "urgent", "port", "limited")


def a_body(rng: Random, number: int) -> dict[str, Any]:
    """One task of any kind. Its command is read by the simulated machine: how long it runs, how it ends, how it takes SIGTERM."""
    duration_ms = rng.choice([500, 3_000, 15_000, 60_000])
    exit_code = rng.choice([0, 0, 0, 0, 1])
    ends_on_term_ms = rng.choice([10, 10, 2_000, NEVER_MS])
    body: dict[str, Any] = {
        "name": f"job-{number}",
        "command": ["sim", str(duration_ms), str(exit_code), str(ends_on_term_ms)],
        "resources": {"cpu": rng.choice([0.5, 1, 2]), "memory": "1GiB"},
        "grace": rng.choice(["1s", "10s"]),
        "project": rng.choice(["bounded", "free"]),
        "retry": {
            "attempts": rng.choice([1, 3]),
            "on_node_loss": rng.random() < 0.8,
            "on_failure": rng.random() < 0.3,
            "backoff": "1s",
        },
        "priority": rng.choice([50, 50, 50, 90]),
        "on_disconnect": "keep" if rng.random() < 0.15 else "stop",
    }
    match rng.choice(KINDS):
        case "gpu":
            body["resources"]["gpu"] = 1
        case "share":
            body["resources"]["gpu"] = rng.choice([0.25, 0.5])
        case "gang":
            body["members"] = rng.choice([2, 3])
        case "elastic":
            body |= {"members_min": 1, "members": 4}
            body["resources"]["cpu"] = 2
        case "gpu-gang":
            body["members"] = 2
            body["resources"]["gpu"] = rng.choice([0.5, 1])
        case "control":
            body["type"] = "control"
            body["resources"] = {"cpu": 0.1, "memory": "64MiB"}
        case "urgent":
            body |= {"priority": 100, "strategy": "preemptive"}
            body["resources"] = {"cpu": 6, "memory": "1GiB"}
        case "port":
            body["ports"] = 1
        case "limited":
            body["time_limit"] = "4s"
        case _:
            pass
    if rng.random() < 0.1:
        body["group"] = f"group-{rng.randrange(3)}"
    return body


class Callers:
    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        rng: Random,
        ledger: Ledger,
        say: Callable[[str], None],
        endpoints: Sequence[str],
    ) -> None:
        self.loop, self.rng, self.ledger, self.say = loop, rng, ledger, say
        self.endpoints = tuple(endpoints)
        self.process = Process(loop, "callers")
        transport, timeout = Transport(network, "callers"), httpx.Timeout(10, connect=3)
        self.http = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)
        self.busy = 0
        self.known: set[str] = set()
        """Tasks and arrays that were acknowledged."""
        self.arrays: dict[str, int] = {}
        """How many tasks each has."""
        self._number = 0

    def submit(self) -> None:
        self._number += 1
        body, key = a_body(self.rng, self._number), f"key-{self._number}"
        match self.rng.choice(["one"] * 7 + ["after"] * 2 + ["array", "batch"]):
            case "array":
                body.pop("members", None)
                size = self.rng.choice([2, 3, 5])
                array = {"task": body, "indices": size, "running_max": self.rng.choice([None, 1, 2])}
                self._go(self._submit("/v1/arrays", array, key))
            case "batch":
                self._go(self._submit_batch(body))
            case "after":
                known = sorted(self.known)
                named = self.rng.sample(known, min(len(known), self.rng.choice([1, 1, 2])))
                body["after"] = [{"task": one, "when": self._when(one)} for one in named]
                self._go(self._submit("/v1/tasks", body, key))
            case _:
                self._go(self._submit("/v1/tasks", body, key))

    def _when(self, name: str) -> str:
        return self.rng.choice(["succeeded", "ended"] if name in self.arrays else ["succeeded", "ended", "failed"])

    def cancel(self) -> None:
        live = sorted(t.id for t in self.ledger.tasks.values() if not t.status.ended and t.spec.service is None)
        if live:
            self._go(self._call("POST", f"/v1/tasks/{self.rng.choice(live)}/cancel", {}))

    def deploy(self) -> None:
        command = ["sim", str(self.rng.choice([20_000, NEVER_MS])), "1", "10"]
        body = {
            "name": "web",
            "replicas": self.rng.choice([1, 2, 3]),
            "command": command,
            "resources": {"cpu": 1, "memory": "1GiB"},
            "on_disconnect": self.rng.choice(["stop", "keep"]),
        }
        self._go(self._call("PUT", "/v1/services/web", body))

    def scale(self) -> None:
        self._go(self._call("POST", "/v1/services/web/scale", {"replicas": self.rng.choice([0, 1, 2, 4])}))

    def remove(self) -> None:
        self._go(self._call("DELETE", "/v1/services/web", None))

    def _go(self, work: Any) -> None:
        self.process.run(self._counted(work))

    async def _counted(self, work: Any) -> None:
        self.busy += 1
        try:
            await work
        finally:
            self.busy -= 1

    async def _submit(self, path: str, body: dict[str, Any], key: str) -> None:
        answer = await self._call("POST", path, body, {"Idempotency-Key": key})
        if answer is None or answer.status_code not in (200, 201):
            self.say(f"{key} refused: {answer and answer.text}")
            return
        name = answer.json()["id"]
        self.say(f"{key} is {name}")
        if path == "/v1/arrays":
            self.arrays[name] = size = body["indices"]
            found = [task.id for task in self.ledger.tasks.values() if task.spec.array and task.spec.array.id == name]
            if len(found) != size:
                self.ledger.fail(Broken(f"array {name} of {size} was acknowledged, and {len(found)} are in the store"))
            self._acknowledged(*found)
        else:
            self._acknowledged(name)
        self.known.add(name)
        if self.rng.random() < 0.2:
            again = await self._call("POST", path, body, {"Idempotency-Key": key})
            if again is not None and (again.status_code != 200 or again.json()["id"] != name):
                self.ledger.fail(Broken(f"{key} gave {name}, and then {again.status_code} {again.text}"))

    async def _submit_batch(self, body: dict[str, Any]) -> None:
        """A chain, in one call: each comes after the one before."""
        number = self._number
        tasks = [{**body, "name": f"job-{number}-{place}"} for place in range(3)]
        for before, task in pairwise(tasks):
            task["after"] = [{"task": before["name"], "when": self._when("")}]
        keys = [f"key-{number}-{place}" for place in range(3)]
        answer = await self._call("POST", "/v1/tasks:batch", {"tasks": tasks, "idempotency_keys": keys})
        if answer is None or answer.status_code != 201:
            self.say(f"batch {number} refused: {answer and answer.text}")
            return
        found = [task["id"] for task in answer.json()["tasks"]]
        self.say(f"batch {number} is {found}")
        self._acknowledged(*found)

    def _acknowledged(self, *tasks: str) -> None:
        self.ledger.acknowledged |= set(tasks)
        lost = [task for task in tasks if task not in self.ledger.tasks]
        if lost:
            self.ledger.fail(Broken(f"{lost} were acknowledged and are not in the store"))

    async def _call(self, method: str, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response | None:
        """Again and again, until somebody answers."""
        until_s, endpoint = self.loop.time() + GIVE_UP_S, self.rng.choice(self.endpoints)
        while self.loop.time() < until_s:
            try:
                answer = await self.http.request(method, endpoint + path, json=body, headers=headers)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 421 and answer.json().get("leader"):
                endpoint, answer = answer.json()["leader"], None
            else:
                endpoint = self.rng.choice(self.endpoints)
            if answer is not None and answer.status_code == 500:
                self.ledger.fail(Broken(f"{method} {path}: {answer.text}"))
            if answer is not None and answer.status_code not in (421, 500, 503):
                return answer
            await asyncio.sleep(0.2 + self.rng.random())
        return None
