"""When requests are due: pure, and the same for every target of a scenario, as it depends on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

NOBODY = -1
Due = tuple[float, int]
"""When, and which client; NOBODY leaves the client to chance."""


def constant(rate: float, job_from: float, measure_from: float, measure_to: float) -> Iterator[Due]:
    """Yield evenly spaced times. Exactly round(rate * duration) of them lie in the measured part."""
    warm_up = int((measure_from - job_from) * rate)
    for index in range(-warm_up, round((measure_to - measure_from) * rate)):
        yield measure_from + index / rate, NOBODY


def poisson(rate: float, job_from: float, measure_to: float, seed: int) -> Iterator[Due]:
    """Yield the times of independent arrivals."""
    rng, at = random.Random(f"arrivals {seed}"), job_from
    while (at := at + rng.expovariate(rate)) < measure_to:
        yield at, NOBODY


def visits(times: Sequence[float], clients: int, measure_from: float, seed: int) -> Iterator[Due]:
    """Yield every client at each of the times, in an order that is shuffled each time.

    A fixed order would repeat in step with a round robin, and a client would meet the same backend by that alone.
    """
    rng, order = random.Random(f"visits {seed}"), list(range(clients))
    for at in sorted(times):
        rng.shuffle(order)
        for client in order:
            yield measure_from + at, client


def share_of(dues: Iterator[Due], process: int, processes: int) -> Iterator[Due]:
    """Yield what one of several processes has to do."""
    for index, due in enumerate(dues):
        if index % processes == process:
            yield due
