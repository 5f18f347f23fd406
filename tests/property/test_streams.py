"""Any bytes, in any pieces, both ways, with half-closes in any order: the other end gets them, unchanged."""

from __future__ import annotations

import threading

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.traffic.conftest import Stage, Variant
from tests.traffic.peers import Peer, eventually

PIECES = st.one_of(
    st.binary(min_size=1, max_size=50),
    st.builds(
        lambda seed, size: (seed * (size // len(seed) + 1))[:size],
        st.binary(min_size=1, max_size=50),
        st.sampled_from([4095, 4096, 4097, 65535, 65536, 65537, 131072, 131073, 300_000, 1_200_000]),
    ),
)
STEPS = st.lists(st.tuples(st.sampled_from(["client", "backend"]), PIECES | st.none()), max_size=12)
"""Who says what; None is a half-close, after which that end says nothing more."""


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=STEPS, is_reader_late=st.booleans())
def test_any_bytes_arrive_unchanged(
    stage: Stage, variant: Variant, steps: list[tuple[str, bytes | None]], is_reader_late: bool
) -> None:
    if not stage.proxies:
        proxy = stage.proxy()
        backend = stage.backend()
        stage.shared = (proxy, backend, proxy.serve(backend.endpoint))  # type: ignore[attr-defined]
    proxy, backend, address = stage.shared  # type: ignore[attr-defined]
    with Peer.connect(address) as client, backend.accept() as server:
        ends = {"client": client, "backend": server}
        said = {"client": bytearray(), "backend": bytearray()}
        heard: dict[str, bytes] = {}
        open_ends = {"client", "backend"}

        def hear(listener: str, speaker: str) -> None:
            heard[speaker] = ends[listener].receive_all()

        hearers = [threading.Thread(target=hear, args=pair) for pair in (("client", "backend"), ("backend", "client"))]

        def talk() -> None:
            for speaker, piece in [*steps, ("client", None), ("backend", None)]:
                if speaker not in open_ends:
                    continue
                if piece is None:
                    open_ends.discard(speaker)
                    ends[speaker].half_close()
                else:
                    said[speaker] += piece
                    ends[speaker].send(piece)

        talker = threading.Thread(target=talk)
        talker.start()
        if is_reader_late:
            talker.join(0.02)
        for hearer in hearers:
            hearer.start()
        for thread in (talker, *hearers):
            thread.join()
        assert heard == said
        assert eventually(proxy.is_idle)
        backend.accepted.clear()
