"""A snapshot in, a decision out: admission, the cycle, explanations, and what is free. Pure."""

from crater_core.scheduling.admission import admit as admit
from crater_core.scheduling.cycle import schedule as schedule
from crater_core.scheduling.explaining import explain as explain
from crater_core.scheduling.explaining import explain_spec as explain_spec
from crater_core.scheduling.fragmentation import count_workload as count_workload
from crater_core.scheduling.fragmentation import learn_workload as learn_workload
from crater_core.scheduling.overview import PoolView as PoolView
from crater_core.scheduling.overview import ProjectShare as ProjectShare
from crater_core.scheduling.overview import QuotaUse as QuotaUse
from crater_core.scheduling.overview import borrowed as borrowed
from crater_core.scheduling.overview import device_use as device_use
from crater_core.scheduling.overview import free_amounts as free_amounts
from crater_core.scheduling.overview import pool_overview as pool_overview
from crater_core.scheduling.overview import project_shares as project_shares
from crater_core.scheduling.overview import quota_use as quota_use
from crater_core.scheduling.parts import find_parts as find_parts
from crater_core.scheduling.parts import moved_reservations as moved_reservations
from crater_core.scheduling.strategies import STRATEGIES as STRATEGIES
from crater_core.scheduling.strategies import Strategy as Strategy
from crater_core.scheduling.strategies import add_strategy as add_strategy
