"""What a node's doctor checks over the network: the scheduler, the clocks, the token, and the agent's own port."""

from __future__ import annotations

import email.utils
import os
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from crater_agent import config
from crater_agent.config import AgentConfig
from crater_agent.outbound import httpx
from crater_core.errors import BadConfiguration
from crater_core.findings import Finding

TIMEOUT_S = 5.0
SKEW_WARN_S, SKEW_FAIL_S = 3.0, 60.0
SLOW_MS = 200


def check_scheduler(settings: AgentConfig, file: str) -> Iterator[Finding]:
    try:
        token = config.token_of(settings, os.environ, file)
    except BadConfiguration as error:
        yield Finding.failed("token", error.message, "write the token of role agent there, readable by the agent alone")
        token = None
    reached = 0
    for endpoint in settings.scheduler_endpoint:
        began = time.monotonic()
        try:
            answer = httpx.get(f"{endpoint}/health", timeout=TIMEOUT_S, trust_env=False)
        except httpx.HTTPError as error:
            yield _unreachable(endpoint, error)
            continue
        reached += 1
        yield _health(endpoint, answer, round((time.monotonic() - began) * 1000))
        if reached == 1:
            yield from _clock(answer)
            yield from _token(settings, endpoint, token)


def _unreachable(endpoint: str, error: Exception) -> Finding:
    where = urlsplit(endpoint)
    port = where.port or (443 if where.scheme == "https" else 80)
    saw = f"{endpoint} cannot be reached: {str(error) or type(error).__name__}"
    if "Name or service" in saw or "resolution" in saw:
        return Finding.failed("scheduler", saw, f"correct scheduler_endpoint: {where.hostname} is no known name")
    if "refused" in saw:
        return Finding.failed(
            "scheduler", saw, f"start crater-scheduler there, with `listen` on an address that others reach, port {port}"
        )
    return Finding.failed("scheduler", saw, f"open port {port} of {where.hostname} to this node")


def _health(endpoint: str, answer: httpx.Response, latency_ms: int) -> Finding:
    try:
        body = answer.json()
        saw = f"{endpoint}: {body['status']}, version {body['version']}, answers in {latency_ms} ms"
    except (ValueError, KeyError, TypeError):
        return Finding.failed(
            "scheduler", f"{endpoint}/health is no scheduler's answer (status {answer.status_code})", "correct scheduler_endpoint"
        )
    if body["status"] != "ok":
        return Finding.failed("scheduler", saw, "look at the scheduler's log")
    if latency_ms > SLOW_MS:
        return Finding.warned("scheduler", saw, "look at the network between: starts and heartbeats wait for it")
    return Finding.passed("scheduler", saw)


def _clock(answer: httpx.Response) -> Iterator[Finding]:
    try:
        there = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return
    # The header counts whole seconds, cut off.
    skew_s = time.time() - there - 0.5
    saw, fix = (
        f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the scheduler's",
        "run chrony or systemd-timesyncd on both",
    )
    if abs(skew_s) > SKEW_FAIL_S:
        yield Finding.failed("clock", saw, fix)
    elif abs(skew_s) > SKEW_WARN_S:
        yield Finding.warned("clock", saw, fix)
    else:
        yield Finding.passed("clock", "within a second or so of the scheduler's")


def _token(settings: AgentConfig, endpoint: str, token: str | None) -> Iterator[Finding]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{endpoint}/v1/agents/{settings.node_name}/leases", headers=headers, timeout=TIMEOUT_S, trust_env=False
        )
    except httpx.HTTPError:
        return
    fix = "`crater-scheduler token new nodes --role agent` there, its line into tokens:, the token into token_file here"
    if answer.status_code == 401:
        yield Finding.failed("token", "the scheduler does not know this token" if token else "the scheduler wants a token", fix)
    elif answer.status_code == 403:
        yield Finding.failed("token", "the scheduler knows this token, but it is not one of role agent", fix)
    elif answer.status_code in (200, 404):
        registered = "registered" if answer.status_code == 200 else "not registered yet"
        yield Finding.passed("token", f"{'taken' if token else 'none needed'}; {settings.node_name} is {registered}")
    else:
        yield Finding.warned("token", f"could not be tried: status {answer.status_code}", "look at the scheduler's log")


def check_port(settings: AgentConfig) -> Iterator[Finding]:
    name = "metrics port"
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104 (compared, not bound)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    if settings.port == 0:
        yield Finding.passed(name, "chosen when the agent starts")
        return
    try:
        body = httpx.get(f"{url}/health", timeout=TIMEOUT_S, trust_env=False).json()
        metrics = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, trust_env=False)
    except httpx.ConnectError:
        yield _try_to_listen(settings, name)
        return
    except (httpx.HTTPError, ValueError) as error:
        yield Finding.failed(name, f"{settings.listen} is taken by something else ({error})", "set `listen` to another port")
        return
    if body.get("node") != settings.node_name:
        yield Finding.failed(
            name, f"another agent ({body.get('node')}) listens on {settings.listen}", "set `listen` to another port"
        )
    elif metrics.status_code != 200:
        yield Finding.failed(name, f"{url}/metrics answers with status {metrics.status_code}", "look at the agent's log")
    else:
        lines = sum(not line.startswith("#") for line in metrics.text.splitlines())
        yield Finding.passed(name, f"the agent runs and serves {lines} values at {url}/metrics")


def _try_to_listen(settings: AgentConfig, name: str) -> Finding:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Finding.failed(
                name, f"{settings.listen} cannot be listened on: {error.strerror}", "set `listen` to another address"
            )
    return Finding.warned(name, f"{settings.listen} is free: no agent runs", "systemctl start crater-agent")
