"""The same runs of Dagster with both instances on PostgreSQL, as where several machines share one: a database for each side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.dagster_runs import many, sides, starts, steps
from benchmarks.figures import Figure

NAME = "dagster.postgres"


def rows(cluster: Cluster) -> list[Figure]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from postgres_server import a_postgres  # The same server as the tests'.

    with a_postgres() as server:

        def on_it(name: str) -> dict[str, Any]:
            return {"storage": {"postgres": {"postgres_url": server.create_database(name)}}}

        with sides(cluster, on_it("ours"), on_it("theirs")) as (ours, theirs):
            return [*starts(ours, theirs, NAME), *steps(ours, theirs, NAME), *many(ours, NAME)]
