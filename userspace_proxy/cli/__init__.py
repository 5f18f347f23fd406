"""The command line: one module per command."""

from typing import Final

PROGRAM: Final = "userspace-proxy"
