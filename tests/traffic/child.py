"""A data path in a process of its own, for which the test takes the place of the supervisor."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import msgspec

from tests.traffic.peers import PATIENCE_S, eventually
from userspace_proxy.core.balancer import Balancer, RoundRobin
from userspace_proxy.dataplane.interface import Notices
from userspace_proxy.dataplane.remote.plane import RemotePlane
from userspace_proxy.dataplane.settings import DataPlaneSettings
from userspace_proxy.supervisor.protocol import News, Role


class ChildPlane(RemotePlane):
    """Starts a data process, and ends it when it is closed. What that logs is logged here."""

    def __init__(self, settings: DataPlaneSettings, make_balancer: type[Balancer], notices: Notices) -> None:
        assert make_balancer is RoundRobin
        super().__init__(settings, notices, outlives=False)
        self._supervising, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "userspace_proxy", Role.DATA, "0", "json", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
        assert self.process.stderr is not None
        self._logging_thread = threading.Thread(target=_log_again, args=(self.process.stderr,))
        self._logging_thread.start()
        self.connect()

    def connect(self) -> None:
        """Connect, as a new control process would be."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._supervising, [msgspec.json.encode(News({}, {}))], [theirs.fileno()])
        self.attach(ours)

    def close(self) -> None:
        super().close()
        if self.process.returncode is None:
            self._supervising.close()
            assert self.process.wait(PATIENCE_S) == 0
            self._logging_thread.join(PATIENCE_S)
            assert self.process.stderr is not None
            self.process.stderr.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the process meanwhile."""
        os.kill(self.process.pid, signal.SIGSTOP)
        assert eventually(lambda: self._state() == "T")
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def _state(self) -> str:
        with open(f"/proc/{self.process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]


def _log_again(lines: IO[str]) -> None:
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            logging.getLogger("userspace_proxy").error("the data process says: %s", line.rstrip())
            continue
        text = "\n".join(filter(None, (entry["msg"], entry.get("exception"))))
        logging.getLogger(entry["logger"]).log(logging.getLevelName(entry["level"].upper()), "%s", text)
