"""The command line: argv in, exit code out."""

from __future__ import annotations

import os
import sys

from userspace_proxy.cli import PROGRAM
from userspace_proxy.core.errors import ProxyError, UsageError, leaves
from userspace_proxy.supervisor.protocol import Role


def main() -> None:
    """Run the command line. What the user got wrong ends in one clear message and exit code 1.

    Wrong options of a command end in exit code 2, as click has it; of the daemon, in 1, as kube-proxy has it.
    """
    _open_standard_streams()
    arguments = sys.argv[1:]
    errors: list[BaseException] = []
    try:
        _run(arguments)
    except* ProxyError as group:
        errors = leaves(group)
    for error in errors:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        if isinstance(error, UsageError):
            print(f"See '{PROGRAM} --help'.", file=sys.stderr)
    if errors:  # not where they are caught: before Python 3.11.4, what `except*` raises is a group with a traceback
        sys.exit(1)


def _run(arguments: list[str]) -> None:
    """Do what the first argument asks for. Each imports what it needs: the daemon's start is an outage of its node."""
    first = arguments[0] if arguments else ""
    if first == Role.DATA:
        from userspace_proxy.cli.data_process import data_process

        return data_process(arguments[1:])
    if first == Role.CONTROL:
        from userspace_proxy.cli.control_process import control_process

        return control_process(arguments[1:])
    if first and not first.startswith("-"):
        from userspace_proxy.cli.commands import commands

        if first in commands.commands:
            commands(arguments, prog_name=PROGRAM)
    from userspace_proxy.cli.daemon import daemon

    return daemon(arguments)


def _open_standard_streams() -> None:
    """Open what whoever started us has closed of 0, 1 and 2: no socket may get such a number (uvloop aborts then)."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
