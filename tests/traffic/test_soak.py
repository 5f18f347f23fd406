"""Many connections at once that end in every way there is: each byte is accounted for, and nothing is left.

USERSPACE_PROXY_SOAK_S makes it longer.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.traffic.conftest import RunningProxy, Stage, open_descriptors
from tests.traffic.peers import Peer, eventually
from userspace_proxy import L4Protocol, ListenAddress

SOAK_S = float(os.environ.get("USERSPACE_PROXY_SOAK_S", "2.5"))
CLIENTS = 12
NOISE = random.Random(1).randbytes(1 << 20)
HEADER_BYTES = 16
LIMIT_S = 20.0


@dataclass
class Script:
    """What both ends of one connection do. It travels from the client to the backend as a seed."""

    seed: int
    rng: random.Random = field(init=False)
    has_heard_reset: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.client_ends_by = self.rng.choice(["half-close", "half-close", "half-close", "reset"])
        self.backend_ends_by = self.rng.choice(["half-close", "half-close", "close", "reset"])
        self.is_slow = self.rng.random() < 0.2
        self.backend_speaks_first = self.rng.random() < 0.3
        self.request = self._bytes(at_most=3_000_000 if self.client_ends_by == "half-close" else 200_000)
        self.reply = self._bytes(at_most=3_000_000 if self.backend_ends_by == "half-close" else 200_000)

    def _bytes(self, *, at_most: int) -> bytes:
        """Ends that hear nothing say little, as two of them would wait for each other."""
        size = min(at_most, self.rng.choice([0, 1, 100, 4096, 65536, 200_000, 1_000_000, 2_500_000]))
        offset = self.rng.randrange(1000)
        return (NOISE * 3)[offset : offset + size]

    @property
    def is_clean(self) -> bool:
        """Whether both directions end with a FIN, so that everything must arrive."""
        return self.client_ends_by == "half-close" and self.backend_ends_by == "half-close"

    def speak(self, peer: Peer, data: bytes, ending: str) -> None:
        """Send in pieces of any size, then end. The other end may go before."""
        rng, position = random.Random(self.seed), 0
        try:
            while position < len(data):
                size = rng.choice([1, 1000, 65536, 500_000])
                peer.send(data[position : position + size])
                position += size
            {"half-close": peer.half_close, "close": peer.close, "reset": peer.reset}[ending]()
        except OSError:
            self.has_heard_reset = True  # a reset is told once, to whoever asks first


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Soak:
    def __init__(self, seed: int) -> None:
        self.seeds = random.Random(seed)
        self.lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def note(self, script: Script, what: str, received: bytes, sent: bytes) -> None:
        """Whatever arrived is a true beginning of what was sent; after a clean end it is all of it."""
        is_clean_end = not script.has_heard_reset
        with self.lock:
            self.outcomes["clean" if is_clean_end else "reset"] += 1
            if not sent.startswith(received):
                self.faults.append(f"{script.seed}: the {what} was changed on its way")
            elif is_clean_end and digest(received) != digest(sent):
                self.faults.append(f"{script.seed}: a clean end after {len(received)} of {len(sent)} bytes of {what}")
            elif script.is_clean and not is_clean_end:
                self.faults.append(f"{script.seed}: a reset of the {what}, though both ends closed cleanly")

    def be_client(self, address: ListenAddress) -> None:
        with self.lock:
            script = Script(self.seeds.randrange(1 << 60))
        with Peer.connect(address) as peer:
            peer.sock.settimeout(LIMIT_S)
            header = script.seed.to_bytes(HEADER_BYTES, "big")
            sender = threading.Thread(target=script.speak, args=(peer, header + script.request, script.client_ends_by))
            sender.start()
            if script.client_ends_by == "half-close":  # the other kinds hear nothing
                received = self._receive(script, peer)
                sender.join()
                self.note(script, "reply", received, script.reply)
            sender.join()

    def be_backend(self, peer: Peer) -> None:
        peer.sock.settimeout(LIMIT_S)
        header = peer.receive(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return
        script = Script(int.from_bytes(header, "big"))
        sender = threading.Thread(target=script.speak, args=(peer, script.reply, script.backend_ends_by))
        if script.backend_ends_by != "half-close":
            sender.start()
            sender.join()
        elif script.backend_speaks_first:
            sender.start()
            received = self._receive(script, peer)
            sender.join()
            self.note(script, "request", received, script.request)
        else:
            received = self._receive(script, peer)
            self.note(script, "request", received, script.request)
            sender.start()
            sender.join()
        peer.close()

    def _receive(self, script: Script, peer: Peer) -> bytes:
        received = bytearray()
        try:
            while data := peer.sock.recv(4096 if script.is_slow else 1 << 18):
                received += data
        except TimeoutError:
            self.faults.append(f"{script.seed}: nothing more came after {len(received)} bytes")
        except OSError:
            script.has_heard_reset = True
        return bytes(received)


def test_a_soak_accounts_for_every_byte_and_leaves_nothing(proxy: RunningProxy, stage: Stage) -> None:
    soak = Soak(int(os.environ.get("USERSPACE_PROXY_SOAK_SEED", "1")))
    backends = [stage.serving_backend(soak.be_backend) for _ in range(3)]
    address = proxy.serve(*(backend.endpoint for backend in backends))
    idle_descriptors = len(open_descriptors())
    until = time.monotonic() + SOAK_S

    def keep_connecting() -> None:
        while time.monotonic() < until:
            soak.be_client(address)

    clients = [threading.Thread(target=keep_connecting) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert eventually(proxy.is_idle, within=10)
    for backend in backends:
        for thread in list(backend._threads):
            thread.join(10)
        for peer in backend.accepted:
            peer.close()
    assert soak.faults == []
    assert soak.outcomes["clean"] > 50
    assert soak.outcomes["reset"] > 5
    counters = [proxy.counters_of(backend.endpoint) for backend in backends]
    assert sum(counted.connections for counted in counters) == sum(backend.connections for backend in backends)
    assert max(counted.connections for counted in counters) - min(counted.connections for counted in counters) <= 1
    assert all(counted.open_connections == 0 for counted in counters)
    assert eventually(lambda: len(open_descriptors()) == idle_descriptors)
    relay = proxy.plane._engine.relay
    assert not relay._last_progress
    assert not relay._targets
    assert relay.pipes is None or not relay.pipes._idle
    assert relay.pipes is None or relay.pipes._allotted_bytes == 0


def test_a_soak_of_sessions_leaves_nothing(stage: Stage) -> None:
    proxy = stage.proxy(settings={"udp_idle_timeout_s": 0.2, "max_sessions": 50})
    backends = [stage.answering_datagrams(bytes) for _ in range(3)]
    address = proxy.serve(*(backend.endpoint for backend in backends), protocol=L4Protocol.UDP)
    idle_descriptors = len(open_descriptors())
    rng = random.Random(2)
    until = time.monotonic() + SOAK_S / 5
    while time.monotonic() < until:
        clients = [stage.datagrams(to=address) for _ in range(rng.randrange(1, 40))]
        for client in clients:
            payload = NOISE[: rng.choice([0, 1, 1400, 9000])]
            client.send(payload)
            if rng.random() < 0.5:
                while client.receive() != payload:  # an answer to the last owner of the client's port
                    continue
        if rng.random() < 0.3:  # an endpoint goes, and comes back
            proxy.serve(*(backend.endpoint for backend in rng.sample(backends, 2)), protocol=L4Protocol.UDP)
            proxy.serve(*(backend.endpoint for backend in backends), protocol=L4Protocol.UDP)
        for client in clients:
            client.close()
    assert eventually(proxy.is_idle)
    assert eventually(lambda: len(open_descriptors()) == idle_descriptors)
