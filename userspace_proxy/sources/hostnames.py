"""Addresses of endpoints that are given by host name: resolved at the start, and again when one cannot be reached."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

from userspace_proxy.core.model import Endpoint
from userspace_proxy.core.placement import HostPort

_FAILED_RETRY_S = 5.0
_MIN_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class HostNames:
    """The endpoints that a fixed set of `HOST:PORT` stands for at the moment."""

    def __init__(self, hosts: Iterable[HostPort]) -> None:
        self._names = sorted({host.host for host in hosts if not host.is_address})
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._unreachable = asyncio.Event()

    def endpoints(self, hosts: Iterable[HostPort]) -> tuple[Endpoint, ...]:
        """Return the endpoints of these hosts; a name stands for all its addresses, or none if it has none."""
        found = {
            Endpoint(address, host.port)
            for host in hosts
            for address in ((host.host,) if host.is_address else self._addresses.get(host.host, ()))
        }
        return tuple(sorted(found))

    def note_unreachable(self, endpoint: Endpoint) -> None:
        """Resolve again soon, if the endpoint's address came from a name."""
        if any(endpoint.address in addresses for addresses in self._addresses.values()):
            self._unreachable.set()

    async def resolve(self) -> bool:
        """Look up all names. Return whether any address changed; a name that fails keeps what it had."""
        before = dict(self._addresses)
        for name, found in zip(self._names, await asyncio.gather(*map(_look_up, self._names)), strict=True):
            if isinstance(found, OSError):
                _log.warning("cannot resolve %s: %s", name, found.strerror)
            else:
                self._addresses[name] = found
        return self._addresses != before

    async def changed(self) -> None:
        """Return when addresses have changed, after a failed dial or when a name could be resolved at last."""
        while True:
            has_unresolved = any(name not in self._addresses for name in self._names)
            try:
                async with asyncio.timeout(_FAILED_RETRY_S if has_unresolved else None):
                    await self._unreachable.wait()
            except TimeoutError:
                pass
            self._unreachable.clear()
            if await self.resolve():
                return
            await asyncio.sleep(_MIN_INTERVAL_S)


async def _look_up(name: str) -> tuple[str, ...] | OSError:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    return tuple(sorted({str(address[0]) for *_, address in found}))
