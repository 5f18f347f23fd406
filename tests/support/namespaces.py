"""Network namespaces that tests make and remove themselves. The tests' own process can step into them."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count(1)
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return why no namespaces can be made here; empty if they can."""
    if not shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
        return "the ip program is missing (Debian: iproute2)"
    if os.geteuid() != 0:
        return "namespaces need root: run as root, or tests/as-namespace-root.sh pytest …"
    try:
        Namespace.made().delete()
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class Namespace:
    """A named network namespace."""

    name: str

    @classmethod
    def made(cls, hint: str = "t") -> Namespace:
        namespace = cls(f"up{os.getpid()}-{hint}{next(_numbers)}")
        run("ip", "netns", "add", namespace.name)
        namespace.ip("link", "set", "lo", "up")
        return namespace

    def delete(self) -> None:
        run("ip", "netns", "del", self.name)

    def ip(self, *arguments: str) -> str:
        return run("ip", "-n", self.name, *arguments)

    def run(self, *command: str, stdin: str = "") -> str:
        return run("ip", "netns", "exec", self.name, *command, stdin=stdin)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in this namespace: sockets made and programs started meanwhile are there, and stay there."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.name}") as there:
            _setns(there.fileno())
            try:
                yield
            finally:
                _setns(home.fileno())


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def run(*command: str, stdin: str = "") -> str:
    """Run a program to its end and return what it printed. Raises CalledProcessError with what it complained of."""
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=True, timeout=30, env=environment
    ).stdout
