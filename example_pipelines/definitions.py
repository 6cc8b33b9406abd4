"""What Dagster loads: the digits loop, its job, its sensor, and the executor that runs each step on Crater."""

from dagster import Definitions, define_asset_job

from crater_dagster import CraterResource, PipesCraterClient, crater_executor
from example_pipelines.digits.assets import ASSETS, GROUP, digits_autoscale

digits_loop = define_asset_job(
    "digits_loop",
    selection=f"group:{GROUP}",
    description="Prepare, train, evaluate, serve, predict.",
)

defs = Definitions(
    assets=ASSETS,
    jobs=[digits_loop],
    sensors=[digits_autoscale],
    resources={"pipes_crater": PipesCraterClient(), "crater": CraterResource()},
    executor=crater_executor,
)
