"""Says which template a task may be forked from: one for each program, user, environment profile and list of modules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from crater_agent.environment import Host, environment, granted
from crater_core.wire.agents import Lease


def template_for(lease: Lease, host: Host, program: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What the spawner needs to start or find the template; None for a task that asks for a cold start.

    A template knows the environment profile (it imports code that may need it) and nothing else of a task.
    """
    if lease.warm_preload is None:
        return None
    general = lease.model_copy(update={"env": {}, "devices": [], "ports": [], "output_path": None})
    of_a_task = granted(general, host, "")
    env = {name: value for name, value in environment(general, host, "", environ).items() if name not in of_a_task}
    # Read by linear-algebra libraries when they are imported; each fork sets its own number afterwards.
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": "/tmp"}  # noqa: S108 (as for any daemon)
    cwd = lease.working_dir or "/"
    argv = [program, "-m", "crater_agent.template", *lease.warm_preload]
    told = json.dumps([argv, env, cwd, lease.user, lease.project], sort_keys=True)
    return {"key": hashlib.sha256(told.encode()).hexdigest(), "argv": argv, "env": env, "cwd": cwd}
