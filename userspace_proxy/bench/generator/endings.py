"""Conversations that end in every way there is. With plain blocking sockets, as nothing is timed here.

What the client sees is only half of it: what the backend saw stands in its journal, under the same sequence.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable

from userspace_proxy.bench import wire
from userspace_proxy.bench.generator.columns import Columns, kind_of
from userspace_proxy.bench.generator.job import EndingSeen, Job, Raw
from userspace_proxy.bench.scenario import Endings

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_REPLY_SIZE = 100_000
_DIGEST_SIZE = 300_000
_GIVE_UP_AFTER = 2

Probe = Callable[[socket.socket, int], str]


def hold_conversations(job: Job) -> Raw:
    """Hold `each` conversations of every kind, and return how they ended for the client."""
    load = job.load
    assert isinstance(load, Endings)
    columns, rng = Columns(), random.Random(f"endings {job.seed}")
    sequence = 0
    for name, probe in PROBES.items():
        timed_out = 0
        for _ in range(load.each):
            sequence += 1
            outcome = _hold(job, probe, sequence, rng, load.timeout)
            columns.raw.endings.append(EndingSeen(probe=name, sequence=sequence, outcome=outcome))
            timed_out += outcome == "time-out"
            if timed_out == _GIVE_UP_AFTER:
                break
    columns.raw.opened = columns.raw.sent = sequence
    return columns.finish()


def _hold(job: Job, probe: Probe, sequence: int, rng: random.Random, timeout_s: float) -> str:
    host, port = job.targets[sequence % len(job.targets)]
    source = (rng.choice(job.clients), 0) if job.clients else None
    try:
        with socket.create_connection((host, port), timeout_s, source) as sock:
            sock.settimeout(timeout_s)
            return probe(sock, sequence)
    except TimeoutError:
        return "time-out"
    except EOFError:
        return "closed early"
    except OSError as error:
        return kind_of(error)


def _client_half_closes(sock: socket.socket, sequence: int) -> str:
    """The client has said all; the reply, larger than any buffer on the way, still reaches it whole."""
    sock.sendall(wire.pack(wire.CLIENT_HALF_CLOSES, sequence, wire.HEADER.size, _REPLY_SIZE))
    sock.shutdown(socket.SHUT_WR)
    _read(sock, wire.HEADER.size)
    if _read(sock, _REPLY_SIZE) != wire.pattern(_REPLY_SIZE, sequence):
        return "damaged"
    return "as sent" if sock.recv(1) == b"" else "unexpected bytes"


def _backend_half_closes(sock: socket.socket, sequence: int) -> str:
    """The backend has said all; what the client says after that still reaches it (journal)."""
    sock.sendall(wire.pack(wire.BACKEND_HALF_CLOSES, sequence, _REPLY_SIZE, wire.HEADER.size))
    _read(sock, wire.HEADER.size)
    if sock.recv(1) != b"":
        return "unexpected bytes"
    sock.sendall(wire.pattern(_REPLY_SIZE, sequence))
    sock.shutdown(socket.SHUT_WR)
    return "as sent"


def _client_resets(sock: socket.socket, sequence: int) -> str:
    """The client resets; the backend sees a reset, not a clean end (journal)."""
    sock.sendall(wire.pack(wire.CLIENT_RESETS, sequence, wire.HEADER.size, wire.HEADER.size))
    _read(sock, wire.HEADER.size)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    return "as sent"


def _backend_resets(sock: socket.socket, sequence: int) -> str:
    """The backend resets; the client sees a reset, not a clean end."""
    sock.sendall(wire.pack(wire.BACKEND_RESETS, sequence, wire.HEADER.size, wire.HEADER.size))
    _read(sock, wire.HEADER.size)
    sock.sendall(b"!")
    try:
        return "closed" if sock.recv(1) == b"" else "unexpected bytes"
    except ConnectionResetError:
        return "reset"


def _every_byte(sock: socket.socket, sequence: int) -> str:
    """A request and a reply that differ at every place arrive as they were."""
    sock.sendall(wire.pack(wire.DIGEST, sequence, _DIGEST_SIZE, _DIGEST_SIZE) + wire.pattern(_DIGEST_SIZE, sequence))
    _read(sock, wire.HEADER.size)
    return "as sent" if _read(sock, _DIGEST_SIZE) == wire.pattern(_DIGEST_SIZE, sequence) else "damaged"


PROBES: dict[str, Probe] = {
    "client half-closes": _client_half_closes,
    "backend half-closes": _backend_half_closes,
    "client resets": _client_resets,
    "backend resets": _backend_resets,
    "every byte": _every_byte,
}


def _read(sock: socket.socket, size: int) -> bytes:
    """Return so many bytes. Raises EOFError when there are fewer."""
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
