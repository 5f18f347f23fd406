"""Keeps Python's garbage collector from holding up traffic: a full collection of a large cluster's objects takes 20 to
100 ms, in which nothing is relayed. What is taken in lives long and forms no cycles, so nothing is lost by not looking.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MUCH = 20_000


def keep_out_of_collections() -> None:
    """Let the collector never again look at what is alive now. Call it where much has just been taken in.

    A few objects of work under way stay behind for ever, so it is not for what happens again and again.
    """
    gc.collect(0)
    gc.freeze()


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Collect nothing meanwhile, and keep what was made out of collections if it is much."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MUCH:
            keep_out_of_collections()
        if was_enabled:
            gc.enable()
