"""A code location that is the same file here and in an image, but for one word."""

import time
from pathlib import Path

import dagster as dg

from crater_dagster import crater_executor, crater_tags

WHERE = "here"
TINY = {"cpu": 0.5, "memory": "400MiB"}


@dg.op(tags=crater_tags(**TINY))
def looks() -> dict[str, str]:
    print(f"this is {WHERE}", flush=True)
    return {"where": WHERE, "root": ",".join(path.name for path in Path("/").iterdir())}


@dg.op(tags=crater_tags(**TINY))
def tells(seen: dict[str, str]) -> dg.Output[None]:
    return dg.Output(None, metadata={**seen, "told by": WHERE})


@dg.op(tags=crater_tags(**TINY))
def takes_too_much() -> None:
    taken = bytearray(600 * 1024**2)
    taken[::4096] = b"x" * len(taken[::4096])


@dg.op(tags=crater_tags(**TINY))
def sleeps(context: dg.OpExecutionContext) -> None:
    Path(context.run.tags["mark"]).touch()
    time.sleep(600)


@dg.job(executor_def=crater_executor)
def in_an_image():
    tells(looks())


@dg.job(executor_def=crater_executor)
def too_much():
    takes_too_much()


@dg.job(executor_def=crater_executor)
def long():
    sleeps()


@dg.job
def in_one_process():
    tells(looks())


defs = dg.Definitions(jobs=[in_an_image, too_much, long, in_one_process])
