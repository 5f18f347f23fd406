"""Gives up what this process may do beyond its user's rights, for good. Only Linux knows such rights."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63  # no kernel has as many; those that it does not know are refused


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_privileges() -> None:
    """Keep no capability in any set, and never get one again. The user stays the same. Raises OSError.

    The bounding set can be emptied only with CAP_SETPCAP; without it, no_new_privs alone makes it count for nothing.
    Source: capabilities(7), prctl(2).
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)  # there is none without permitted ones in any case
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = _Header(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits each
    _check(libc.capset(ctypes.byref(header), nothing), "capset")


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it has ended."""
    if sys.platform == "linux":
        _check(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
