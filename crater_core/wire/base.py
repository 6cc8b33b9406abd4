"""What every message has in common: unknown fields are errors on the way in, and reasons read the same everywhere."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from crater_core.model.reason import Fact, Reason, next_step, sentence


class Incoming(BaseModel):
    """A body somebody sends: an unknown field is a mistake, and is said to be one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Outgoing(BaseModel):
    """A body Crater sends: a client of an older version ignores the fields it does not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ReasonView(Outgoing):
    code: str
    message: str
    next_step: str = ""
    facts: dict[str, Fact] = {}

    @staticmethod
    def of(reason: Reason | None) -> ReasonView | None:
        if reason is None:
            return None
        facts = dict(reason.facts)
        return ReasonView(code=reason.code.value, message=sentence(reason), next_step=next_step(reason), facts=facts)
