"""What a load writes down while it runs: columns of numbers, as appending to an array is the cheapest note there is."""

from __future__ import annotations

import errno
from array import array

from userspace_proxy.bench.generator.job import Break, Failure, Raw

_OWN_LIMITS = {
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.EADDRNOTAVAIL: "ports",
    errno.EADDRINUSE: "ports",
    errno.ENOBUFS: "memory",
    errno.ENOMEM: "memory",
}
_KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.ETIMEDOUT: "time-out",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
}
_MAX_KEPT = 200_000


class Columns:
    """Notes of one load."""

    def __init__(self) -> None:
        self.raw = Raw()
        self.latencies, self.ends, self.lags = array("d"), array("d"), array("d")
        self.assigned_at, self.assigned_client, self.assigned_backend = array("d"), array("i"), array("i")
        self.moved_at, self.moved_bytes, self.moved_stream = array("d"), array("d"), array("i")

    def fail(self, at: float, due: float, kind: str, *, backend: int = 0, client: int = -1) -> None:
        """Note a request without a proper answer."""
        if len(self.raw.failures) < _MAX_KEPT:
            self.raw.failures.append(Failure(at, due, kind, backend, client))

    def broke(self, at: float, opened: float, kind: str, backend: int) -> None:
        """Note a connection that was to be kept and has ended."""
        if len(self.raw.breaks) < _MAX_KEPT:
            self.raw.breaks.append(Break(at, opened, kind, backend))

    def own_limit(self, error: OSError) -> bool:
        """Tell whether the error is about this process or machine, and note it as such."""
        kind = _OWN_LIMITS.get(error.errno or 0)
        if kind is None:
            return False
        self.raw.own_failures[kind] = self.raw.own_failures.get(kind, 0) + 1
        return True

    def assign(self, at: float, client: int, backend: int) -> None:
        """Note which backend a new connection or flow of a client has got."""
        self.assigned_at.append(at)
        self.assigned_client.append(client)
        self.assigned_backend.append(backend)

    def moved(self, at: float, size: int, stream: int) -> None:
        """Note bytes of a stream."""
        self.moved_at.append(at)
        self.moved_bytes.append(size)
        self.moved_stream.append(stream)

    def finish(self) -> Raw:
        """Return all notes."""
        for name in Raw.__struct_fields__:
            column = getattr(self, name, None)
            if isinstance(column, array):
                setattr(self.raw, name, column.tobytes())
        return self.raw


def kind_of(error: OSError) -> str:
    """Return what an error of a connection is called in results."""
    return _KINDS.get(error.errno or 0, errno.errorcode.get(error.errno or 0, "error").lower())
