"""No command: the daemon in kube-proxy's place. Arguments in, and then either one of the small jobs or `supervise`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from userspace_proxy import __version__
from userspace_proxy.cli import PROGRAM
from userspace_proxy.cli.flag_help import render
from userspace_proxy.cli.load import load_config
from userspace_proxy.cli.logs import set_up_daemon_logging
from userspace_proxy.cli.pflag import parse
from userspace_proxy.cli.running import run_until_stopped
from userspace_proxy.core.config import Action, Config
from userspace_proxy.core.config_file import encode
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.node import systemd
from userspace_proxy.node.setup import log_steps, set_up_process
from userspace_proxy.supervisor.protocol import Role
from userspace_proxy.supervisor.supervisor import Supervisor

_log = logging.getLogger(__name__)


def daemon(arguments: Sequence[str]) -> None:
    """Do what the arguments ask for, and return when it is done. Raises ProxyError."""
    flags = parse(arguments)
    if flags.get("help"):
        from userspace_proxy.cli.commands import summaries

        print(render(summaries()))
        return
    if flags.get("version"):
        print(f"{PROGRAM} {__version__}")
        return
    config = load_config(arguments)
    set_up_daemon_logging(config.document.logging.verbosity, config.document.logging.format)
    if config.action is Action.RUN:
        sys.exit(supervise(config, arguments))
    for warning in config.warnings:
        _log.warning(warning)
    if config.action is Action.WRITE_CONFIG:
        write_config(config)
    else:
        set_up_or_clean_up(config)


def supervise(config: Config, arguments: Sequence[str]) -> int:
    """Run the daemon of these arguments, and return its exit code. What is set up here is inherited by all."""
    log_steps(set_up_process(config.document.oom_score_adj))
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    log = config.document.logging
    commands = {
        Role.CONTROL: [*program, Role.CONTROL.value, *arguments],
        Role.DATA: [*program, Role.DATA.value, str(log.verbosity), log.format],
    }
    return Supervisor(commands, systemd.notify).run()


def write_config(config: Config) -> None:
    """Write the configuration to the file that it names. Raises ConfigError."""
    path = config.write_config_to
    try:
        Path(path).write_text(encode(config.document))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=path, subject="cannot be written") from error
    _log.info("Wrote configuration to %s", path)


def set_up_or_clean_up(config: Config) -> None:
    """Do what the daemon's privileges are needed for without running it. Raises ProxyError."""
    from userspace_proxy.daemon import clean_up, init_only  # a second's worth of imports

    if config.action is Action.CLEANUP:
        run_until_stopped(clean_up(config))
    else:
        init_only(config)
