"""The supervisor over small programs that take the places of its children."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from userspace_proxy.node.systemd import READY, STOPPING
from userspace_proxy.supervisor import supervisor as module
from userspace_proxy.supervisor.protocol import CRASHED, Role
from userspace_proxy.supervisor.supervisor import Supervisor

PRELUDE = """
import os, signal, socket, sys, time
def first_time(path=sys.argv[1]):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
supervisor = socket.socket(fileno=int(sys.argv[2]))
def peer():
    while True:
        news, fds, _, _ = socket.recv_fds(supervisor, 4096, 1)
        if not news: sys.exit(99)
        if fds: return socket.socket(fileno=fds[0])
"""

Run = Callable[..., int]

FOREVER = "while supervisor.recv(4096): pass"


class Told(list[str]):
    """What systemd was told."""

    def __call__(self, state: str) -> None:
        self.append(state)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def run(tmp_path: Path, told: Told) -> Run:
    def run(control: str, data: str = FOREVER) -> int:
        commands = {
            role: [sys.executable, "-S", "-c", PRELUDE + program, str(tmp_path / role)]
            for role, program in ((Role.CONTROL, control), (Role.DATA, data))
        }
        return Supervisor(commands, told).run()

    return run


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_control_process_ends_all_with_its_exit_code(run: Run, told: Told, code: int) -> None:
    assert run(f"sys.exit({code})") == code
    assert told == [STOPPING]


@pytest.mark.parametrize("death", [f"sys.exit({CRASHED})", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_control_process_that_dies_is_started_again_and_meets_the_same_data_process(
    run: Run, death: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = "for number in range(2): peer().sendall(b'%d %d' % (os.getpid(), number))\n" + FOREVER
    program = f"""
met = peer().recv(100).split()
if first_time():
    open(sys.argv[1], "wb").write(met[0])
    {death}
sys.exit(5 if [open(sys.argv[1], "rb").read(), b"1"] == met else 6)
"""
    assert run(program, data) == 5
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"the control process {'ended with 70' if 'exit' in death else 'was killed by SIGKILL'}"
    ]


def test_a_data_process_that_dies_is_started_again_whatever_its_exit_code(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    data = "met = peer()\nif first_time(): sys.exit(0)\nmet.sendall(b'second')\n" + FOREVER
    control = "while peer().recv(100) != b'second': pass\nsys.exit(7)"
    assert run(control, data) == 7
    assert [record.getMessage() for record in caplog.records] == [
        "the data process ended with 0: its connections are gone, new ones wait; starting another one now"
    ]


def test_children_that_lost_their_connection_get_another_one(run: Run) -> None:
    data = "peer().close()\npeer().sendall(b'again')\n" + FOREVER
    control = "assert peer().recv(100) == b''\nsupervisor.send(b'reconnect')\nsys.exit(8 if peer().recv(9) else 9)"
    assert run(control, data) == 8


def test_a_signal_ends_both_and_what_does_not_end_is_killed(
    run: Run, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STOP_S", 0.2)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsupervisor.send(b'ready')\n"
    parent = os.getpid()
    control = deaf + f"os.kill({parent}, signal.SIGTERM)\n" + FOREVER
    assert run(control, deaf + FOREVER) == 0
    assert told in ([READY, STOPPING], [STOPPING])


def test_a_second_signal_ends_all_patience(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_S", 1000.0)
    control = (
        f"""
asked = lambda *_: os.kill({os.getpid()}, signal.SIGTERM)
signal.signal(signal.SIGTERM, asked)
asked()
"""
        + FOREVER
    )
    assert run(control) == 0


def test_a_data_process_that_is_stuck_is_told_of_and_then_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LATE_S", 0.2)
    monkeypatch.setattr(module, "_STUCK_S", 0.6)
    data = "met = peer()\nif not first_time(): met.sendall(b'x')\nwhile True: time.sleep(1)"
    control = "while not peer().recv(100): pass\nsys.exit(4)"
    assert run(control, data) == 4
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:2] == ["the data process is stuck for 0 s", "the data process is stuck for 1 s and is killed"]
    assert messages[2].startswith("the data process was killed by SIGKILL")


def test_a_supervisor_that_stood_still_itself_does_not_blame_the_data_process(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after `docker unpause`, or Ctrl-Z and `fg`."""

    class StandsStill(selectors.DefaultSelector):
        calls = 0

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            self.calls += 1
            if self.calls != 3:
                return super().select(timeout)
            time.sleep(2.0)
            return []

    monkeypatch.setattr(module, "_LATE_S", 0.5)
    monkeypatch.setattr(module, "_STUCK_S", 1.0)
    monkeypatch.setattr(module.selectors, "DefaultSelector", StandsStill)
    data = """
met = peer()
for _ in range(40):
    supervisor.send(b'alive')
    time.sleep(0.05)
met.sendall(b'x')
"""
    assert run("sys.exit(4 if peer().recv(100) else 5)", data + FOREVER) == 4
    assert "stuck" not in caplog.text


def test_a_control_process_that_cannot_take_the_place_of_another_ends_nothing(
    run: Run, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a mistake was written into the configuration file before the former one died."""
    program = """
number = len(os.listdir(os.path.dirname(sys.argv[1])))
open(sys.argv[1] + str(number), "w").close()
if number == 1: sys.exit(3)
supervisor.send(b"ready")
if number == 0: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(2)
"""
    assert run(program) == 2
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the control process was killed by SIGKILL",
        "the control process ended with 3",
    ]
    assert told == [READY, STOPPING]


def test_orphans_are_reaped(run: Run) -> None:
    """As in a container, where the supervisor is the first process."""
    control = """
if os.fork() == 0:
    os._exit(0) if os.fork() else os._exit(time.sleep(0.1) or 3)
os.wait()
time.sleep(0.3)
"""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    try:
        assert run(control) == 0
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    finally:
        libc.prctl(36, 0, 0, 0, 0)


def test_signal_handlers_are_put_back(run: Run) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = [signal.getsignal(number) for number in module._SIGNALS]
    assert run("sys.exit(0)") == 0
    assert [signal.getsignal(number) for number in module._SIGNALS] == before
