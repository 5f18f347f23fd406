"""What the kernel counts about full backlogs, as it tells of them for a network namespace and not for a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from userspace_proxy.metrics.exposition import header

_NAME = "userspace_proxy_listen_overflows_total"
_DOCUMENTATION = "Connections that found a backlog full, of all programs in this network namespace."


def backlog_pieces(proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield the metric as text, and nothing where the kernel does not tell."""
    count = _overflows(proc)
    if count is not None:
        yield f"{header(_NAME, 'counter', _DOCUMENTATION)}{_NAME} {count}\n"


def _overflows(proc: Path) -> int | None:
    """Return TcpExt's ListenOverflows: a line of names, and below it a line of values."""
    try:
        lines = [line.split() for line in (proc / "self/net/netstat").read_text().splitlines()]
    except OSError:
        return None
    names, values = (line for line in lines if line[:1] == ["TcpExt:"])
    return int(dict(zip(names, values, strict=True))["ListenOverflows"])
