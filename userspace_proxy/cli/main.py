"""The command line: argv in, exit code out."""

from __future__ import annotations

import os
import sys

import click

from userspace_proxy import __version__
from userspace_proxy.cli.local import local
from userspace_proxy.core.errors import ProxyError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="userspace-proxy", message="%(prog)s %(version)s")
def cli() -> None:
    """Balance TCP and UDP traffic of Kubernetes services over their endpoints, in user space."""


cli.add_command(local)


def main() -> None:
    """Run the command line. What the user got wrong ends in one clear message and exit code 1, or 2 for bad usage."""
    _open_standard_streams()
    errors: list[BaseException] = []
    try:
        cli(standalone_mode=True)
    except* ProxyError as group:
        errors = _leaves(group)
    for error in errors:
        print(f"userspace-proxy: {error}", file=sys.stderr)
    if errors:  # not where they are caught: before Python 3.11.4, what `except*` raises is a group with a traceback
        sys.exit(1)


def _open_standard_streams() -> None:
    """Open what whoever started us has closed of 0, 1 and 2: no socket may get such a number (uvloop aborts then)."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
