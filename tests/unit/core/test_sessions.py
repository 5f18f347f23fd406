from __future__ import annotations

from dataclasses import dataclass

from userspace_proxy.core.sessions import SessionTable


@dataclass(eq=False)
class Session:
    name: str
    active_s: float


A, B, C = "a", "b", "c"


def table(*names: str, capacity: int = 10) -> tuple[SessionTable[Session], dict[str, Session]]:
    """A table with a time-out of 10 s, and sessions in it that were added at the seconds 0, 1, 2, ..."""
    made: SessionTable[Session] = SessionTable(idle_timeout_s=10.0, capacity=capacity)
    sessions = {name: Session(name, float(second)) for second, name in enumerate(names)}
    for session in sessions.values():
        made.add(session)
    return made, sessions


def names(sessions: list[Session]) -> list[str]:
    return [session.name for session in sessions]


def test_a_removed_session_is_gone_and_removing_it_again_is_no_error() -> None:
    made, sessions = table(A, B)
    made.remove(sessions[A])
    made.remove(sessions[A])
    assert names(list(made)) == [B]
    assert names(made.expire(now=100.0)) == [B]


def test_sessions_can_be_removed_while_they_are_gone_through() -> None:
    made, _ = table(A, B, C)
    for session in made:
        made.remove(session)
    assert len(made) == 0
    assert made.next_expiry() is None


def test_a_session_expires_when_it_was_idle_for_the_time_out() -> None:
    made, _ = table(A, B)
    assert made.expire(now=9.9) == []
    assert names(made.expire(now=10.0)) == [A]
    assert names(made.expire(now=100.0)) == [B]
    assert made.expire(now=200.0) == []


def test_traffic_puts_the_expiry_off() -> None:
    made, sessions = table(A, B)
    sessions[A].active_s = 5.0
    assert names(made.expire(now=14.0)) == [B]
    assert made.expire(now=14.9) == []
    assert names(made.expire(now=15.0)) == [A]


def test_nothing_expires_before_the_next_expiry() -> None:
    made, sessions = table(A, B)
    assert made.next_expiry() == 10.0
    sessions[A].active_s = 5.0
    made.expire(now=10.0)
    assert made.next_expiry() == 11.0
    assert table()[0].next_expiry() is None


def test_the_longest_idle_session_goes_when_there_is_no_room() -> None:
    made, sessions = table(A, B, capacity=2)
    sessions[A].active_s = 5.0
    assert names(made.add(Session(C, 6.0))) == [B]
    assert names(list(made)) == [A, C]


def test_a_session_that_was_removed_is_not_the_one_to_go() -> None:
    made, sessions = table(A, B, C, capacity=3)
    made.remove(sessions[A])
    made.add(Session("d", 3.0))
    assert names(made.add(Session("e", 4.0))) == [B]


def test_there_is_no_next_expiry_once_all_are_gone_however_they_went() -> None:
    made, sessions = table(A, B, C)
    made.remove(sessions[C])
    assert names(made.expire(now=11.0)) == [A, B]
    assert made.next_expiry() is None
