"""The command line: argv in, exit code out."""

from __future__ import annotations

import sys

import click

from userspace_proxy import __version__
from userspace_proxy.cli.bench import bench
from userspace_proxy.cli.local import local
from userspace_proxy.core.errors import ProxyError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="userspace-proxy", message="%(prog)s %(version)s")
def cli() -> None:
    """Balance TCP and UDP traffic of Kubernetes services over their endpoints, in user space."""


cli.add_command(local)
cli.add_command(bench)


def main() -> None:
    """Run the command line. What the user got wrong ends in one clear message and exit code 1, or 2 for bad usage."""
    try:
        cli(standalone_mode=True)
    except* ProxyError as group:
        for error in _leaves(group):
            print(f"userspace-proxy: {error}", file=sys.stderr)
        sys.exit(1)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
