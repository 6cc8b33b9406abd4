"""The command `crater-agent drain`: asks the scheduler, with this node's own token, to send nothing new here.

What runs goes on to its end, and so does the agent; replicas of services leave once another one is ready elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from crater_agent import config
from crater_agent.link import Link
from crater_core.errors import BadConfiguration, CraterError, SchedulerUnreachable
from crater_core.wire.agents import DrainAnswer

LOOK_S = 2.0
DEFAULT_FILE = Path("/etc/crater/agent.yaml")


def main(arguments: Sequence[str]) -> int:
    """0: drained, or asked for without `--wait`; 1: the scheduler refused or cannot be reached; 2: the file is wrong."""
    wish = _parser().parse_args(arguments)
    try:
        settings = config.load(wish.config)
        token = config.token_of(settings, os.environ, wish.config.name)
        return asyncio.run(_drain(Link(settings.scheduler_endpoint, token, settings.node_name), wish))
    except CraterError as error:
        sys.stderr.write(f"crater-agent drain: {error.message}\n")
        return 2 if isinstance(error, BadConfiguration) else 1
    except KeyboardInterrupt:
        sys.stderr.write("crater-agent drain: no longer waited for; the node goes on draining (--undo takes it back)\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crater-agent drain",
        description="Sends nothing new to this node. What runs goes on to its end; no task is stopped for it.",
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_FILE, metavar="FILE", help="agent.yaml (default %(default)s)")
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown beside the node")
    parser.add_argument("--wait", action="store_true", help="until nothing is left on the node")
    parser.add_argument("--undo", action="store_true", help="take tasks again")
    return parser


async def _drain(link: Link, wish: argparse.Namespace) -> int:
    try:
        if wish.undo:
            await link.undrain()
            sys.stdout.write(f"{link.node} takes tasks again\n")
            return 0
        answer = await link.drain(wish.reason)
        sys.stdout.write(sentence(link.node, answer))
        while wish.wait and answer.allocations:
            sys.stdout.flush()
            await asyncio.sleep(LOOK_S)
            before = answer.allocations
            with contextlib.suppress(SchedulerUnreachable):
                answer = await link.draining()
            if not answer.draining:
                sys.stderr.write(f"crater-agent drain: {link.node} has been told to take tasks again meanwhile\n")
                return 1
            if answer.allocations != before:
                sys.stdout.write(sentence(link.node, answer))
        return 0
    finally:
        await link.close()


def sentence(node: str, answer: DrainAnswer) -> str:
    if not answer.allocations:
        return f"{node} is drained: nothing runs on it, and nothing new is sent to it\n"
    what = "1 allocation goes" if answer.allocations == 1 else f"{answer.allocations} allocations go"
    return f"{node} is draining: {what} on to the end, and nothing new is sent to it\n"
