"""Replays a trace through the real admission, scheduling and lifecycle functions on a virtual clock."""

from crater_core.simulation.fill import Fill as Fill
from crater_core.simulation.fill import fill as fill
from crater_core.simulation.fill import inflated as inflated
from crater_core.simulation.loaders import Shape as Shape
from crater_core.simulation.loaders import read_jobs as read_jobs
from crater_core.simulation.loaders import read_openb as read_openb
from crater_core.simulation.loaders import read_trace as read_trace
from crater_core.simulation.outcome import Outcome as Outcome
from crater_core.simulation.replay import simulate as simulate
from crater_core.simulation.replay import simulate_partitions as simulate_partitions
from crater_core.simulation.traces import Arrival as Arrival
from crater_core.simulation.traces import Trace as Trace
from crater_core.simulation.traces import with_checkpoints as with_checkpoints
from crater_core.simulation.traces import with_known_ends as with_known_ends
