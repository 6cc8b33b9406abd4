"""Gang training: two members on two nodes start together or not at all, and meet by torch's own environment."""

from pathlib import Path

import dagster as dg

from crater_dagster import PipesCraterClient, crater_tags

TRAIN = Path(__file__).with_name("train_gang.py")


@dg.asset(group_name="recipes", kinds={"pytorch"}, op_tags=crater_tags(cpu=0.25, memory="512MiB"))
def gang_model(context: dg.AssetExecutionContext, pipes_crater: PipesCraterClient) -> dg.MaterializeResult:
    """A line fitted by two processes with `torch.distributed`; each sees half of the data. The resources are for each member."""
    return pipes_crater.run(
        context=context,
        command=["python", str(TRAIN)],
        members=2,
        spread="require",
        resources={"cpu": 0.5, "memory": "640MiB"},
        extras={"steps": 60},
        time_limit="10m",
    ).get_materialize_result()


gang_training = dg.define_asset_job("gang_training", selection=[gang_model], description="Two members on two nodes.")
