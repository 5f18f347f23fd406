"""The retry ladder where one process accepts and another one dials: the same steps, but asking across for endpoints.

What a worker cannot connect comes back: only the process that accepts knows who may wait for endpoints, and complains.
"""

from __future__ import annotations

from typing import Protocol

from userspace_proxy.core.model import Endpoint
from userspace_proxy.dataplane.backends import Backends, Origin, Target
from userspace_proxy.dataplane.dial import Dial, Serve
from userspace_proxy.dataplane.engine import Engine
from userspace_proxy.dataplane.reporting import LeadTarget


class Chooser(Protocol):
    """The process that accepts, as a worker sees it."""

    def ask(
        self, dial: HandedDial, target: LeadTarget, origin: Origin, client: str, tried: tuple[Endpoint, ...]
    ) -> None:
        """Have `connect_to` or `give_back` of the dial called in a moment.

        The target is the one that it had, and gets again if it is not in `tried` and still serves.
        """

    def give_back(self, client_fd: int, target: LeadTarget, origin: Origin, client: str, *, has_run_out: bool) -> None:
        """Leave a client to that process: no attempt is left, or there was no endpoint to try."""


class HandedDial(Dial):
    """In a worker, the search for an endpoint that answers a client."""

    __slots__ = ("_chooser",)

    _target: LeadTarget

    def __init__(
        self, engine: Engine, chooser: Chooser, target: LeadTarget, origin: Origin, client_fd: int, client: str
    ) -> None:
        super().__init__(engine, target.backends, origin, client_fd, client)
        self._chooser = chooser
        self._target = target

    def connect_to(self, target: LeadTarget) -> None:
        """Connect to this target; while it refuses, go on with others."""
        self._leave()
        self._target = target
        if not self._connect():
            self.start()

    def start(self) -> None:
        """Ask for the next endpoint, if this dial may have another one."""
        if len(self._tried) < len(self._engine.settings.dial_ladder_s):
            self._ask()
        else:
            self.give_back(has_run_out=True)

    def give_back(self, *, has_run_out: bool) -> None:
        """End the dial, and leave the client to the process that accepts."""
        self._leave()
        client_fd, self._client_fd = self._client_fd, -1
        self._chooser.give_back(client_fd, self._target, self._origin, self._client, has_run_out=has_run_out)

    def _try_again(self) -> None:
        if self._client_fd >= 0:
            self._leave()
            self._ask()

    def _ask(self) -> None:
        self._engine.dials.add(self)
        self._chooser.ask(self, self._target, self._origin, self._client, self._tried)

    def _release(self) -> None:
        self._engine.ended(self._target)


class WaitingDial(Dial):
    """In the process that accepts, a client that no worker can have now: it waits for endpoints, or is dialled here."""

    __slots__ = ("_serve",)

    def __init__(
        self, engine: Engine, serve: Serve, backends: Backends, origin: Origin, client_fd: int, client: str
    ) -> None:
        super().__init__(engine, backends, origin, client_fd, client)
        self._serve = serve

    def go_on(self) -> None:
        """Let a worker have the client, after it was held."""
        client_fd, self._client_fd = self._client_fd, -1
        self._serve(self._backends, self._origin, client_fd, self._client)

    def run_out(self, last: Target) -> None:
        """A worker has tried in vain to connect the client, this target last."""
        self._target = last
        self._run_out()
