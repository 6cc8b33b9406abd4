"""What goes wrong with a container engine, in our words: is it the task's own fault, this node's, or is the engine away."""

from __future__ import annotations

from typing import Any

from crater_agent.docker_spec import registry_of
from crater_core.errors import RuntimeFailed

MESSAGE_MAX = 500
_TASKS_OWN = ("executable file not found", "no such file or directory: unknown", "permission denied: unknown", "is a directory")


class EngineAway(RuntimeFailed):
    """The engine cannot be reached, or may not be used. Says nothing about what runs in it."""

    code = "engine_away"


def pull_failed(name: str, why: str) -> RuntimeFailed:
    """A registry that cannot be reached may be reached from another node; an image that is not there is nowhere."""
    lower = why.lower()
    final = ("not found", "manifest unknown", "denied", "unauthorized", "does not exist", "no basic auth", "invalid reference")
    again = int(not any(sign in lower for sign in final))
    return RuntimeFailed(f"image {name} could not be fetched from {registry_of(name)}: {why[:MESSAGE_MAX]}", again=again)


def refusal(what: str, error: Any) -> RuntimeFailed:
    """From an answer of the engine that is an error."""
    status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
    why = str(error.explanation or error)
    if what.startswith("fetch image "):
        return pull_failed(what.removeprefix("fetch image "), why)
    message = f"could not {what}: {_short(why)}"
    # What the engine calls a bad request would be one on every node.
    user_fault = status in (400, 404) or _is_the_tasks_own(why)
    return RuntimeFailed(message, again=int(not user_fault), status=status)


def away(what: str, error: Exception, socket: str) -> EngineAway:
    return EngineAway(f"could not {what}: {_why(error, socket)}", again=1)


def _is_the_tasks_own(why: str) -> bool:
    return "exec" in why and any(sign in why for sign in _TASKS_OWN)


def _short(why: str) -> str:
    """The last cause of the chain that an OCI runtime tells."""
    if "could not select device driver" in why:
        return f"{why[:MESSAGE_MAX]} (the NVIDIA Container Toolkit is not set up for this engine)"
    head, found, cause = why.partition("container process: ")
    return (cause if found else head)[:MESSAGE_MAX]


def _why(error: Exception, socket: str) -> str:
    text = str(error)
    if "Permission denied" in text:
        return f"this agent may not use {socket}: run it as root, or in the group that owns the socket"
    if "No such file" in text or "Connection refused" in text:
        return f"no engine listens at {socket}"
    if "timed out" in text.lower():
        return f"the engine at {socket} does not answer"
    return text[:MESSAGE_MAX] or type(error).__name__
