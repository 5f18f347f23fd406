"""Runs a coroutine as the whole life of the process: event loop, signals, end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

from userspace_proxy.core.errors import ProxyError, leaves
from userspace_proxy.supervisor.protocol import CRASHED


def run_until_stopped(main: Coroutine[object, object, None]) -> None:
    """Run `main` until it returns, or until SIGTERM or Ctrl-C cancels it; a second one cuts its clean-up short.

    Uses uvloop where it is installed.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_signal(main))


@contextmanager
def faults_as_crashes() -> Iterator[None]:
    """Let errors that are the user's pass, and end the process for all others as a crash, with a traceback."""
    try:
        yield
    except Exception as error:
        if all(isinstance(leaf, ProxyError) for leaf in leaves(error)):
            raise
        traceback.print_exc()
        sys.exit(CRASHED)


async def _until_signal(main: Coroutine[object, object, None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(main)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None
