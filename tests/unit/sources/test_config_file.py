"""The configuration file while the process runs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from tests.unit.core.configs import HEADER
from userspace_proxy.cli.load import load_config
from userspace_proxy.core.config import Config
from userspace_proxy.core.errors import ConfigError, ConfigFileUpdated
from userspace_proxy.sources.config_file import Reload, end_when_updated, reloads

LOOK_EVERY_S = 0.001
PATIENCE_S = 5.0
QUIET_S = 0.05
"""Many looks long: what has not been noticed by then is not going to be."""


def write(path: Path, text: str) -> None:
    path.write_text(text)


def replace(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.rename(path)


def move_away(path: Path, text: str) -> None:
    path.rename(path.with_name("moved"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.conf"
    path.write_text(HEADER)
    return path


async def until_ended(path: Path, change: Callable[[], object], patience_s: float) -> None:
    async with asyncio.timeout(patience_s):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(end_when_updated(str(path), look_every_s=LOOK_EVERY_S))
            await asyncio.sleep(0)  # the file is open
            change()


@pytest.mark.parametrize("change", [write, replace, move_away])
async def test_a_file_that_is_written_replaced_or_moved_away_ends_the_process(
    path: Path, change: Callable[[Path, str], None]
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await until_ended(path, lambda: change(path, HEADER + "mode: userspace\n"), PATIENCE_S)
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigFileUpdated)
    assert str(error) == "content of the proxy server's configuration file was updated"


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path),
        lambda path: path.write_text(HEADER),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o600),
    ],
    ids=["touched", "written with the same content", "deleted", "chmod"],
)
async def test_a_file_that_says_the_same_or_is_deleted_ends_nothing(
    path: Path, change: Callable[[Path], object]
) -> None:
    with pytest.raises(TimeoutError):
        await until_ended(path, lambda: change(path), QUIET_S)


class ConfigMap:
    """A directory as the kubelet mounts a ConfigMap: a link to a link to the files of one version."""

    def __init__(self, root: Path) -> None:
        self._root, self._version = root, 0
        self.path = root / "config.conf"
        self.path.symlink_to("..data/config.conf")

    def update(self, text: str) -> None:
        self._version += 1
        version = self._root / f"..{self._version}"
        version.mkdir()
        (version / "config.conf").write_text(text)
        link = self._root / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self._root / "..data")
        old = self._root / f"..{self._version - 1}" / "config.conf"
        old.unlink(missing_ok=True)


async def test_an_update_of_a_config_map_ends_nothing_as_with_kube_proxy(tmp_path: Path) -> None:
    config_map = ConfigMap(tmp_path)
    config_map.update(HEADER)
    with pytest.raises(TimeoutError):
        await until_ended(config_map.path, lambda: config_map.update(HEADER + "mode: userspace\n"), QUIET_S)


async def test_a_file_that_cannot_be_watched_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^/absent: cannot be watched: No such file"):
        await end_when_updated("/absent")


class Reloading:
    """A running proxy's view of its file. `refused` is set once a file could not be used."""

    def __init__(self, path: Path) -> None:
        self._arguments = [f"--config={path}", "--config-reload"]
        self.refused = asyncio.Event()
        self.stream = reloads(load_config(self._arguments), self._load_again, look_every_s=LOOK_EVERY_S)

    def _load_again(self) -> Config:
        try:
            return load_config(self._arguments)
        except ConfigError:
            self.refused.set()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stream.aclose()

    async def next(self) -> Reload:
        async with asyncio.timeout(PATIENCE_S):
            return await anext(self.stream)


async def test_a_changed_file_is_taken_up_as_far_as_possible(path: Path) -> None:
    async with Reloading(path) as reloading:
        write(path, HEADER + "udpIdleTimeout: 3s\nbindAddress: 10.0.0.1\n")
        reload = await reloading.next()
    assert reload.changes.applicable == ("udpIdleTimeout",)
    assert reload.changes.needs_restart == ("bindAddress",)
    assert reload.config.document.udp_idle_timeout == 3.0
    assert reload.config.document.bind_address == "0.0.0.0"
    assert reload.config.own.config_reload


async def test_updates_of_a_config_map_are_taken_up_one_after_the_other(tmp_path: Path) -> None:
    config_map = ConfigMap(tmp_path)
    config_map.update(HEADER)
    async with Reloading(config_map.path) as reloading:
        for timeout in ("3s", "4s"):
            config_map.update(HEADER + f"udpIdleTimeout: {timeout}\n")
            assert str((await reloading.next()).config.document.udp_idle_timeout) == timeout


async def test_a_broken_or_missing_file_is_reported_and_the_last_good_one_stays(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Reloading(path) as reloading, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(reloading.next())
        write(path, HEADER + "udpIdleTimeout: soon\n")
        await reloading.refused.wait()
        move_away(path, "")
        await asyncio.sleep(QUIET_S)
        write(path, HEADER + "udpIdleTimeout: 3s\n")
        assert (await waiting).config.document.udp_idle_timeout == 3.0
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"{path}:3: udpIdleTimeout: failed to decode" in record.getMessage()


async def test_a_change_without_effect_is_passed_over(path: Path) -> None:
    async with Reloading(path) as reloading, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(reloading.next())
        write(path, HEADER + "# nothing\nipvs: {scheduler: rr}\n")
        await asyncio.sleep(QUIET_S)
        assert not waiting.done()
        waiting.cancel()
