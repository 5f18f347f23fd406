"""What the supervisor and its children say to each other, each message a packet."""

from __future__ import annotations

import enum

import msgspec

CRASHED = 70
"""The exit code of a process that met a fault of ours. Each other one is deliberate, and not for its parent to undo."""

ALIVE_INTERVAL_S = 1.0
MAX_PACKET_BYTES = 4096


class Role(enum.StrEnum):
    """What a child is for. The value is the first argument of its command line."""

    CONTROL = "control-process"
    DATA = "data-process"

    @property
    def text(self) -> str:
        """The name for people."""
        return self.value.replace("-", " ")


class Word(enum.Enum):
    """What a child tells the supervisor."""

    ALIVE = b"alive"
    """The data process still gets to its work."""

    READY = b"ready"
    """The control process is up, which is for systemd."""

    RECONNECT = b"reconnect"
    """The connection to the other process is lost."""


class News(msgspec.Struct, frozen=True):
    """What the supervisor tells its children. Comes with a socket when there is a new connection to the other one."""

    pids: dict[str, int]
    restarts: dict[str, int]
    is_data_stuck: bool = False
