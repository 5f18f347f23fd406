"""How following the API goes, for people and for metrics: one line for each state, not for each attempt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from userspace_proxy.core.errors import ApiRefused, ApiUnreachable, CredentialsFailed, ProxyError, StreamBroken
from userspace_proxy.sources.pace import Clock
from userspace_proxy.sources.wire import Unusable

_REPEAT_UNREACHABLE_S = 30.0
_REPEAT_S = 300.0
_REPEAT_AFTER_RECOVERY_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchHealth:
    """How one list and watch does. `heard_at` is the clock's reading when the server last said something, or None.

    `handler_errors` counts objects that arrived and could not be taken in; each causes a new list.
    """

    resource: str
    is_listed: bool = False
    heard_at: float | None = None
    lists: int = 0
    failures: int = 0
    handler_errors: int = 0
    skipped_objects: int = 0


@dataclass(slots=True)
class _Trouble:
    """Something that goes on. What comes and goes is not told each time, and then neither is its end."""

    text: str
    since: float
    is_told: bool = False


class Report:
    """Keeps the health of each watch and logs when it changes.

    `on_listed` is called after each complete list.
    """

    def __init__(self, server: str, origin: str, *, clock: Clock, on_listed: Callable[[], None]) -> None:
        self._server = server
        self._origin = origin
        self._clock = clock
        self._on_listed = on_listed
        self._watches: dict[str, WatchHealth] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._unreachable: _Trouble | None = None
        self._told_at: dict[tuple[str, str], float] = {}

    def watches(self) -> tuple[WatchHealth, ...]:
        return tuple(self._watches.values())

    def listed(self, resource: str, count: int) -> None:
        health = self._health(resource)
        _log.info("%s: listed %d%s", resource, count, " again" if health.is_listed else "")
        self._watches[resource] = replace(health, is_listed=True, lists=health.lists + 1)
        self.heard(resource)
        self._on_listed()

    def heard(self, resource: str) -> None:
        now = self._clock()
        self._watches[resource] = replace(self._health(resource), heard_at=now)
        unreachable, self._unreachable = self._unreachable, None
        if unreachable is not None and unreachable.is_told:
            _log.info("the API server %s answers again after %.0f s", self._server, now - unreachable.since)
        trouble = self._troubles.pop(resource, None)
        if trouble is not None and trouble.is_told:
            _log.info("%s: followed again after %.0f s", resource, now - trouble.since)

    def failed(self, resource: str, failure: Exception) -> None:
        health = self._health(resource)
        if not isinstance(failure, ProxyError):
            self._watches[resource] = replace(health, handler_errors=health.handler_errors + 1)
            _log.error("%s: a change could not be taken in; everything is listed again", resource, exc_info=failure)
            return
        self._watches[resource] = replace(health, failures=health.failures + 1)
        if isinstance(failure, ApiUnreachable):
            self._tell_unreachable(failure, health)
        elif isinstance(failure, ApiRefused) and failure.status == 410:
            _log.info("%s: the server no longer has our version (410): listing again", resource)
        else:
            self._tell(resource, failure)

    def skipped(self, resource: str, unusable: Unusable) -> None:
        health = self._health(resource)
        self._watches[resource] = replace(health, skipped_objects=health.skipped_objects + 1)
        _log.warning("%s: %s cannot be understood and stays as it was: %s", resource, unusable.key, unusable.reason)

    def _health(self, resource: str) -> WatchHealth:
        return self._watches.get(resource) or WatchHealth(resource)

    def _tell_unreachable(self, failure: ApiUnreachable, health: WatchHealth) -> None:
        self._unreachable = self._unreachable or _Trouble("", self._clock())
        if self._is_due("", "", _REPEAT_UNREACHABLE_S):
            self._unreachable.is_told = True
            state = "the last state stays in force" if health.is_listed else "nothing is changed before it answers"
            _log.warning("%s; %s; trying again", failure, state)

    def _tell(self, resource: str, failure: ProxyError) -> None:
        text = self._advice(failure)
        known = self._troubles.get(resource)
        trouble = self._troubles[resource] = known or _Trouble(text, self._clock())
        goes_on = known is not None and known.text == text
        trouble.text = text
        if self._is_due(resource, text, _REPEAT_S if goes_on else _REPEAT_AFTER_RECOVERY_S):
            trouble.is_told = True
            needs_a_person = isinstance(failure, CredentialsFailed) or (
                isinstance(failure, ApiRefused) and failure.status in (401, 403)
            )
            _log.log(logging.ERROR if needs_a_person else logging.WARNING, "%s; trying again", text)

    def _is_due(self, subject: str, text: str, repeat_s: float) -> bool:
        """Whether something is to be told now: not if it just was."""
        now = self._clock()
        if now - self._told_at.get((subject, text), -repeat_s) < repeat_s:
            return False
        self._told_at = {key: told_at for key, told_at in self._told_at.items() if now - told_at < _REPEAT_S}
        self._told_at[subject, text] = now
        return True

    def _advice(self, failure: ProxyError) -> str:
        """Return what happened, and what a person can do about it."""
        if isinstance(failure, ApiRefused) and failure.status == 401:
            return f"{failure}: the credentials of {self._origin} are not accepted; renew them"
        if isinstance(failure, ApiRefused) and failure.status == 403:
            return (
                f"{failure}; grant the verbs list and watch on {failure.resource}, "
                "for example by binding the ClusterRole system:node-proxier"
            )
        if isinstance(failure, StreamBroken | ApiRefused):
            return str(failure)
        return f"{failure} ({self._origin})"
