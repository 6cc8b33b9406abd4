"""What the agent of a measured cluster takes of the machine: processor time over a minute, and resident memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.cluster import Cluster

WATCH_S = 60.0


def of_agent(cluster: Cluster) -> tuple[float, float]:
    """Percent of a core over a minute (utime and stime of /proc/PID/stat), and MB of resident memory (VmRSS)."""
    pid = next(running.process.pid for running in cluster.processes.running if running.name == "agent")
    began, before = time.monotonic(), _cpu_s(pid)
    time.sleep(WATCH_S)
    percent = (_cpu_s(pid) - before) / (time.monotonic() - began) * 100
    resident = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return percent, int(resident.split()[1]) * 1024 / 1e6


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
