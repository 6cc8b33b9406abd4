"""The code location that the tests launch runs of: small jobs, each for one rule."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import dagster as dg

from crater_dagster import (
    AutoscaleRule,
    CraterResource,
    PipesCraterClient,
    build_autoscale_sensor,
    crater_executor,
    crater_tags,
    inference_service_asset,
)
from example_pipelines.recipes.gang import gang_model
from example_pipelines.recipes.partitions import daily_report
from example_pipelines.recipes.small_steps import many_small_steps

PROGRAMS = Path(__file__).parent / "programs"

SMALL = {"cpu": 0.9, "memory": "400MiB"}


@dg.asset(op_tags=crater_tags(node_labels={"side": "left"}, **SMALL))
def left() -> int:
    print("left speaks on stdout", flush=True)
    return 1


@dg.asset(op_tags=crater_tags(node_labels={"side": "right"}, **SMALL))
def right() -> dg.MaterializeResult[int]:
    return dg.MaterializeResult(value=2, metadata={"own": 7})


@dg.asset(op_tags=crater_tags(gpu=0.25, **SMALL))
def both(left: int, right: int) -> int:
    return left + right


@dg.op(tags=crater_tags(**SMALL))
def fails() -> None:
    raise ValueError("the data were not as promised")


@dg.op(tags=crater_tags(**SMALL), retry_policy=dg.RetryPolicy(max_retries=1))
def fails_once(context: dg.OpExecutionContext) -> int:
    if context.retry_number == 0:
        raise ValueError("not yet")
    return context.retry_number


@dg.op(tags=crater_tags(cpu=0.9, memory="300MiB"))
def eats() -> None:
    held = []
    while True:
        held.append(bytearray(os.urandom(1024) * 1024 * 8))


@dg.op(tags=crater_tags(cpu=0.9, memory="300MiB", on_oom={"factor": 2, "memory_max": "700MiB"}, members=2))
def eats_some() -> None:
    held = os.urandom(1024) * 1024 * 330
    print(len(held))


@dg.op(tags=crater_tags(**SMALL))
def vanishes() -> None:
    sys.stderr.write("last words\n")
    sys.stderr.flush()
    os._exit(0)


@dg.op(tags=crater_tags(**SMALL))
def dies() -> None:
    for number in range(300):
        sys.stderr.write(f"line {number} of its output\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


@dg.op(tags=crater_tags(**SMALL), config_schema={"how": str})
def succeeds_then_dies(context: dg.OpExecutionContext) -> int:
    """As a library that crashes while the interpreter is taken apart."""
    how = {"exit": lambda: os._exit(3), "signal": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    atexit.register(how[context.op_config["how"]])
    return 4


@dg.op(tags=crater_tags(**SMALL))
def leaves_slowly() -> None:
    """As a library that writes its last lines while the interpreter is taken apart."""

    def farewell() -> None:
        time.sleep(1.5)
        print("last words", flush=True)

    atexit.register(farewell)


@dg.op(tags=crater_tags(memory="8000GiB"))
def asks_too_much() -> None: ...


@dg.op(tags=crater_tags(time_limit="3s", **SMALL))
def dawdles() -> None:
    time.sleep(600)


@dg.op(tags=crater_tags(**SMALL), config_schema={"mark": str})
def sleeps(context: dg.OpExecutionContext) -> None:
    Path(context.op_config["mark"]).write_text(str(os.getpid()))
    time.sleep(600)


@dg.op(tags=crater_tags(**SMALL), config_schema={"wait_for": str})
def waits_for_a_file(context: dg.OpExecutionContext) -> int:
    while not Path(context.op_config["wait_for"]).exists():
        time.sleep(0.02)
    return 5


@dg.op(tags=crater_tags(**SMALL), config_schema={"wait_for": str})
def speaks(context: dg.OpExecutionContext) -> None:
    print("first words")
    while not Path(context.op_config["wait_for"]).exists():
        time.sleep(0.02)
    print("last words")


@dg.op(tags=crater_tags(**SMALL))
def talks() -> None:
    for number in range(2400):
        print(f"line {number}", flush=True)
        time.sleep(0.05)


@dg.op(tags=crater_tags(**SMALL), config_schema={"mark": str})
def lives_twice(context: dg.OpExecutionContext) -> int:
    mark = Path(context.op_config["mark"])
    with mark.open("a") as file:
        file.write(f"{os.environ['CRATER_NODE']} {context.retry_number}\n")
    while not mark.with_suffix(".end").exists():
        time.sleep(0.02)
    return 5


@dg.op(tags=crater_tags(on_disconnect="keep", **SMALL), config_schema={"mark": str})
def stays_where_it_is(context: dg.OpExecutionContext) -> None:
    Path(context.op_config["mark"]).write_text(os.environ["CRATER_NODE"] + "\n")
    time.sleep(600)


@dg.op(tags=crater_tags(node_labels={"side": "nowhere"}, **SMALL))
def waits_for_a_node() -> None: ...


@dg.op(tags=crater_tags(**SMALL), out=dg.DynamicOut(int))
def spreads():
    for number in range(3):
        yield dg.DynamicOutput(number, mapping_key=f"n{number}")


@dg.op(tags=crater_tags(cpu=0.6, memory="300MiB"))
def doubles(number: int) -> int:
    return number * 2


@dg.op(tags=crater_tags(cpu=0.6, memory="300MiB"))
def adds(numbers: list[int]) -> int:
    return sum(numbers)


@dg.op(tags=crater_tags(cpu=0.6, memory="300MiB"))
def after(number: int) -> int:
    return number + 1


@dg.job(executor_def=crater_executor)
def failing():
    fails()


@dg.job(executor_def=crater_executor)
def retried():
    fails_once()


@dg.job(executor_def=crater_executor)
def hungry():
    eats()


@dg.job(executor_def=crater_executor)
def growing():
    eats_some()


@dg.job(executor_def=crater_executor)
def silent():
    vanishes()


@dg.job(executor_def=dg.in_process_executor, tags=crater_tags(run_on="compute", cpu=0.5, memory="600MiB"))
def silent_in_one_process():
    vanishes()


@dg.job(executor_def=crater_executor)
def dying_late():
    after(succeeds_then_dies())
    waits_for_a_file()


@dg.job(executor_def=crater_executor)
def leaving_slowly():
    leaves_slowly()


@dg.job(executor_def=crater_executor)
def killed():
    dies()


@dg.job(executor_def=crater_executor)
def impossible():
    asks_too_much()


@dg.job(executor_def=crater_executor)
def slow():
    dawdles()


@dg.job(executor_def=crater_executor)
def sleeping():
    sleeps()


@dg.job(executor_def=dg.in_process_executor, tags=crater_tags(run_on="compute", cpu=0.5, memory="600MiB"))
def sleeping_in_one_process():
    sleeps()


@dg.job(executor_def=crater_executor)
def speaking():
    speaks()


@dg.job(executor_def=crater_executor)
def surviving():
    after(lives_twice())


@dg.job(executor_def=dg.in_process_executor, tags=crater_tags(run_on="compute", cpu=0.9, memory="600MiB"))
def surviving_in_one_process():
    after(lives_twice())


@dg.job(executor_def=crater_executor)
def staying():
    stays_where_it_is()


@dg.job(executor_def=crater_executor)
def waiting():
    waits_for_a_node()


@dg.job(executor_def=crater_executor)
def talking():
    talks()


@dg.job(executor_def=crater_executor)
def interrupted():
    after(waits_for_a_file())


@dg.job(executor_def=crater_executor)
def spreading():
    adds(spreads().map(doubles).collect())


@dg.job(
    executor_def=dg.in_process_executor,
    tags=crater_tags(run_on="compute", cpu=0.9, memory="600MiB", time_limit="6s"),
)
def slow_in_one_process():
    dawdles()


@dg.op
def spread_one() -> int:
    return 4


@dg.job(executor_def=dg.in_process_executor, tags=crater_tags(run_on="compute", cpu=0.5, memory="600MiB"))
def in_one_process():
    after(doubles.alias("first")(spread_one()))


@dg.asset(op_tags=crater_tags(project="vision", priority=61, **SMALL))
def told(context: dg.AssetExecutionContext, pipes: PipesCraterClient):
    return pipes.run(
        context=context,
        command=["python", str(PROGRAMS / "reports.py")],
        resources={"cpu": 0.5, "memory": "200MiB", "gpu": 0.5},
        extras={"lines": 300, "text": "x" * 100},
    ).get_materialize_result()


@dg.asset(op_tags=crater_tags(**SMALL))
def told_much(context: dg.AssetExecutionContext, pipes: PipesCraterClient):
    return pipes.run(
        context=context,
        command=["python", str(PROGRAMS / "reports.py")],
        resources={"cpu": 0.5, "memory": "200MiB"},
        extras={"lines": 1, "text": os.urandom(200_000).hex()},
    ).get_materialize_result()


def _pipes_op(name: str, program: str, **options):
    @dg.op(name=name, tags=crater_tags(**SMALL), config_schema={"mark": dg.Field(str, is_required=False)})
    def op(context: dg.OpExecutionContext, pipes: PipesCraterClient) -> None:
        command = ["python", str(PROGRAMS / program), context.op_config.get("mark", "")]
        pipes.run(context=context, command=command, resources={"cpu": 0.5, "memory": "200MiB"}, **options)

    return op


exits_badly = _pipes_op("exits_badly", "exits.py")
never_opens = _pipes_op("never_opens", "plain.py")
is_plain = _pipes_op("is_plain", "plain.py", expect_messages=False)
leaves_early = _pipes_op("leaves_early", "leaves.py")
eats_much = _pipes_op("eats_much", "eats.py")
lasts = _pipes_op("lasts", "lasts.py")
PIPES_OPS = [exits_badly, never_opens, is_plain, leaves_early, eats_much, lasts]


def _job_of(op: dg.OpDefinition) -> dg.JobDefinition:
    @dg.job(name=f"pipes_{op.name}", executor_def=crater_executor)
    def job():
        op()

    return job


@dg.op(tags=crater_tags(**SMALL))
def uses_the_resource(context: dg.OpExecutionContext, crater: CraterResource) -> None:
    done = crater.run(name="hello", command=["true"], resources={"cpu": 0.1, "memory": "64MiB"}, timeout_s=30)
    context.log.info(f"ended as {done.status}")


@dg.job(executor_def=crater_executor)
def resourceful():
    uses_the_resource()


served = inference_service_asset(
    "served",
    command=["python", str(PROGRAMS / "serves.py"), "{port}"],
    replicas=2,
    resources={"cpu": 0.2, "memory": "128MiB"},
    op_tags=crater_tags(**SMALL),
    health={"path": "/health", "interval": "200ms"},
    extra=lambda context: {"env": {"MODEL": context.run.run_id}},
)
scaler = build_autoscale_sensor("served", AutoscaleRule(up_for_ms=0, down_for_ms=0, cooldown_ms=0))

defs = dg.Definitions(
    assets=[left, right, both, told, told_much, served, gang_model, daily_report],
    sensors=[scaler],
    resources={"pipes": PipesCraterClient(), "pipes_crater": PipesCraterClient(), "crater": CraterResource()},
    jobs=[
        dg.define_asset_job("loop", selection=["left", "right", "both"], executor_def=crater_executor),
        dg.define_asset_job("telling", selection=["told"], executor_def=crater_executor),
        dg.define_asset_job("telling_much", selection=["told_much"], executor_def=crater_executor),
        dg.define_asset_job("serving", selection=["served"], executor_def=crater_executor),
        resourceful,
        *[_job_of(op) for op in PIPES_OPS],
        failing,
        retried,
        hungry,
        growing,
        silent,
        silent_in_one_process,
        dying_late,
        leaving_slowly,
        killed,
        impossible,
        slow,
        sleeping,
        sleeping_in_one_process,
        interrupted,
        speaking,
        talking,
        many_small_steps,
        dg.define_asset_job("gang_training", selection=[gang_model], executor_def=crater_executor),
        dg.define_asset_job("daily_reports", selection=[daily_report], executor_def=crater_executor),
        waiting,
        surviving,
        surviving_in_one_process,
        staying,
        spreading,
        in_one_process,
        slow_in_one_process,
    ],
)
