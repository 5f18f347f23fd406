"""The control process of the daemon: everything but traffic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from userspace_proxy.cli.load import load_config
from userspace_proxy.cli.logs import set_up_daemon_logging
from userspace_proxy.cli.running import faults_as_crashes, run_until_stopped
from userspace_proxy.core.config import Config
from userspace_proxy.daemon import Daemon, Surroundings
from userspace_proxy.node.privileges import die_with_parent
from userspace_proxy.supervisor.control_process import ControlSide

_log = logging.getLogger(__name__)


def control_process(arguments: Sequence[str]) -> None:
    """Be the control process: the daemon's arguments, then the descriptor that leads to the supervisor.

    Raises ProxyError. A fault of ours ends in an exit code that makes the supervisor start another one.
    """
    *arguments, descriptor = arguments
    with faults_as_crashes():
        config = load_config(arguments)
        set_up_daemon_logging(config.document.logging.verbosity, config.document.logging.format)
        for warning in config.warnings:
            _log.warning(warning)
        run_until_stopped(_control(config, partial(load_config, arguments), int(descriptor)))


async def _control(config: Config, load_again: Callable[[], Config], descriptor: int) -> None:
    die_with_parent()
    task = asyncio.current_task()
    assert task is not None
    side = ControlSide(descriptor, on_end=task.cancel)

    def set_up_all_logging(verbosity: int, log_format: str) -> None:
        set_up_daemon_logging(verbosity, log_format)
        side.set_up_logging(verbosity, log_format)

    side.set_up_logging(config.document.logging.verbosity, config.document.logging.format)
    surroundings = Surroundings(side.make_data_path, side.notify, side.processes)
    try:
        await Daemon(config, load_again, set_up_all_logging, surroundings).run()
    finally:
        side.close()
