"""Twenty small ops, each waiting for the one before, under two executors: what is left is the executors' own time."""

from __future__ import annotations

from dagster import In, Nothing, OpExecutionContext, graph, multiprocess_executor, op

from crater_dagster import crater_executor, crater_tags

STEPS = 20


@op(ins={"after": In(Nothing)}, tags=crater_tags(cpu=0.1, memory="512MiB"))
def link(context: OpExecutionContext) -> None:
    """Does nothing but tell that it ran."""
    context.log.debug("here")


@graph
def chain() -> None:
    before = link.alias("step_00")()
    for number in range(1, STEPS):
        before = link.alias(f"step_{number:02}")(before)


crater_chain = chain.to_job("crater_chain", executor_def=crater_executor)
multiprocess_chain = chain.to_job("multiprocess_chain", executor_def=multiprocess_executor)
