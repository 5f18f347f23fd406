"""Numbers that change when somebody changes the kernel's tables. Each costs microseconds to ask for."""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import Protocol

from userspace_proxy.core.model import IPFamily

NETLINK_NETFILTER = 12
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_NFT_MSG_GETGEN = (10 << 8) | 16
_NFTA_GEN_ID = 1
_XT_SO_GET_INFO = 64
_XT_GETINFO_SIZE = 84
_SOL_IPV6 = 41


class Fingerprint(Protocol):
    """A number that changes with the tables; None where there is none to be had."""

    def __call__(self) -> int | None: ...

    def note_own(self, commits: int) -> None:
        """Take note of tables that this process has written."""

    def close(self) -> None: ...


class NoFingerprint:
    """Where the kernel, or the rights of this process, give none."""

    def __call__(self) -> int | None:
        return None

    def note_own(self, commits: int) -> None:
        pass

    def close(self) -> None:
        pass


class NftGeneration:
    """How many tables others have committed.

    nftables counts all commits of a network namespace, those of both families: ours are taken off. So all that write
    for this process share one.
    """

    def __init__(self) -> None:
        self._own = 0
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.settimeout(0.1)

    def __call__(self) -> int | None:
        request = struct.pack("=IHHIIBBH", 20, _NFT_MSG_GETGEN, _NLM_F_REQUEST, 0, 0, 0, 0, 0)
        try:
            self._socket.send(request)
            generation = generation_in(self._socket.recv(4096))
        except OSError:
            return None
        return None if generation is None else generation - self._own

    def note_own(self, commits: int) -> None:
        self._own += commits

    def close(self) -> None:
        self._socket.close()


def generation_in(message: bytes) -> int | None:
    """Return the generation in a netlink message: the first attribute after the two headers. None if there is none."""
    if len(message) < 28:
        return None
    kind, attribute = struct.unpack_from("=H", message, 4)[0], struct.unpack_from("=H", message, 22)[0]
    if kind == _NLMSG_ERROR or attribute != _NFTA_GEN_ID:
        return None
    return int(struct.unpack_from("!I", message, 24)[0])


class LegacySize:
    """The number of rules and bytes of the nat and filter tables.

    Legacy tables have no generation, but hardly a change keeps both. What does is found by the full check.
    """

    def __init__(self, family: IPFamily) -> None:
        is_ipv4 = family is IPFamily.IPV4
        self._level = socket.IPPROTO_IP if is_ipv4 else _SOL_IPV6
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_INET if is_ipv4 else socket.AF_INET6, kind, socket.IPPROTO_RAW)
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self) -> int | None:
        sizes = [self._size_of(b"nat"), self._size_of(b"filter")]
        return None if None in sizes else hash(tuple(sizes))

    def _size_of(self, table: bytes) -> bytes | None:
        answer = ctypes.create_string_buffer(table, _XT_GETINFO_SIZE)
        length = ctypes.c_uint(_XT_GETINFO_SIZE)
        failed = self._libc.getsockopt(
            self._socket.fileno(), self._level, _XT_SO_GET_INFO, answer, ctypes.byref(length)
        )
        return None if failed else answer.raw[-8:]

    def note_own(self, commits: int) -> None:
        pass  # what we write changes the size as well

    def close(self) -> None:
        self._socket.close()


def opened(is_nft: bool, family: IPFamily) -> Fingerprint:
    """Return the fingerprint of a variant, or one that is always None where it cannot be had."""
    try:
        return NftGeneration() if is_nft else LegacySize(family)
    except OSError:
        return NoFingerprint()
