"""The commands beside the daemon."""

from __future__ import annotations

import click

from userspace_proxy.cli.bench import bench
from userspace_proxy.cli.local import local


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def commands() -> None:
    """What the program does besides being the daemon."""


commands.add_command(local)
commands.add_command(bench)


def summaries() -> dict[str, str]:
    """Return what each command does, in a line."""
    return {name: each.get_short_help_str(limit=100) for name, each in commands.commands.items()}
