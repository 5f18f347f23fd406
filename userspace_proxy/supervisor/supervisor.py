"""The main process: starts control and data, connects them, starts either again when it dies, and ends both.

It touches neither traffic nor the API server, waits for nothing but events, and has no event loop.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from userspace_proxy.node.systemd import READY, STOPPING
from userspace_proxy.supervisor.protocol import CRASHED, MAX_PACKET_BYTES, News, Role, Word

_STOP_S = 1.5
_BACK_OFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 30.0  # a process that has lived as long has not failed to start
_LATE_S = 5.0
_STUCK_S = 30.0
_OVERSLEPT_S = 1.0
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MEANWHILE: Final = {
    Role.CONTROL: "the data process goes on relaying",
    Role.DATA: "its connections are gone, new ones wait",
}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Child:
    """A process, or the wish to start one again at `start_at`."""

    role: Role
    pid: int = 0
    sock: socket.socket | None = None
    started_at: float = 0.0
    heard_at: float = 0.0
    start_at: float | None = None
    failures: int = 0
    restarts: int = 0
    is_late: bool = False
    is_ready: bool = False


class Supervisor:
    """Runs both processes until it is told to end, or the control process ends on purpose.

    `commands` are the command lines; the number of a descriptor is appended. `notify` tells systemd.
    """

    def __init__(self, commands: Mapping[Role, Sequence[str]], notify: Callable[[str], object]) -> None:
        self._commands = commands
        self._notify = notify
        self._children = {role: _Child(role) for role in Role}
        self._control, self._data = self._children[Role.CONTROL], self._children[Role.DATA]
        self._selector = selectors.DefaultSelector()
        self._exit_code: int | None = None  # set once everything is to end
        self._kill_at: float | None = None
        self._is_ready = False

    def run(self) -> int:
        """Run, and return the exit code: that of the control process, 0 after a signal."""
        with _signals() as signals:
            self._selector.register(signals, selectors.EVENT_READ)
            self._start(self._control)  # first, as it has more to do before traffic can flow
            self._start(self._data)
            while not self._is_over():
                for key, _ in self._select():
                    if key.data is None:
                        self._take_signals(signals.recv(1024))
                    else:
                        self._hear(key.data)
                self._look_at_the_clock()
        return self._exit_code or 0

    def _select(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events. When that takes much longer than it should, all may have stood still: none is late."""
        wait_s, began = self._wait_s(), time.monotonic()
        events = self._selector.select(wait_s)
        now = time.monotonic()
        if wait_s is not None and now - began > wait_s + _OVERSLEPT_S:
            self._data.heard_at = now
        return events

    def _is_over(self) -> bool:
        return self._exit_code is not None and not any(child.pid for child in self._children.values())

    def _start(self, child: _Child) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.set_inheritable(True)
        child.start_at = None
        child.is_ready = False
        child.started_at = child.heard_at = time.monotonic()
        with theirs:
            try:
                child.pid = os.posix_spawn(
                    sys.executable, [*self._commands[child.role], str(theirs.fileno())], _environment()
                )
            except OSError as error:
                ours.close()
                self._start_again_later(child, f"cannot be started: {error.strerror}")
                return
        child.sock = ours
        self._selector.register(ours, selectors.EVENT_READ, child)
        self._connect()

    def _connect(self) -> None:
        """Give both processes, if there are two, the ends of a new connection."""
        if self._control.pid and self._data.pid:
            for child, end in zip((self._control, self._data), socket.socketpair(), strict=True):
                with end:
                    self._tell(child, end)

    def _tell(self, child: _Child, connection: socket.socket | None = None) -> None:
        if child.sock is None:
            return
        news = News(
            {"supervisor": os.getpid(), **{each.role.name.lower(): each.pid for each in self._children.values()}},
            {each.role.name.lower(): each.restarts for each in self._children.values()},
            self._data.is_late,
        )
        packet = msgspec.json.encode(news)
        try:
            socket.send_fds(child.sock, [packet], [connection.fileno()] if connection else [])
        except BlockingIOError:  # it has not listened for very long, and would miss this
            _log.error("the %s does not listen to its supervisor and is killed", child.role.text)
            self._signal(child, signal.SIGKILL)
        except OSError:
            pass  # it is dead, which its exit code will tell

    def _hear(self, child: _Child) -> None:
        if child.sock is None:  # its end came in the same batch of events
            return
        try:
            packet = child.sock.recv(MAX_PACKET_BYTES)
        except ConnectionResetError:  # it died with something unread: told once, and before its last words
            return
        except OSError:
            packet = b""
        match packet:
            case b"":
                self._forget_socket(child)
            case Word.ALIVE.value:
                self._note_alive(child)
            case Word.READY.value:
                child.is_ready = True
                if not self._is_ready:
                    self._is_ready = True
                    self._notify(READY)
            case Word.RECONNECT.value:
                self._connect()

    def _take_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            if self._exit_code is not None:  # a second one: no more patience
                self._kill_at = time.monotonic()
            self._stop(0)
        if signal.SIGHUP in numbers:
            _log.info("SIGHUP is ignored")
        self._reap()

    def _reap(self) -> None:
        """Take note of who has died; as first process of a container also of orphans."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                for child in self._children.values():
                    if child.pid == pid:
                        self._note_end(child, os.waitstatus_to_exitcode(status))

    def _note_end(self, child: _Child, exit_code: int) -> None:
        child.pid = 0
        while child.sock is not None:  # its last words may be there still
            self._hear(child)
        if self._exit_code is not None:
            if child is self._control:
                self._signal(self._data, signal.SIGTERM)
        elif child is self._control and self._is_deliberate(exit_code):
            self._stop(exit_code)
        else:
            how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with {exit_code}"
            self._start_again_later(child, how)

    def _is_deliberate(self, exit_code: int) -> bool:
        """Tell whether the control process wants all to end with it.

        Not so one that cannot take the place of another, for instance because the configuration is wrong by now.
        """
        if exit_code < 0 or exit_code == CRASHED:
            return False
        return exit_code == 0 or self._control.is_ready or not self._is_ready

    def _start_again_later(self, child: _Child, how: str) -> None:
        now = time.monotonic()
        child.failures = 1 if now - child.started_at > _STEADY_S else child.failures + 1
        child.restarts += 1
        child.is_late = False
        delay_s = _BACK_OFF_S[min(child.failures, len(_BACK_OFF_S)) - 1]
        child.start_at = now + delay_s
        when = f"in {delay_s} s" if delay_s else "now"
        _log.error("the %s %s: %s; starting another one %s", child.role.text, how, _MEANWHILE[child.role], when)

    def _forget_socket(self, child: _Child) -> None:
        if child.sock is not None:
            self._selector.unregister(child.sock)
            child.sock.close()
            child.sock = None

    def _stop(self, exit_code: int) -> None:
        """End the control process, and when it has ended the data process. What takes too long is killed."""
        if self._exit_code is not None:
            return
        self._exit_code = exit_code
        self._kill_at = time.monotonic() + _STOP_S
        self._notify(STOPPING)
        self._signal(self._control if self._control.pid else self._data, signal.SIGTERM)

    def _signal(self, child: _Child, number: int) -> None:
        if child.pid:
            os.kill(child.pid, number)  # it has not been waited for, so the number is still its own

    def _wait_s(self) -> float | None:
        moments = [child.start_at for child in self._children.values() if child.start_at is not None]
        if self._exit_code is not None:
            moments = [self._kill_at] if self._kill_at is not None else []
        elif self._data.pid:
            moments.append(self._data.heard_at + (_STUCK_S if self._data.is_late else _LATE_S))
        first = min(moments, default=math.inf)
        return max(0.0, first - time.monotonic()) if math.isfinite(first) else None

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._exit_code is not None:
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                for child in self._children.values():
                    self._signal(child, signal.SIGKILL)
            return
        for child in self._children.values():
            if child.start_at is not None and now >= child.start_at:
                self._start(child)
        self._watch_data(now)

    def _watch_data(self, now: float) -> None:
        if not self._data.pid:
            return
        silent_s = now - self._data.heard_at
        if silent_s >= _STUCK_S:
            _log.error("the data process is stuck for %.0f s and is killed", silent_s)
            self._data.heard_at = math.inf  # until there is another one
            self._signal(self._data, signal.SIGKILL)
        elif silent_s >= _LATE_S and not self._data.is_late:
            self._data.is_late = True
            _log.warning("the data process is stuck for %.0f s", silent_s)
            self._tell(self._control)

    def _note_alive(self, child: _Child) -> None:
        child.heard_at = time.monotonic()
        if child.is_late:
            child.is_late = False
            _log.warning("the %s goes on", child.role.text)
            self._tell(self._control)


def _environment() -> dict[str, str]:
    """Return the environment of children, which are not those whom systemd listens to."""
    return {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket from which the numbers of signals can be read, each a byte."""
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)
        before = [signal.signal(number, lambda *_: None) for number in _SIGNALS]
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(number, handler)
