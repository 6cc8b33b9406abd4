"""What happened, turned into what is written: `apply`, the table of legal steps, metering and invariants. Pure."""

from crater_core.lifecycle.apply import apply as apply
from crater_core.lifecycle.changes import NO_CHANGES as NO_CHANGES
from crater_core.lifecycle.changes import Changes as Changes
