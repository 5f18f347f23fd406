"""What the system takes at most where limits can be set."""

from __future__ import annotations

from typing import Final

MAX_BACKLOG: Final = 2**16 - 1

MAX_USER_TIMEOUT_S: Final = 24 * 24 * 3600.0
"""The kernel takes milliseconds in 31 bits."""
