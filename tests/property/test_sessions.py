"""SessionTable beside a plain list of what was active when."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy.core.sessions import SessionTable

TIMEOUT_S = 3.0


@dataclass(eq=False)
class Session:
    key: str
    active_s: float


steps = st.lists(
    st.tuples(st.sampled_from(["traffic", "remove", "expire", "wait"]), st.sampled_from("abcdef")), max_size=80
)


@given(steps, st.integers(1, 4))
def test_the_table_does_what_a_list_of_times_does(steps: list[tuple[str, str]], capacity: int) -> None:
    table: SessionTable[Session] = SessionTable(idle_timeout_s=TIMEOUT_S, capacity=capacity)
    model: list[Session] = []
    now = 0.0
    for kind, key in steps:
        now += 0.001  # no two are equally idle
        known = next((session for session in model if session.key == key), None)
        if kind == "traffic" and known is None:
            session = Session(key, now)
            going = sorted(model, key=lambda session: session.active_s)[: max(0, len(model) - capacity + 1)]
            assert table.add(session) == going
            model = [*(other for other in model if other not in going), session]
        elif kind == "traffic" and known is not None:
            known.active_s = now
        elif kind == "remove" and known is not None:
            table.remove(known)
            model.remove(known)
        elif kind == "expire":
            due = [session for session in model if now - session.active_s >= TIMEOUT_S]
            assert table.expire(now=now) == sorted(due, key=lambda session: session.active_s)
            model = [session for session in model if session not in due]
        else:
            now += 1.0
        assert list(table) == model
        assert len(table) == len(model) <= capacity
        next_expiry = table.next_expiry()
        assert (next_expiry is None) == (not model)
        assert next_expiry is None or next_expiry <= min(session.active_s for session in model) + TIMEOUT_S
