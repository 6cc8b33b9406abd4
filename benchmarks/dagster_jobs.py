"""Jobs of trivial ops, each under two executors: what is left is the executors' and the launchers' own time."""

import time
from collections.abc import Callable, Iterator

import dagster as dg

from crater_dagster import crater_executor, crater_tags

STEPS = 20
MANY = 2_000
TALKS_S = 4.0
CRATER = crater_executor.configured({"env_profile": "dagster"})
TWO_AT_ONCE = dg.multiprocess_executor.configured({"max_concurrent": 2})


@dg.op(ins={"after": dg.In(dg.Nothing)}, tags=crater_tags(cpu=1, memory="512MiB"))
def link(context: dg.OpExecutionContext) -> None:
    """Does nothing but tell that it ran."""
    context.log.debug("here")


@dg.op(tags=crater_tags(cpu=1, memory="512MiB"))
def alone() -> None:
    """Does nothing."""


@dg.op(tags=crater_tags(cpu=1, memory="512MiB"))
def talks() -> None:
    """Says what time it is, twenty times a second."""
    for _ in range(round(TALKS_S * 20)):
        print(time.time(), flush=True)
        time.sleep(0.05)


@dg.op(tags=crater_tags(cpu=1, memory="512MiB"))
def sleeps() -> None:
    time.sleep(600)


@dg.op(out=dg.DynamicOut(int), tags=crater_tags(cpu=1, memory="512MiB"))
def numbers() -> Iterator[dg.DynamicOutput[int]]:
    for number in range(MANY):
        yield dg.DynamicOutput(number, mapping_key=f"n{number}")


@dg.op(tags=crater_tags(cpu=1, memory="512MiB"))
def takes(number: int) -> None:
    """Does nothing."""


def _chain() -> None:
    before = link.alias("step_00")()
    for number in range(1, STEPS):
        before = link.alias(f"step_{number:02}")(before)


def _fan() -> None:
    for number in range(STEPS):
        alone.alias(f"step_{number:02}")()


def _one() -> None:
    alone()


def _talk() -> None:
    talks()


def _sleep() -> None:
    sleeps()


def _many() -> None:
    numbers().map(takes)


def _job(name: str, body: Callable[[], None], executor: dg.ExecutorDefinition) -> dg.JobDefinition:
    return dg.job(name=name, executor_def=executor)(body)


defs = dg.Definitions(
    jobs=[
        *[_job(f"crater_{body.__name__.strip('_')}", body, CRATER) for body in (_chain, _fan, _one)],
        *[_job(f"default_{body.__name__.strip('_')}", body, TWO_AT_ONCE) for body in (_chain, _fan, _one)],
        _job("crater_talks", _talk, CRATER),
        _job("crater_sleeps", _sleep, CRATER),
        _job("crater_many", _many, CRATER),
    ]
)
