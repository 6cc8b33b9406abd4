"""What a template imports last so that run and step workers start as its forks: Dagster, this node's instance, its storage, and
the definitions of the code locations that it has imported before.

Importing this module does the work; it leaves no thread and no open connection behind, so that a fork of it is sound.
"""

from __future__ import annotations

import sys

from crater_dagster import _dagster

# A template is started with the names of its modules as arguments.
_dagster.preload([name for name in sys.argv[1:] if name in sys.modules and name != __name__])
