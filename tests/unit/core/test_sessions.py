from __future__ import annotations

from userspace_proxy.core.sessions import SessionTable


def table(*keys: str, capacity: int = 10, idle_timeout_s: float = 10.0) -> SessionTable[str, str]:
    """A table of sessions that were added at the seconds 0, 1, 2, ..."""
    made: SessionTable[str, str] = SessionTable(idle_timeout_s=idle_timeout_s, capacity=capacity)
    for second, key in enumerate(keys):
        made.add(key, key.upper(), now=float(second))
    return made


def test_a_session_is_found_by_its_key() -> None:
    sessions = table("a", "b")
    assert (sessions.get("a"), sessions.get("b"), sessions.get("c")) == ("A", "B", None)
    assert len(sessions) == 2


def test_a_removed_session_is_gone_and_removing_it_again_is_no_error() -> None:
    sessions = table("a", "b")
    sessions.remove("a")
    sessions.remove("a")
    assert list(sessions) == [("b", "B")]


def test_sessions_can_be_removed_while_they_are_gone_through() -> None:
    sessions = table("a", "b", "c")
    for key, _ in sessions:
        sessions.remove(key)
    assert len(sessions) == 0


def test_a_session_expires_when_it_was_idle_for_the_time_out() -> None:
    sessions = table("a", "b")
    assert sessions.expire(now=9.9) == []
    assert sessions.expire(now=10.0) == ["A"]
    assert sessions.expire(now=100.0) == ["B"]
    assert sessions.expire(now=200.0) == []


def test_traffic_puts_the_expiry_off() -> None:
    sessions = table("a", "b")
    sessions.renew("a", now=5.0)
    assert sessions.expire(now=14.0) == ["B"]
    assert sessions.get("a") == "A"


def test_traffic_of_a_session_that_is_gone_is_ignored() -> None:
    sessions = table("a")
    sessions.renew("b", now=5.0)
    assert list(sessions) == [("a", "A")]


def test_the_next_expiry_is_that_of_the_longest_idle_session() -> None:
    sessions = table("a", "b")
    assert sessions.next_expiry() == 10.0
    sessions.renew("a", now=5.0)
    assert sessions.next_expiry() == 11.0
    assert table().next_expiry() is None


def test_the_longest_idle_session_goes_when_there_is_no_room() -> None:
    sessions = table("a", "b", capacity=2)
    sessions.renew("a", now=5.0)
    assert sessions.add("c", "C", now=6.0) == ["B"]
    assert [key for key, _ in sessions] == ["a", "c"]
