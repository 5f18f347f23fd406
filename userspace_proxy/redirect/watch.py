"""Notices that somebody else has changed rules: at once where nftables tells, else within a second."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Collection

from userspace_proxy.redirect.fingerprints import NETLINK_NETFILTER
from userspace_proxy.redirect.redirector import Redirector

POLL_S = 1.0
SETTLE_S = 0.05
_NFNLGRP_NFTABLES = 7


class NftEvents:
    """A socket that becomes readable when nftables' rules change. Raises OSError where it cannot be had."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, NETLINK_NETFILTER)
        try:
            self._socket.bind((0, 1 << (_NFNLGRP_NFTABLES - 1)))
        except OSError:
            self._socket.close()
            raise

    async def arrived(self) -> None:
        """Return when there is an event. Until `drain` it returns at once."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)

    def drain(self) -> None:
        """Throw away what has arrived. What it says does not matter, nor whether some of it was lost."""
        buffer = bytearray(65536)
        while True:
            try:
                self._socket.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise

    def close(self) -> None:
        self._socket.close()


class Watch:
    """Waits for changes by others. An event only says when to look: the fingerprints say whose change it was."""

    def __init__(self, redirectors: Collection[Redirector]) -> None:
        self._redirectors = redirectors
        self._events: NftEvents | None = None
        if any(redirector.backend_name == "nft" for redirector in redirectors):
            try:
                self._events = NftEvents()
            except OSError:
                self._events = None  # then the fingerprints are polled

    async def changed(self) -> None:
        """Return when rules differ from those that were written last."""
        while True:
            for redirector in self._redirectors:
                if await redirector.has_changed():
                    return
            await self._pause()

    async def _pause(self) -> None:
        if self._events is None:
            await asyncio.sleep(POLL_S)
            return
        try:
            async with asyncio.timeout(POLL_S):
                await self._events.arrived()
        except TimeoutError:
            return
        await asyncio.sleep(SETTLE_S)  # programs that change much do so in several steps
        self._events.drain()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
