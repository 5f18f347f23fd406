"""The daemon as three processes of one program: what each does with its command line."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from userspace_proxy.cli.load import load_config
from userspace_proxy.cli.logs import set_up_logging
from userspace_proxy.cli.running import run_until_stopped
from userspace_proxy.core.config import Config
from userspace_proxy.core.errors import ProxyError, leaves
from userspace_proxy.node import systemd
from userspace_proxy.node.setup import log_steps, set_up_process
from userspace_proxy.supervisor.protocol import CRASHED, Role

_log = logging.getLogger(__name__)


def supervise(config: Config, arguments: Sequence[str]) -> int:
    """Run the daemon of these arguments, and return its exit code. What is set up here is inherited by all."""
    from userspace_proxy.supervisor.supervisor import Supervisor

    log_steps(set_up_process(config.document.oom_score_adj))
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    log = config.document.logging
    commands = {
        Role.CONTROL: [*program, Role.CONTROL.value, *arguments],
        Role.DATA: [*program, Role.DATA.value, str(log.verbosity), log.format],
    }
    return Supervisor(commands, systemd.notify).run()


def control_process(arguments: Sequence[str]) -> None:
    """Be the control process: the daemon's arguments, then the descriptor that leads to the supervisor.

    Raises ProxyError. A fault of ours ends in an exit code that makes the supervisor start another one.
    """
    *arguments, descriptor = arguments
    with _faults_as_crashes():
        config = load_config(arguments)
        set_up_daemon_logging(config.document.logging.verbosity, config.document.logging.format)
        for warning in config.warnings:
            _log.warning(warning)
        run_until_stopped(_control(config, partial(load_config, arguments), int(descriptor)))


def data_process(arguments: Sequence[str]) -> None:
    """Be the data process: verbosity, log format, and the descriptor that leads to the supervisor."""
    from userspace_proxy.supervisor.data_process import give_up_privileges, serve_data

    verbosity, log_format, descriptor = arguments
    with _faults_as_crashes():
        set_up_daemon_logging(int(verbosity), log_format)
        give_up_privileges()
        run_until_stopped(serve_data(int(descriptor), set_up_daemon_logging))


def set_up_daemon_logging(verbosity: int, log_format: str) -> None:
    """Log as the daemon's configuration says."""
    set_up_logging(verbosity, "json" if log_format == "json" else "text")


@contextmanager
def _faults_as_crashes() -> Iterator[None]:
    """Let errors that are the user's pass, and end the process for all others as a crash, with a traceback."""
    try:
        yield
    except Exception as error:
        if all(isinstance(leaf, ProxyError) for leaf in leaves(error)):
            raise
        traceback.print_exc()
        sys.exit(CRASHED)


async def _control(config: Config, load_again: Callable[[], Config], descriptor: int) -> None:
    from userspace_proxy.daemon import Daemon, Surroundings  # a second's worth of imports
    from userspace_proxy.node.privileges import die_with_parent
    from userspace_proxy.supervisor.control_process import ControlSide

    die_with_parent()
    task = asyncio.current_task()
    assert task is not None
    side = ControlSide(descriptor, on_end=task.cancel)

    def set_up_all_logging(verbosity: int, log_format: str) -> None:
        set_up_daemon_logging(verbosity, log_format)
        side.set_up_logging(verbosity, log_format)

    surroundings = Surroundings(side.make_data_path, side.notify, side.processes)
    try:
        await Daemon(config, load_again, set_up_all_logging, surroundings).run()
    finally:
        side.close()
