"""What an agent without tasks costs its node, while it beats, polls and measures the node every five seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import cost
from benchmarks.cluster import a_cluster
from benchmarks.figures import Figure, at_most

AGENT_KEYS = {"sample_interval": "5s"}


def rows(home: Path) -> Iterator[Figure]:
    with a_cluster(home, AGENT_KEYS) as cluster:
        percent, memory_mb = cost.of_agent(cluster)
        yield at_most("agent.idle.cpu_percent", percent, "% of a core", 1.0)
        yield at_most("agent.idle.rss_mb", memory_mb, "MB", 60.0)
