"""No command: the daemon in kube-proxy's place. Arguments in, and then either one of the small jobs or `run_daemon`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from userspace_proxy import __version__
from userspace_proxy.cli import PROGRAM
from userspace_proxy.cli.flag_help import render
from userspace_proxy.cli.load import load_config
from userspace_proxy.cli.logs import set_up_logging
from userspace_proxy.cli.pflag import parse
from userspace_proxy.cli.running import run_until_stopped
from userspace_proxy.core.config import Action, Config
from userspace_proxy.core.config_file import encode
from userspace_proxy.core.errors import ConfigError

_log = logging.getLogger(__name__)


def daemon(arguments: Sequence[str], commands: Mapping[str, str]) -> None:
    """Do what the arguments ask for, and return when it is done. Raises ProxyError.

    `commands` are the other commands of the program, for `--help`.
    """
    flags = parse(arguments)
    if flags.get("help"):
        print(render(commands))
        return
    if flags.get("version"):
        print(f"{PROGRAM} {__version__}")
        return
    config = load_config(arguments)
    _set_up_logging(config.document.logging.verbosity, config.document.logging.format)
    for warning in config.warnings:
        _log.warning(warning)
    if config.action is Action.WRITE_CONFIG:
        write_config(config)
    else:
        run_daemon(config, partial(load_config, arguments))


def write_config(config: Config) -> None:
    """Write the configuration to the file that it names. Raises ConfigError."""
    path = config.write_config_to
    try:
        Path(path).write_text(encode(config.document))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=path, subject="cannot be written") from error
    _log.info("Wrote configuration to %s", path)


def run_daemon(config: Config, load_again: Callable[[], Config]) -> None:
    """Run, clean up or initialise, as `config.action` says. `load_again` reads a changed file. Raises ProxyError."""
    from userspace_proxy.daemon import Daemon, clean_up, init_only  # a second's worth of imports

    match config.action:
        case Action.CLEANUP:
            run_until_stopped(clean_up(config))
        case Action.INIT_ONLY:
            init_only(config)
        case _:
            run_until_stopped(Daemon(config, load_again, _set_up_logging).run())


def _set_up_logging(verbosity: int, log_format: str) -> None:
    set_up_logging(verbosity, "json" if log_format == "json" else "text")
