"""A code location of jobs that Dagster's own rules are tried on: limits, retries, layers of options, one more cancel."""

import os
import time
from pathlib import Path

import dagster as dg

from crater_dagster import crater_executor, crater_tags

TINY = {"cpu": 0.2, "memory": "300MiB"}
LAYERS = ("launcher", "location", "executor", "run", "op", "per_step")


def labels_from(layer: str) -> dict[str, str]:
    """Every layer sets the labels of itself and of all above it, so that each label tells which layer won."""
    return {f"set-by-{name}-or-below": layer for name in LAYERS[LAYERS.index(layer) :]}


def _wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.02)


@dg.op(tags=crater_tags(**TINY))
def holds(context: dg.OpExecutionContext) -> None:
    _wait_for(context.run.tags["gate"])


@dg.op(tags={**crater_tags(**TINY), "uses": "database"})
def uses_the_database(context: dg.OpExecutionContext) -> None:
    _wait_for(context.run.tags["gate"])


@dg.op(tags=crater_tags(**TINY), pool="database")
def takes_a_slot(context: dg.OpExecutionContext) -> None:
    _wait_for(context.run.tags["gate"])


@dg.op(tags=crater_tags(time_limit="3s", **TINY), retry_policy=dg.RetryPolicy(max_retries=1))
def dawdles_once(context: dg.OpExecutionContext) -> None:
    if context.retry_number == 0:
        time.sleep(600)


@dg.op(tags=crater_tags(**TINY), pool="database")
def passes_through_the_pool() -> int:
    return 1


@dg.op(tags=crater_tags(**TINY), retry_policy=dg.RetryPolicy(max_retries=1, delay=2))
def fails_once(context: dg.OpExecutionContext) -> int:
    if context.retry_number == 0:
        raise ValueError("the first time")
    return 2


@dg.op(tags=crater_tags(**TINY))
def sees_much(context: dg.OpExecutionContext) -> int:
    for number in range(1_100):
        context.log_event(dg.AssetObservation("seen", metadata={"number": number}))
    return 1


@dg.op(tags=crater_tags(**TINY))
def holds_on_to(context: dg.OpExecutionContext, number: int) -> None:
    _wait_for(context.run.tags["gate"])


@dg.op(tags=crater_tags(**TINY), out={"yes": dg.Out(int, is_required=False), "no": dg.Out(int, is_required=False)})
def says_yes():
    yield dg.Output(1, "yes")


@dg.op(tags=crater_tags(**TINY), out=dg.DynamicOut(int))
def makes_two(number: int):
    yield dg.DynamicOutput(number, "one")
    yield dg.DynamicOutput(number + 1, "two")


@dg.op(tags=crater_tags(**TINY))
def adds_up(numbers: list[int]) -> int:
    return sum(numbers)


@dg.op(tags=crater_tags(**TINY))
def fails() -> int:
    raise ValueError("always")


@dg.op(tags=crater_tags(**TINY))
def passes_on(number: int) -> int:
    return number


@dg.op(tags=crater_tags(**TINY))
def counts(context: dg.OpExecutionContext) -> int:
    with Path(context.run.tags["marks"]).open("a") as file:
        file.write(f"{context.run_id}\n")
    return 7


@dg.op(tags=crater_tags(cpu=0.2, memory="300MiB", time_limit="3s"))
def dawdles_in_the_first_run(context: dg.OpExecutionContext, number: int) -> None:
    if context.run.parent_run_id is None:
        time.sleep(600)
    Path(context.run.tags["marks"]).with_suffix(".seen").write_text(str(number))


@dg.op(tags=crater_tags(labels=labels_from("op"), memory="310MiB"))
def asks_in_every_layer() -> None: ...


@dg.op
def asks_for_nothing() -> None: ...


@dg.asset(op_tags=crater_tags(labels={"asked-by": "the asset"}, **TINY))
def from_the_graph() -> str:
    return os.environ["CRATER_TASK_ID"]


@dg.asset(op_tags=crater_tags(labels={"asked-by": "the next asset"}, cpu=0.3, memory="300MiB"))
def next_of_it(from_the_graph: str) -> str:
    return from_the_graph


@dg.job(executor_def=crater_executor)
def holding():
    for name in ("a", "b", "c", "d"):
        holds.alias(name)()


@dg.job(executor_def=crater_executor)
def using():
    for name in ("a", "b"):
        uses_the_database.alias(name)()
    holds.alias("free")()


@dg.job(executor_def=crater_executor)
def pooling():
    for name in ("a", "b", "c"):
        takes_a_slot.alias(name)()


@dg.job(executor_def=crater_executor)
def through_the_pool():
    holds_on_to(passes_through_the_pool())


@dg.job(executor_def=crater_executor)
def at_the_second_attempt():
    holds_on_to(fails_once())


@dg.job(executor_def=crater_executor)
def after_much():
    holds_on_to(sees_much())


@dg.job(executor_def=crater_executor)
def of_every_kind():
    yes, no = says_yes()
    passes_on.alias("skipped_too")(passes_on.alias("skipped")(no))
    passes_on.alias("left_out")(fails())
    holds_on_to(adds_up(makes_two(yes).map(passes_on).collect()))


@dg.job(executor_def=crater_executor)
def late_once():
    dawdles_once()


@dg.job(executor_def=crater_executor)
def late_in_the_first_run():
    dawdles_in_the_first_run(counts())


@dg.job(executor_def=crater_executor)
def layered():
    asks_in_every_layer()
    asks_for_nothing()


defs = dg.Definitions(
    assets=[from_the_graph, next_of_it],
    jobs=[
        holding,
        using,
        pooling,
        through_the_pool,
        at_the_second_attempt,
        after_much,
        of_every_kind,
        late_once,
        late_in_the_first_run,
        layered,
    ],
    executor=crater_executor,
)
