"""What Dagster loads: the digits loop and the smaller recipes, their jobs and sensors, and the executor for their steps."""

from dagster import Definitions, define_asset_job

from crater_dagster import CraterResource, PipesCraterClient, build_leak_sensor, crater_executor
from example_pipelines.digits.assets import ASSETS, GROUP, digits_autoscale
from example_pipelines.recipes.gang import gang_model, gang_training
from example_pipelines.recipes.partitions import daily_report, daily_reports
from example_pipelines.recipes.small_steps import many_small_steps

digits_loop = define_asset_job(
    "digits_loop",
    selection=f"group:{GROUP}",
    description="Prepare, train, evaluate, serve, predict.",
)

defs = Definitions(
    assets=[*ASSETS, gang_model, daily_report],
    jobs=[digits_loop, gang_training, many_small_steps, daily_reports],
    sensors=[digits_autoscale, build_leak_sensor()],
    resources={"pipes_crater": PipesCraterClient(), "crater": CraterResource()},
    executor=crater_executor,
)
