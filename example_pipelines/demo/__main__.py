"""`python -m example_pipelines.demo run | up | down`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from example_pipelines.demo import session
from example_pipelines.demo.processes import DemoFailed
from example_pipelines.demo.show import Screen

_DO = {"run": session.run_once, "up": session.keep_up, "down": session.take_down}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo", description="A cluster of two nodes on this machine runs the digits loop.")
    parser.add_argument("what", choices=tuple(_DO), nargs="?", default="run", help="run once (default), keep up, or take down")
    parser.add_argument("--home", type=Path, default=Path(".demo"), help="where configuration, data and logs go (default: .demo)")
    options = parser.parse_args(argv)
    screen = Screen()
    try:
        return _DO[options.what](options.home.expanduser().absolute(), screen)
    except DemoFailed as error:
        screen.calm()
        screen.say("", str(error), "bold red")
        return 1


if __name__ == "__main__":
    sys.exit(main())
