"""SessionTable beside a plain list of what was active when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from userspace_proxy.core.sessions import SessionTable

KEYS = st.sampled_from("abcdef")
steps = st.lists(st.tuples(st.sampled_from(["traffic", "remove", "expire", "wait"]), KEYS), max_size=80)


@given(steps, st.integers(1, 4))
def test_the_table_does_what_a_list_of_times_does(steps: list[tuple[str, str]], capacity: int) -> None:
    table: SessionTable[str, int] = SessionTable(idle_timeout_s=3.0, capacity=capacity)
    model: list[tuple[str, int, float]] = []  # longest idle first
    now = 0.0
    for number, (kind, key) in enumerate(steps):
        known = next((entry for entry in model if entry[0] == key), None)
        if kind == "traffic" and known is None:
            evicted = table.add(key, number, now=now)
            expected = [session for _, session, _ in model[: max(0, len(model) - capacity + 1)]]
            assert evicted == expected
            model = [*model[len(expected) :], (key, number, now)]
        elif kind == "traffic" and known is not None:
            table.renew(key, now=now)
            model = [entry for entry in model if entry is not known] + [(key, known[1], now)]
        elif kind == "remove":
            table.remove(key)
            model = [entry for entry in model if entry is not known]
        elif kind == "expire":
            assert table.expire(now=now) == [session for _, session, active in model if now - active >= 3.0]
            model = [entry for entry in model if now - entry[2] < 3.0]
        else:
            now += 1.0
        assert list(table) == [(key, session) for key, session, _ in model]
        assert len(table) == len(model) <= capacity
        assert table.next_expiry() == (model[0][2] + 3.0 if model else None)
        assert all(table.get(key) == session for key, session, _ in model)
