"""Every exception Crater raises on purpose.

    CraterError
    ├── InvalidRequest         the caller must change something
    │   ├── UnknownPool
    │   ├── ImpossibleRequest  no node could ever run it
    │   └── BadConfiguration   a configuration file names a wrong key, unit or value
    ├── NotFound               no such task, node, pool, service or policy
    ├── Denied                 a refusal
    │   ├── Unauthenticated    no token, or an unknown one
    │   ├── NotAllowed         the token's role does not reach that far
    │   ├── PoolClosed
    │   └── QuotaExceeded      larger than the policy's limit, today and every day
    ├── Conflict               someone else moved first
    │   ├── StaleRevision
    │   ├── StaleTerm
    │   └── LeaseLost
    ├── NotLeader              ask the other one
    ├── Unavailable            outside trouble, worth another try
    │   ├── StoreUnavailable
    │   └── SchedulerUnreachable
    └── NodeFault              the agent could not do it
        ├── DeviceMissing
        ├── IsolationFailed
        └── RuntimeFailed

"Not now" is never an exception: it is a `Reason` (see `crater_core.model.reason`).
"""

from __future__ import annotations

from typing import ClassVar


class CraterError(Exception):
    """Base of all. `fields` are the facts (field name, value found, what would be right); `code` never changes."""

    code: ClassVar[str] = "crater_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class InvalidRequest(CraterError):
    code = "invalid_request"


class UnknownPool(InvalidRequest):
    code = "unknown_pool"


class ImpossibleRequest(InvalidRequest):
    code = "impossible_request"


class BadConfiguration(InvalidRequest):
    code = "bad_configuration"


class NotFound(CraterError):
    code = "not_found"


class Denied(CraterError):
    code = "denied"


class Unauthenticated(Denied):
    code = "unauthenticated"


class NotAllowed(Denied):
    code = "not_allowed"


class PoolClosed(Denied):
    code = "pool_closed"


class QuotaExceeded(Denied):
    code = "quota_exceeded"


class Conflict(CraterError):
    code = "conflict"


class StaleRevision(Conflict):
    code = "stale_revision"
    retryable = True


class StaleTerm(Conflict):
    code = "stale_term"


class LeaseLost(Conflict):
    code = "lease_lost"


class NotLeader(CraterError):
    code = "not_leader"
    retryable = True


class Unavailable(CraterError):
    code = "unavailable"
    retryable = True


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class SchedulerUnreachable(Unavailable):
    code = "scheduler_unreachable"


class NodeFault(CraterError):
    code = "node_fault"
    retryable = True


class DeviceMissing(NodeFault):
    code = "device_missing"


class IsolationFailed(NodeFault):
    code = "isolation_failed"


class RuntimeFailed(NodeFault):
    code = "runtime_failed"
