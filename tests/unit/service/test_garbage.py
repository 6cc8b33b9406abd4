"""What the collector of cyclic garbage is spared."""

from __future__ import annotations

import gc
import subprocess
import sys

_PROGRAM = """
import gc
from crater_core.service.garbage import look_seldom, set_apart

look_seldom()
state = [[number] for number in range(1000)]
set_apart()
state.append([1000])
looked_at = {id(one) for one in gc.get_objects()}
print(gc.get_threshold()[0], sum(id(one) in looked_at for one in state))
"""


def test_state_that_is_set_apart_is_not_looked_at_again() -> None:
    """In a process of its own: this one's garbage is to be collected as ever."""
    told = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60).stdout
    threshold, looked_at = told.split()
    assert int(looked_at) == 1
    assert int(threshold) > gc.get_threshold()[0]
