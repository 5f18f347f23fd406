"""What generator and backends say to each other. One header, in both directions, followed by padding.

    magic 1 | operation 1 | backend 2 | request size 4 | reply size 4 | sequence 8

Sizes include the header. A request names its sequence and the size of the reply; the reply repeats the header and
adds the backend's number, counted from 1. A TCP conversation has one operation, that of its first request.
A conversation that does not start with the magic byte is HTTP.
"""

from __future__ import annotations

import struct

MAGIC = 0xBE
HEADER = struct.Struct("!BBHIIQ")

REQUEST = 1  # request, reply, request, reply ...
DOWNLOAD = 2  # header, then bytes until the client closes
UPLOAD = 3  # bytes until EOF, then the header; its sequence is the number of bytes received

# Conversations about endings. The backend notes in its journal, under the sequence, how they ended for it.
CLIENT_HALF_CLOSES = 4  # the reply comes after EOF
BACKEND_HALF_CLOSES = 5  # header, FIN; the client then sends its request size, and closes
CLIENT_RESETS = 6  # header; the client resets
BACKEND_RESETS = 7  # header; one more byte from the client, then the backend resets
DIGEST = 8  # request size of bytes, reply size of the same bytes

MAX_DATAGRAM = 65_507


def pack(operation: int, sequence: int, request_size: int, reply_size: int, backend: int = 0) -> bytes:
    """Return a header."""
    return HEADER.pack(MAGIC, operation, backend, request_size, reply_size, sequence)


def pattern(size: int, seed: int) -> bytes:
    """Return bytes that differ from place to place and from seed to seed, so that a lost or moved block shows."""
    block = struct.pack(
        "!256Q", *((seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) % 2**64 for index in range(256))
    )
    return (block * (size // len(block) + 1))[:size]
