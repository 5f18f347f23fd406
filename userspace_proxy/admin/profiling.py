"""Profiling over HTTP, for those who asked for it: what runs now, and where CPU time goes."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

from aiohttp import web

_RATE_HZ = 100
_DEFAULT_S = 30.0
_LONGEST_S = 120.0
_DEEPEST = 64
_MOST_STACKS = 10_000
_MOST_TASKS = 500

_INDEX = """<!DOCTYPE html>
<title>/debug/pprof/</title>
<h1>/debug/pprof/</h1>
<ul>
<li><a href="goroutine">goroutine</a>: the stacks of all tasks and threads</li>
<li><a href="profile?seconds=30">profile</a>: CPU time by stack for some seconds, for flamegraph.pl or speedscope</li>
</ul>
"""


class CpuProfile:
    """Counts the stacks of the main thread at each hundredth of a second of CPU time, while its context is open.

    The kernel's profiling timer does it, which costs some microseconds a time and stops nothing. Only one can be open
    in a process, and only in the main thread: raises RuntimeError else.
    """

    _is_open = False

    def __init__(self) -> None:
        self.stacks: Counter[tuple[str, ...]] = Counter()

    def __enter__(self) -> CpuProfile:
        if CpuProfile._is_open:
            raise RuntimeError("CPU profiling is already in use")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("CPU profiling works in the main thread only")
        self._before = signal.signal(signal.SIGPROF, self._count)
        signal.setitimer(signal.ITIMER_PROF, 1 / _RATE_HZ, 1 / _RATE_HZ)
        CpuProfile._is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        # Not the default action: a signal that is still on its way would end the process.
        ends_the_process = self._before in (signal.SIG_DFL, None)
        signal.signal(signal.SIGPROF, signal.SIG_IGN if ends_the_process else self._before)
        CpuProfile._is_open = False

    def folded(self) -> Iterator[str]:
        """Yield lines of `outermost;...;innermost COUNT`, the most frequent first."""
        for stack, count in self.stacks.most_common():
            yield f"{';'.join(stack)} {count}\n"

    def _count(self, number: int, frame: FrameType | None) -> None:
        stack: list[str] = []
        while frame is not None and len(stack) < _DEEPEST:
            stack.append(f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        key = tuple(reversed(stack))
        if key in self.stacks or len(self.stacks) < _MOST_STACKS:
            self.stacks[key] += 1


def add_profiling(app: web.Application, set_verbosity: Callable[[int], None]) -> None:
    """Add /debug/pprof/ and /debug/flags/v to an application. `set_verbosity` is given what is put there."""

    async def flags_v(request: web.Request) -> web.Response:
        async with asyncio.timeout(5.0):
            text = (await request.text()).strip()
        if not text.isdecimal() or len(text) > 3:
            return web.Response(status=400, text=f"not a verbosity: {text[:64]!r}\n")
        set_verbosity(int(text))
        return web.Response(text=f"successfully set klog.logging.verbosity to {text}")

    app.router.add_get("/debug/pprof", _index)
    app.router.add_get("/debug/pprof/", _index)
    app.router.add_get("/debug/pprof/goroutine", _goroutine)
    app.router.add_get("/debug/pprof/profile", _profile)
    app.router.add_put("/debug/flags/v", flags_v)


async def _index(request: web.Request) -> web.Response:
    return web.Response(text=_INDEX, content_type="text/html")


async def _goroutine(request: web.Request) -> web.Response:
    return web.Response(text="\n".join(what_runs()))


async def _profile(request: web.Request) -> web.Response:
    try:
        seconds = float(request.query.get("seconds", _DEFAULT_S))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        return web.Response(status=400, text=f"seconds must be a number above 0, and {_LONGEST_S:g} at most\n")
    try:
        with CpuProfile() as profile:
            await asyncio.sleep(seconds)
    except RuntimeError as error:
        return web.Response(status=500, text=f"Could not enable CPU profiling: {error}\n")
    return web.Response(text="".join(profile.folded()))


def what_runs() -> Iterator[str]:
    """Yield a paragraph for each task of the running loop and each thread, without reading any source file."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    yield f"tasks: {len(tasks)}, threads: {threading.active_count()}\n"
    for task in tasks[:_MOST_TASKS]:
        yield f"task {task.get_name()}:\n" + _stack_text(task.get_stack(limit=_DEEPEST))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        frames = [each for each, _ in traceback.walk_stack(frame)][:_DEEPEST]
        yield f"thread {names.get(ident, ident)}:\n" + _stack_text(list(reversed(frames)))


def _stack_text(frames: list[FrameType]) -> str:
    return "".join(f"    {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}\n" for frame in frames)
