"""A backfill under a quota: launch all days at once, and the policy decides how many compute at the same time."""

import dagster as dg

from crater_dagster import crater_tags

DAYS = dg.StaticPartitionsDefinition([f"2026-11-{day:02}" for day in range(1, 31)])


@dg.asset(
    group_name="recipes",
    partitions_def=DAYS,
    op_tags=crater_tags(cpu=0.5, memory="384MiB", quota_policy="dev-quota"),
)
def daily_report(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """One day; those for which the quota has no room wait, and say so in their runs."""
    day = int(context.partition_key[-2:])
    return dg.MaterializeResult(metadata={"day": day, "rows": day * 24})


daily_reports = dg.define_asset_job("daily_reports", selection=[daily_report])
