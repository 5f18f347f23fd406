"""The load of the soak tests: many conversations that end in every way there is, each judged at both ends.

Of an orderly conversation every byte must arrive, and a FIN behind the last one. Of a rough one, in which somebody
resets or closes too early, whatever arrives must be a true beginning of what was sent.
"""

from __future__ import annotations

import hashlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from tests.traffic.peers import Address, Peer

NOISE = random.Random(1).randbytes(4 << 20)
SIZES = (0, 1, 100, 4096, 65536, 200_000, 1_000_000, 2_500_000)
PIECES = (1, 1000, 65536, 500_000)
HEADER_BYTES = 16
UNREAD_BYTES = 200_000  # at most so much is said to an end that does not listen: two of them would wait for each other
SMALL_BUFFER = 4096
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Speech:
    """What one end says, how it ends, and behind how many bytes it calls for attention (TCP urgent data)."""

    data: bytes
    ending: str
    urgent_at: int | None

    @classmethod
    def drawn(cls, rng: random.Random, endings: Sequence[str]) -> Self:
        ending = rng.choice(endings)
        size = rng.choice(SIZES)
        if ending != "half-close":
            size = min(size, UNREAD_BYTES)
        offset = rng.randrange(1000)
        urgent_at = rng.randrange(size + 1) if rng.random() < 0.15 else None
        return cls(NOISE[offset : offset + size], ending, urgent_at)

    def be_said(self, peer: Peer, rng: random.Random) -> None:
        """Send it in pieces of any size, then end. Raises OSError where the other end has gone before."""
        position, urgent_at = 0, self.urgent_at
        while position < len(self.data):
            size = rng.choice(PIECES)
            if urgent_at is not None and position + size > urgent_at:
                size, urgent_at = urgent_at - position, None
                peer.send(self.data[position : position + size])
                peer.sock.send(b"!", socket.MSG_OOB)
            else:
                peer.send(self.data[position : position + size])
            position += size
        {"half-close": peer.half_close, "close": peer.close, "reset": peer.reset}[self.ending]()


class Script:
    """What both ends of one conversation do. It travels to the backend as a seed; those with odd ones are rough."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.is_orderly = seed % 2 == 0
        rng = random.Random(seed)
        self.request = Speech.drawn(rng, ["half-close"] if self.is_orderly else ["half-close", "half-close", "reset"])
        self.reply = Speech.drawn(rng, ["half-close"] if self.is_orderly else ["half-close", "close", "reset"])
        self.backend_speaks_first = rng.random() < 0.3
        self.is_client_slow, self.is_backend_slow = rng.random() < 0.15, rng.random() < 0.15

    @property
    def header(self) -> bytes:
        return self.seed.to_bytes(HEADER_BYTES, "big")

    @classmethod
    def read_from(cls, header: bytes) -> Self:
        return cls(int.from_bytes(header, "big"))


@dataclass(slots=True)
class Account:
    """What both ends have seen of all conversations of one kind. Headers count as bytes of the request."""

    connections: int = 0
    request_bytes_sent: int = 0
    request_bytes_received: int = 0
    reply_bytes_sent: int = 0
    reply_bytes_received: int = 0


class End:
    """One end of a conversation: says its part, hears the other's, and knows whether it was told of a reset."""

    def __init__(self, peer: Peer, script: Script, speech: Speech, *, is_slow: bool) -> None:
        self.was_reset = False
        self.received = b""
        self._peer, self._script, self._speech, self._is_slow = peer, script, speech, is_slow
        self._speaker = threading.Thread(target=self._speak)
        peer.sock.settimeout(LIMIT_S)

    def start_to_speak(self) -> None:
        self._speaker.start()

    def finish(self) -> None:
        self._speaker.join()

    def hear(self) -> None:
        """Receive until the end, or a reset. Raises TimeoutError when nothing comes for a long time."""
        received = bytearray()
        try:
            while data := self._peer.sock.recv(SMALL_BUFFER // 2 if self._is_slow else 1 << 18):
                received += data
        except TimeoutError:
            raise TimeoutError(f"nothing more came after {len(received)} bytes") from None
        except OSError:
            self.was_reset = True
        finally:
            self.received = bytes(received)

    def _speak(self) -> None:
        try:
            self._speech.be_said(self._peer, random.Random(self._script.seed))
        except OSError:
            self.was_reset = True  # it is told once, to whoever asks first


@dataclass
class Soak:
    """Clients and backends that follow scripts, and what they found: outcomes, accounts, faults."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)
        self._lock = threading.Lock()
        self.accounts = {True: Account(), False: Account()}
        """By whether the conversations are orderly."""

    def load(
        self, address: Address, *, is_orderly: bool, clients: int, goes_on: Callable[[], bool]
    ) -> list[threading.Thread]:
        """Start clients that hold one conversation after the other."""

        def keep_talking() -> None:
            while goes_on():
                self._be_client(address, is_orderly=is_orderly)

        threads = [threading.Thread(target=keep_talking) for _ in range(clients)]
        for thread in threads:
            thread.start()
        return threads

    def _be_client(self, address: Address, *, is_orderly: bool) -> None:
        with self._lock:
            script = Script(self._seeds.randrange(1 << 60) * 2 + (not is_orderly))
            account = self.accounts[is_orderly]
            account.connections += 1
            account.request_bytes_sent += HEADER_BYTES + len(script.request.data)
        with Peer.connect(address, receive_buffer=SMALL_BUFFER if script.is_client_slow else None) as peer:
            end = End(peer, script, script.request, is_slow=script.is_client_slow)
            try:
                peer.send(script.header)
                end.start_to_speak()
                if script.request.ending == "half-close":  # whoever resets hears nothing
                    end.hear()
                end.finish()
            except OSError as error:
                self._note(script, f"the client: {error}")
        if script.request.ending == "half-close":
            self._judge(end, script, "reply", script.reply.data)

    def be_backend(self, peer: Peer) -> None:
        """Treat one connection."""
        with peer:
            peer.sock.settimeout(LIMIT_S)
            header = peer.receive(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                return
            script = Script.read_from(header)
            with self._lock:
                self.accounts[script.is_orderly].request_bytes_received += HEADER_BYTES
                self.accounts[script.is_orderly].reply_bytes_sent += len(script.reply.data)
            end = End(peer, script, script.reply, is_slow=script.is_backend_slow)
            listens = script.reply.ending == "half-close"
            try:
                if not listens:
                    end.start_to_speak()
                elif script.backend_speaks_first:
                    end.start_to_speak()
                    end.hear()
                else:
                    end.hear()
                    end.start_to_speak()
                end.finish()
            except OSError as error:
                self._note(script, f"the backend: {error}")
        if listens:
            self._judge(end, script, "request", script.request.data)

    def _judge(self, end: End, script: Script, what: str, sent: bytes) -> None:
        """Whatever arrived is a true beginning of what was sent; without a reset it is all of it."""
        received = end.received
        with self._lock:
            account = self.accounts[script.is_orderly]
            if what == "reply":
                account.reply_bytes_received += len(received)
            else:
                account.request_bytes_received += len(received)
            self.outcomes["reset" if end.was_reset else "clean"] += 1
        if digest(received) != digest(sent[: len(received)]):
            self._note(script, f"the {what} was changed on its way")
        elif not end.was_reset and len(received) != len(sent):
            self._note(script, f"a clean end after {len(received)} of {len(sent)} bytes of the {what}")
        elif script.is_orderly and end.was_reset:
            self._note(script, f"a reset of the {what}, though both ends close cleanly")

    def _note(self, script: Script, fault: str) -> None:
        with self._lock:
            self.faults.append(f"conversation {script.seed}: {fault}")


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
