"""The data process of the daemon: traffic, and no privileges."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from userspace_proxy.cli.logs import set_up_daemon_logging
from userspace_proxy.cli.running import faults_as_crashes, run_until_stopped
from userspace_proxy.supervisor.data_process import give_up_privileges, serve_data


def data_process(arguments: Sequence[str]) -> None:
    """Be the data process: verbosity, log format, and the descriptor that leads to the supervisor."""
    verbosity, log_format, descriptor = arguments
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as the other processes do, which say so
    with faults_as_crashes():
        set_up_daemon_logging(int(verbosity), log_format)
        give_up_privileges()
        run_until_stopped(serve_data(int(descriptor), set_up_daemon_logging))
