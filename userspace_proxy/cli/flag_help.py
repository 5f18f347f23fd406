"""The daemon's `--help`: its flags in the groups in which a person looks for them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

import click

from userspace_proxy.cli import PROGRAM
from userspace_proxy.cli.flags import GROUPS, Era, Flag, Unused

_MAX_WIDTH = 110
_INTRODUCTION = """Balance the TCP and UDP traffic of a cluster's services on this node, in user space: kube-proxy's \
userspace mode, with kube-proxy's flags and configuration file.

Durations are written as 250ms, 30s or 1h30m. A flag for yes or no is given alone, or as --flag=false."""


def render(commands: Mapping[str, str]) -> str:
    """Return the help text. `commands` are the other commands of the program, each with a line about it."""
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, _MAX_WIDTH))
    formatter.write_usage(PROGRAM, "[FLAG]...")
    formatter.write_usage(PROGRAM, "COMMAND ...", prefix="       ")
    formatter.write_paragraph()
    formatter.write_text(_INTRODUCTION)
    with formatter.section("Commands"):
        formatter.write_dl([(name, text) for name, text in commands.items()])
    for title, flags in GROUPS.items():
        with formatter.section(title):
            rows = [(_spelling(flag), _explanation(flag)) for flag in flags if not flag.unused]
            formatter.write_dl(rows, col_max=40)
            for reason in Unused:
                if names := [flag.spelled for flag in flags if flag.unused is reason]:
                    formatter.write_paragraph()
                    formatter.write(_filled(f"As they {reason.value}: {', '.join(names)}", formatter.width))
    return formatter.getvalue().rstrip("\n")


def _filled(text: str, width: int) -> str:
    """Return indented lines that part no flag at its hyphens."""
    indent = "  "
    lines = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _spelling(flag: Flag) -> str:
    names = f"-{flag.shorthand}, {flag.spelled}" if flag.shorthand else flag.spelled
    return f"{names}{flag.kind.value}" if flag.kind.bare_value else f"{names} {flag.kind.value}"


def _explanation(flag: Flag) -> str:
    notes = [f"default {flag.shown_default}"] if flag.shown_default else []
    notes += [flag.era.value] if flag.era in (Era.UNTIL_1_25, Era.LATER) else []
    notes += [f"deprecated: {flag.deprecated}"] if flag.deprecated else []
    return flag.help + (f" ({'; '.join(notes)})" if notes else "")
