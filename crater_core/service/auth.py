"""Who is calling, and how far that reaches. Everything is refused that no rule here allows."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from crater_core.errors import NotAllowed, Unauthenticated
from crater_core.service.config import TokenSettings

PUBLIC = ("/", "/health", "/ready", "/openapi.json", "/docs")
USER_MAX = 100
_READS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Identity:
    """A token's holder; `user` is who the task is for."""

    name: str
    role: str
    projects: tuple[str, ...] = ()
    user: str = ""

    def must_reach(self, project: str) -> None:
        if self.role != "admin" and self.projects and project not in self.projects:
            raise NotAllowed(
                f"token {self.name} does not reach project {project}; it reaches: {', '.join(self.projects)}",
                field="project",
                project=project,
            )

    def must_be_admin(self) -> None:
        if self.role != "admin":
            raise NotAllowed(f"only an administrator may do this; token {self.name} is a {self.role}", role=self.role)


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    return "crater_" + secrets.token_urlsafe(32)


class Guard:
    """Knows the tokens by their hash. Without any, every caller is an administrator (the listener is then local)."""

    def __init__(self, tokens: tuple[TokenSettings, ...]) -> None:
        self._tokens = tokens

    def identify(self, method: str, path: str, authorization: str | None, for_user: str | None) -> Identity:
        """The caller, allowed to make this kind of call. Finer rules (which project) are checked where they are known."""
        identity = self._identity(authorization)
        self._check_role(identity.role, method, path, identity.name)
        if for_user is None:
            return identity
        if identity.role != "admin":
            raise NotAllowed("only an administrator's call may name another user", field="Crater-User")
        if not 0 < len(for_user) <= USER_MAX or not for_user.isprintable():
            raise NotAllowed(f"a user has 1 to {USER_MAX} printable characters", field="Crater-User")
        return Identity(identity.name, identity.role, identity.projects, for_user)

    def _identity(self, authorization: str | None) -> Identity:
        if not self._tokens:
            return Identity("local", "admin", (), "local")
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("a token is needed: send the header Authorization: Bearer TOKEN")
        presented, found = hash_of(token.strip()), None
        for known in self._tokens:
            if hmac.compare_digest(known.sha256, presented):
                found = known
        if found is None:
            raise Unauthenticated("the token is not known")
        return Identity(found.name, found.role, found.projects, found.name)

    def _check_role(self, role: str, method: str, path: str, name: str) -> None:
        to_agents = path.startswith("/v1/agents/")
        if role == "admin" or (role == "agent" and to_agents):
            return
        if role in ("viewer", "submitter") and not to_agents and (role == "submitter" or method in _READS):
            return
        raise NotAllowed(f"token {name} is a {role}, which may not do this", role=role)
