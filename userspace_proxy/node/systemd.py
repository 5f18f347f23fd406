"""Tells systemd that the service is ready or stops: one datagram to the socket that it names."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"

_log = logging.getLogger(__name__)


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell systemd, if it runs this process, and return whether it was told. Never blocks, never fails.

    Source: sd_notify(3). A leading `@` stands for an abstract socket.
    """
    name = environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return False
    address = f"\0{name[1:]}" if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(), address)
    except OSError as error:
        _log.warning("systemd cannot be told %s at %s: %s", state, name, error.strerror)
        return False
    return True
