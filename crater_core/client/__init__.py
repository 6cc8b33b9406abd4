"""The HTTP client, sync and async: finds the leader, sends again what may be sent again, raises typed errors."""

from crater_core.client.aio import AsyncCraterClient as AsyncCraterClient
from crater_core.client.balance import ServiceCaller as ServiceCaller
from crater_core.client.calls import LogChunk as LogChunk
from crater_core.client.sync import CraterClient as CraterClient

__all__ = ["AsyncCraterClient", "CraterClient", "LogChunk", "ServiceCaller"]
