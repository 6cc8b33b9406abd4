"""Twenty small ops, each waiting for the one before, under two executors: what is left is the executors' own time."""

from dagster import In, Nothing, OpExecutionContext, job, multiprocess_executor, op

from crater_dagster import crater_executor, crater_tags

STEPS = 20


@op(ins={"after": In(Nothing)}, tags=crater_tags(cpu=1, memory="512MiB"))
def link(context: OpExecutionContext) -> None:
    """Does nothing but tell that it ran."""
    context.log.debug("here")


def _chain() -> None:
    before = link.alias("step_00")()
    for number in range(1, STEPS):
        before = link.alias(f"step_{number:02}")(before)


@job(executor_def=crater_executor.configured({"env_profile": "dagster"}))
def crater_chain() -> None:
    _chain()


@job(executor_def=multiprocess_executor)
def multiprocess_chain() -> None:
    _chain()
