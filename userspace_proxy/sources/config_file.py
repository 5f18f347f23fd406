"""The configuration file while the process runs: a change ends it, or is taken up.

The file is looked at once a second. That sees whatever happens on any file system, and costs one or two system calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Self

import msgspec

from userspace_proxy.core.config import Config
from userspace_proxy.core.config_changes import ConfigChanges, changes, taken_up
from userspace_proxy.core.errors import ConfigError, ConfigFileUpdated

LOOK_EVERY_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reload:
    """A changed configuration. `config` is the running one with what can be taken up; `changes` says what that is."""

    config: Config
    changes: ConfigChanges


async def end_when_updated(path: str, *, look_every_s: float = LOOK_EVERY_S) -> NoReturn:
    """Raise ConfigFileUpdated once the file was written, moved away, or replaced by another.

    As in kube-proxy, what counts is the file that a symbolic link leads to at the start: an update of a mounted
    ConfigMap changes the link and deletes the file, and must not restart all nodes of a cluster at once.
    """
    with _OpenFile(path) as file:
        while not file.was_updated():  # noqa: ASYNC110 (a file tells nobody)
            await asyncio.sleep(look_every_s)
    raise ConfigFileUpdated


async def reloads(
    config: Config, load_again: Callable[[], Config], *, look_every_s: float = LOOK_EVERY_S
) -> AsyncGenerator[Reload, None]:
    """Yield a changed configuration as often as its file changes in a way that has an effect.

    A file that cannot be used is logged, and the configuration stays. Links are followed each time, so that updates
    of a ConfigMap arrive.
    """
    loaded: tuple[int, ...] | None = None
    now: tuple[int, ...] | None = None
    while True:
        await asyncio.sleep(look_every_s)
        before, now = now, _identity(config.config_file)
        if now in (None, loaded) or now != before:  # a file that still changes is being written
            continue
        loaded = now
        try:
            wanted = load_again()
        except ConfigError as error:
            _log.error("the changed configuration cannot be used, so the last good one stays: %s", error)
            continue
        if differences := changes(config.document, wanted.document):
            document = taken_up(config.document, wanted.document)
            config = msgspec.structs.replace(config, document=document, warnings=wanted.warnings)
            yield Reload(config, differences)


class _OpenFile:
    """A file that stays open, by which writing to it, moving it away, replacing it and deleting it are told apart."""

    def __init__(self, path: str) -> None:
        try:
            self._path = Path(path).resolve(strict=True)
            self._file = self._path.open("rb")
        except OSError as error:
            raise ConfigError(error.strerror or str(error), where=path, subject="cannot be watched") from error
        self._content = self._file.read()
        self._written = self._status()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def was_updated(self) -> bool:
        """Tell whether other content was written, or the file is no longer at its path without being deleted."""
        before, self._written = self._written, self._status()
        if before != self._written:
            self._file.seek(0)
            if self._file.read() != self._content:
                return True
        ours = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except OSError:
            return ours.st_nlink > 0
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _status(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_mtime_ns, status.st_size


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
