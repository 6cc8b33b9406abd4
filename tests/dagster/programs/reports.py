"""Reports progress and a result through Dagster Pipes, between ordinary output of all kinds."""

import sys

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    print("an ordinary line on stdout")
    sys.stderr.write("half a line on stderr, and then ")
    for number in range(pipes.get_extra("lines")):
        pipes.log.info(f"message {number}")
    print("an ordinary line on stderr", file=sys.stderr)
    pipes.report_asset_materialization(metadata={"length": len(pipes.get_extra("text")), "attempt": pipes.retry_number})
