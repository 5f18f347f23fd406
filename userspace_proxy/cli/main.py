"""The command line: argv in, exit code out."""

from __future__ import annotations

import os
import sys

import click

from userspace_proxy.cli import PROGRAM
from userspace_proxy.cli.bench import bench
from userspace_proxy.cli.local import local
from userspace_proxy.cli.processes import control_process, data_process
from userspace_proxy.core.errors import ProxyError, UsageError, leaves
from userspace_proxy.supervisor.protocol import Role


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def commands() -> None:
    """What the program does besides being the daemon."""


commands.add_command(local)
commands.add_command(bench)

PROCESSES = {Role.CONTROL.value: control_process, Role.DATA.value: data_process}
"""What the daemon starts of itself. Not for people, so no help tells of them."""


def main() -> None:
    """Run the command line. What the user got wrong ends in one clear message and exit code 1.

    Wrong options of a command end in exit code 2, as click has it; of the daemon, in 1, as kube-proxy has it.
    """
    _open_standard_streams()
    arguments = sys.argv[1:]
    errors: list[BaseException] = []
    try:
        if arguments and arguments[0] in commands.commands:
            commands(arguments, prog_name=PROGRAM)
        elif arguments and arguments[0] in PROCESSES:
            PROCESSES[arguments[0]](arguments[1:])
        else:
            from userspace_proxy.cli.daemon import daemon  # here, as no other command needs the flags and the file

            daemon(arguments, {name: each.get_short_help_str(limit=100) for name, each in commands.commands.items()})
    except* ProxyError as group:
        errors = leaves(group)
    for error in errors:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        if isinstance(error, UsageError):
            print(f"See '{PROGRAM} --help'.", file=sys.stderr)
    if errors:  # not where they are caught: before Python 3.11.4, what `except*` raises is a group with a traceback
        sys.exit(1)


def _open_standard_streams() -> None:
    """Open what whoever started us has closed of 0, 1 and 2: no socket may get such a number (uvloop aborts then)."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
