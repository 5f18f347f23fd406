"""Desired state from files: read once at the start, and again whenever they change.

Files are polled, since that works on every file system and for every way of replacing a file: written in place,
renamed over, or a symbolic link turned elsewhere, as Kubernetes does with a mounted ConfigMap. The event loop never
waits for a disk or a parser: both have a thread.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.objects import KubernetesObject
from userspace_proxy.sources.manifest import Manifest, manifests, merge, split

SUFFIXES: Final = (".yaml", ".yml", ".json")
POLL_INTERVAL_S: Final = 0.25
MAX_UNSTABLE_POLLS: Final = 2
"""Files that keep changing are read as they are after so many polls, so that a change waits for three at the most."""

_CLOCK_GRAIN_NS: Final = 100_000_000
"""A file that changed so recently may change again without showing it: its time stamps are coarse."""

_STDIN: Final = "-"

Contents = dict[str, bytes | str]
"""What is in every file, by the name that errors give it; as a string, why it could not be read."""


def read(paths: Sequence[str | Path], stdin: BinaryIO | None = None) -> list[KubernetesObject]:
    """Return the objects in files, in directories (their `.yaml`, `.yml` and `.json` files) and, as `-`, in `stdin`.

    Raises ConfigError.
    """
    return StaticFiles(paths, stdin=stdin).read()


class StaticFiles:
    """Files that say what to proxy. What cannot be read twice, such as a pipe, is read once and does not change."""

    def __init__(
        self, paths: Sequence[str | Path], *, stdin: BinaryIO | None = None, poll_interval_s: float = POLL_INTERVAL_S
    ) -> None:
        self._paths = tuple(str(path) for path in paths)
        self._stdin = stdin
        self._poll_interval_s = poll_interval_s
        self._seen: tuple[object, ...] | None = None
        self._contents: Contents = {}
        self._used: Contents = {}  # the contents that could be parsed last
        self._streams: Contents = {}
        self._parsed: dict[str, list[Manifest]] = {}

    def read(self) -> list[KubernetesObject]:
        """Return all objects as they are now. Raises ConfigError. `changes` reports what differs from here."""
        self._contents = self._load()
        return self._parse()

    async def changes(self) -> AsyncGenerator[list[KubernetesObject] | ConfigError, None]:
        """Yield all objects whenever something changed, or the error that keeps them from being read, once."""
        while True:
            await self._change()
            outcome = await asyncio.to_thread(self._reread)
            if outcome is not None:
                yield outcome

    async def _change(self) -> None:
        """Return when the files differ from what was read last and have been still for one poll, or never are."""
        previous, unstable_polls = self._seen, 0
        while True:
            await asyncio.sleep(self._poll_interval_s)
            current = await asyncio.to_thread(self._look)
            if current != self._seen and (current == previous or unstable_polls >= MAX_UNSTABLE_POLLS):
                return
            unstable_polls = unstable_polls + 1 if current != self._seen else 0
            previous = current

    def _look(self) -> tuple[object, ...]:
        return tuple(file.signature for file in _files(self._paths))

    def _reread(self) -> list[KubernetesObject] | ConfigError | None:
        """Return what the files say now, None when that is what they said before."""
        contents = self._load()
        if contents == self._contents:
            return None
        self._contents = contents
        try:
            self._refuse_emptied()
            return self._parse()
        except ConfigError as error:
            return error

    def _refuse_emptied(self) -> None:
        """Raise ConfigError for a file without a byte that had some: whoever writes it has only just begun.

        A shell empties the file of `kubectl get ... > FILE` seconds before kubectl has its answer.
        """
        for origin, content in self._contents.items():
            if not content and self._used.get(origin):
                raise ConfigError("empty", where=origin)

    def _load(self) -> Contents:
        """Return what is in every file, and remember what the files looked like before they were read."""
        now_ns = time.time_ns()
        files = list(_files(self._paths))
        is_settled = all(now_ns - file.changed_ns > _CLOCK_GRAIN_NS for file in files)
        self._seen = tuple(file.signature for file in files) if is_settled else None
        distinct = {file.identity: file for file in reversed(files)}
        contents = {file.origin: self._content(file) for file in reversed(distinct.values())}
        if any(isinstance(content, str) for content in contents.values()):
            self._seen = None  # what made it unreadable, such as a lack of descriptors, may end without a change
        return contents

    def _content(self, file: _File) -> bytes | str:
        if file.problem or file.is_regular:
            return file.problem or _read(file.path, None)
        if file.path not in self._streams:
            self._streams[file.path] = _read(file.path, self._stdin)
        return self._streams[file.path]

    def _parse(self) -> list[KubernetesObject]:
        """Return the objects in the contents. A document that was there before is not parsed again."""
        found = list[Manifest]()
        parsed = dict[str, list[Manifest]]()
        for origin, content in self._contents.items():
            if isinstance(content, str):
                raise ConfigError(content, where=origin)
            for document in split(content, origin):
                if document.text not in parsed:
                    known = self._parsed.get(document.text)
                    parsed[document.text] = manifests(document) if known is None else known
                found.extend(replace(manifest, document=document) for manifest in parsed[document.text])
        objects = merge(found)
        self._parsed, self._used = parsed, self._contents
        return objects


@dataclass(frozen=True, slots=True)
class _File:
    """A path that was asked for or found in a directory. Standard input, and what is missing, has no status."""

    path: str
    status: os.stat_result | None = None
    problem: str = ""

    @property
    def origin(self) -> str:
        """The name that errors give it."""
        return "<stdin>" if self.path == _STDIN else self.path

    @property
    def is_regular(self) -> bool:
        return self.status is not None and stat.S_ISREG(self.status.st_mode)

    @property
    def identity(self) -> object:
        """Equal for two paths to the same file."""
        return (self.status.st_dev, self.status.st_ino) if self.status else self.path

    @property
    def changed_ns(self) -> int:
        """When the file changed, in nanoseconds since 1970; 0 for what does not change."""
        return self.status.st_ctime_ns if self.status and self.is_regular else 0

    @property
    def signature(self) -> object:
        """Equal for as long as the file need not be read again."""
        if self.status and self.is_regular:
            return self.path, self.identity, self.status.st_size, self.status.st_mtime_ns, self.status.st_ctime_ns
        return self.path, self.identity, self.problem


def _files(paths: Sequence[str]) -> Iterator[_File]:
    for path in paths:
        try:
            listed = _listing(path) if os.path.isdir(path) else [path]
        except OSError as error:
            yield _File(path, problem=_reason(error))
        else:
            yield from map(_file, listed)


def _listing(directory: str) -> list[str]:
    """Return the manifests in a directory, sorted; not those below it, and not hidden ones, as a shell's `*` does."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIXES) and not name.startswith("."))
    return [path for path in (os.path.join(directory, name) for name in names) if not os.path.isdir(path)]


def _file(path: str) -> _File:
    try:
        return _File(path) if path == _STDIN else _File(path, os.stat(path))
    except (OSError, ValueError) as error:
        return _File(path, problem=_reason(error))


def _read(path: str, stdin: BinaryIO | None) -> bytes | str:
    try:
        if path == _STDIN:
            return stdin.read() if stdin else "there is no standard input"
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return f"cannot be read: {reason or error}"
