"""Many small steps: one for each part of the input, as many at once as the nodes have room for."""

from collections.abc import Iterator

import dagster as dg

from crater_dagster import crater_executor, crater_tags

SMALL = crater_tags(cpu=0.2, memory="256MiB")


class Parts(dg.Config):
    count: int = 12
    size: int = 1000


@dg.op(out=dg.DynamicOut(int), tags=SMALL)
def parts(config: Parts) -> Iterator[dg.DynamicOutput[int]]:
    for number in range(config.count):
        yield dg.DynamicOutput(number * config.size, mapping_key=f"part_{number}")


@dg.op(tags=SMALL)
def primes_from(start: int) -> int:
    """How many primes there are among the next thousand numbers."""
    return sum(n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(start, start + 1000))


@dg.op(tags=SMALL)
def total(context: dg.OpExecutionContext, counts: list[int]) -> int:
    context.log.info(f"{sum(counts)} primes in {len(counts)} parts")
    return sum(counts)


@dg.job(executor_def=crater_executor, description="A step for each part; warm starts make each cost little.")
def many_small_steps():
    total(parts().map(primes_from).collect())
