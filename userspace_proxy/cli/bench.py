"""`userspace-proxy bench`: measures load balancers. What it needs is imported when it is used, and not before."""

from __future__ import annotations

import asyncio
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from userspace_proxy.cli.running import run_until_stopped
from userspace_proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from userspace_proxy.bench.scenario import Scenario, Target
    from userspace_proxy.bench.session import Session

_INTERRUPTED = 130
_DEFAULT_OUTPUT = "bench-results"


@click.group()
def bench() -> None:
    """Measure load balancers side by side: speed, cost, and whether they balance at all.

    `bench run` alone compares no balancer with this one in under a minute.
    """
    missing = [name for name in ("hdrh", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} are missing: pip install 'userspace-proxy[bench]'", where="bench")


@bench.command()
@click.option("-f", "--filename", "path", help="Scenario file; `bench init` writes one.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="Measure this instead of the scenario's targets: direct, proxy, haproxy, nginx, or NAME=HOST:PORT for what "
    "runs already. Repeatable.",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    help="Fixed HOST:PORT of a backend that we start, for targets that run already. Repeatable. Without, such targets "
    "have backends of their own.",
)
@click.option("--only", multiple=True, help="Run only the test of this name. Repeatable.")
@click.option("--repetitions", type=click.IntRange(1), help="Rounds.")
@click.option("--seed", type=int, help="Seed of everything random.")
@click.option("-o", "--output", default=_DEFAULT_OUTPUT, show_default=True, help="Directory for the results.")
@click.option("--no-output", is_flag=True, help="Write no files.")
@click.option("--allow-remote", is_flag=True, help="Allow load on addresses outside loopback. They must be yours.")
@click.option("-v", "--verbose", is_flag=True, help="Also print the checks that found nothing wrong.")
def run(
    path: str | None,
    targets: tuple[str, ...],
    backends: tuple[str, ...],
    only: tuple[str, ...],
    repetitions: int | None,
    seed: int | None,
    output: str,
    no_output: bool,
    allow_remote: bool,
    verbose: bool,
) -> None:
    """Measure what a scenario says and print what was found.

    Exit codes: 0 all is as it should be; 1 a fault was found, a threshold missed, or the scenario is wrong; 3 the
    harness was the limit, so a threshold cannot be judged; 130 ended by Ctrl-C, with partial results.
    """
    from userspace_proxy.bench.analysis.verdicts import exit_code
    from userspace_proxy.bench.output.files import write_report
    from userspace_proxy.bench.output.progress import ProgressBar
    from userspace_proxy.bench.output.table import make_console, print_report
    from userspace_proxy.bench.session import Session

    scenario = _scenario(path, targets, backends, only, repetitions, seed)
    console = make_console()
    with ProgressBar() as bar:
        command = shlex.join(["userspace-proxy", *sys.argv[1:]])
        session = Session(scenario, command=command, allow_remote=allow_remote, on_progress=bar.advance)
        bar.begin(session.expected_s)
        try:
            run_until_stopped(_run(session))
        finally:  # whatever ended it: what was measured is kept
            bar.end()
            paths = [] if no_output or not session.report.runs else write_report(session.report, Path(output))
            print_report(session.report, console, verbose=verbose)
    if paths:
        console.print(f"Results: {', '.join(map(str, paths[:3]))}", soft_wrap=True)
    sys.exit(_INTERRUPTED if session.report.partial else exit_code(session.report))


@bench.command()
@click.argument("path", default="bench.yaml")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(path: str, force: bool) -> None:
    """Write a commented scenario file to PATH (bench.yaml; - is stdout)."""
    from userspace_proxy.bench.scenario_file import template

    if path == "-":
        click.echo(template(), nl=False)
        return
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise ConfigError("exists already; --force replaces it", where=path) from None
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=path) from None
    click.echo(f"Wrote {path}. Next: userspace-proxy bench run -f {path}")


@bench.command()
@click.argument("path")
def validate(path: str) -> None:
    """Say whether a scenario file is right, without running it."""
    from userspace_proxy.bench.scenario_file import read_scenario

    scenario = read_scenario(path)
    click.echo(f"{path}: {len(scenario.targets)} targets, {len(scenario.tests)} tests, {scenario.repetitions} rounds")


@bench.command()
@click.argument("before")
@click.argument("after")
def compare(before: str, after: str) -> None:
    """Say what has changed from one result file to another: BEFORE.json AFTER.json.

    Exit code 1 when something has become worse.
    """
    from userspace_proxy.bench.analysis.comparison import compare_reports
    from userspace_proxy.bench.output.files import read_report
    from userspace_proxy.bench.output.table import make_console, print_comparisons

    old, new = read_report(before), read_report(after)
    comparisons = compare_reports(old, new)
    if not comparisons:
        raise ConfigError("have no test of the same name on a target of the same name", where=f"{before}, {after}")
    console = make_console()
    print_comparisons(comparisons, new.confidence, console)
    if old.environment.cpu != new.environment.cpu or old.environment.kernel != new.environment.kernel:
        console.print("The two come from different machines or kernels: what differs may be just that.")
    if old.scenario != new.scenario:
        console.print("The two come from different scenarios.")
    sys.exit(any(comparison.verdict == "worse" for comparison in comparisons))


@bench.command()
@click.argument("path")
@click.option("-o", "--output", help="Directory for the files; only the table is printed without.")
@click.option("-v", "--verbose", is_flag=True, help="Also print the checks that found nothing wrong.")
def report(path: str, output: str | None, verbose: bool) -> None:
    """Show the result file PATH again, as a table, or with -o as HTML, CSV and .hgrm."""
    from userspace_proxy.bench.output.files import read_report, write_report
    from userspace_proxy.bench.output.table import make_console, print_report

    found = read_report(path)
    print_report(found, make_console(), verbose=verbose)
    if output is not None:
        for written in write_report(found, Path(output)):
            click.echo(written)


async def _run(session: Session) -> None:
    """Run the session. Ctrl-C ends it early: its report is then partial, and all that was measured is there."""
    try:
        await session.run()
    except asyncio.CancelledError:
        click.echo("Ended early.", err=True)
        raise


def _scenario(
    path: str | None,
    targets: tuple[str, ...],
    backends: tuple[str, ...],
    only: tuple[str, ...],
    repetitions: int | None,
    seed: int | None,
) -> Scenario:
    """Return the scenario that the options ask for. Raises ConfigError."""
    import msgspec

    from userspace_proxy.bench.scenario import Backends
    from userspace_proxy.bench.scenario_file import problems, read_scenario, scenario_from_yaml, with_names
    from userspace_proxy.bench.session import narrowed

    scenario = read_scenario(path) if path else scenario_from_yaml("")
    changes: dict[str, object] = {}
    if targets:
        changes["targets"] = tuple(_target(text, has_backends=bool(backends)) for text in targets)
    if backends:
        changes["backends"] = Backends(count=len(backends), addresses=backends)
    if repetitions is not None:
        changes["repetitions"] = repetitions
    if seed is not None:
        changes["seed"] = seed
    scenario = with_names(msgspec.structs.replace(scenario, **changes))
    if unknown := set(only) - {test.name for test in scenario.tests}:
        known = ", ".join(test.name for test in scenario.tests)
        raise ConfigError(f"there is no test {min(unknown)!r}; there are {known}", where="--only")
    scenario = narrowed(scenario, only)
    for _, reason in problems(scenario):
        raise ConfigError(reason, where=path or "options")
    return scenario


def _target(text: str, *, has_backends: bool) -> Target:
    from userspace_proxy.bench import scenario

    kinds: dict[str, Target] = {
        "direct": scenario.Direct(),
        "proxy": scenario.ThisProxy(),
        "haproxy": scenario.HAProxy(),
        "nginx": scenario.Nginx(),
    }
    if text in kinds:
        return kinds[text]
    name, equals, address = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is neither one of {', '.join(kinds)} nor NAME=HOST:PORT", where="--target")
    return scenario.Address(name=name, address=address, own_backends=not has_backends)
