"""Files, directories and streams: read at the start, and followed while they change."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.objects import KubernetesObject
from userspace_proxy.sources import static
from userspace_proxy.sources.static import StaticFiles, read

from .manifests import SERVICE, SLICE, service

Changes = AsyncGenerator[list[KubernetesObject] | ConfigError, None]


def names(objects: list[KubernetesObject] | ConfigError) -> list[str]:
    assert isinstance(objects, list), objects
    return [each.key.name for each in objects]


def fault_of(*paths: str | Path, stdin: io.BytesIO | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(paths, stdin)
    return str(caught.value)


@asynccontextmanager
async def following(*paths: Path) -> AsyncIterator[Changes]:
    """Read the files, and follow their changes, at a faster pace than usual."""
    files = StaticFiles(paths, poll_interval_s=0.02)
    files.read()
    changes = files.changes()
    try:
        yield changes
    finally:
        await changes.aclose()


async def change(changes: Changes) -> list[KubernetesObject] | ConfigError:
    async with asyncio.timeout(5):
        return await anext(changes)


def test_a_file_gives_its_objects(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{SERVICE}---\n{SLICE}")
    assert names(read([tmp_path / "a.yaml"])) == ["web", "web-a"]


def test_a_directory_gives_its_manifests_sorted_and_no_others(tmp_path: Path) -> None:
    for name in ("b.yml", "a.yaml", "c.json"):
        (tmp_path / name).write_text(service(f"from-{name[0]}"))
    for name in ("notes.txt", ".hidden.yaml", "a.yaml~"):
        (tmp_path / name).write_text("no manifest: [")
    (tmp_path / "below.yaml").mkdir()
    (tmp_path / "below.yaml" / "d.yaml").write_text(service("from-d"))
    assert names(read([tmp_path])) == ["from-a", "from-b", "from-c"]


def test_standard_input_is_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SLICE)
    assert names(read([tmp_path / "a.yaml", "-"], io.BytesIO(SERVICE.encode()))) == ["web-a", "web"]
    assert fault_of("-", stdin=io.BytesIO(b"a: [")).startswith("<stdin>:1: ")
    assert fault_of("-") == "<stdin>: there is no standard input"
    closed = io.BytesIO()
    closed.close()
    assert fault_of("-", stdin=closed) == "<stdin>: cannot be read: I/O operation on closed file."


def test_a_file_that_is_reached_twice_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SERVICE)
    (tmp_path / "b.yaml").symlink_to(path)
    files = StaticFiles([path, tmp_path, str(path)])
    assert names(files.read()) == ["web"]
    assert list(files._contents) == [str(path)]


def test_the_same_object_in_two_files_must_be_the_same(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(SERVICE)
    two.write_text(f"# comment\n{SERVICE}")
    assert names(read([tmp_path])) == ["web"]
    two.write_text(f"\n---\n{SERVICE.replace('80', '81')}")
    assert fault_of(tmp_path) == f"{two}:3: Service default/web: already defined otherwise in {one}:1"


@pytest.mark.parametrize("name", ["missing.yaml", "a.yaml/b", "x" * 300, "nul\0.yaml"])
def test_a_file_that_cannot_be_found_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.yaml").write_text(SERVICE)
    assert fault_of(tmp_path / name).startswith(f"{tmp_path / name}: cannot be read: ")


def test_a_dangling_link_in_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to(tmp_path / "missing")
    assert fault_of(tmp_path) == f"{tmp_path / 'a.yaml'}: cannot be read: No such file or directory"


@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_may_not_be_read_is_named(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(SERVICE)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    if what == "directory":
        monkeypatch.setattr(os, "listdir", refuse)
    else:
        monkeypatch.setattr(Path, "read_bytes", refuse)
    path = tmp_path if what == "directory" else tmp_path / "a.yaml"
    assert fault_of(path) == f"{path}: cannot be read: Permission denied"


def write_in_place(path: Path, text: str) -> None:
    path.write_text(text)


def rename_over(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


def rename_over_with_the_same_size_and_time(path: Path, text: str) -> None:
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_text(text)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("replace", [write_in_place, rename_over, rename_over_with_the_same_size_and_time])
async def test_a_changed_file_is_read_again(tmp_path: Path, replace: Callable[[Path, str], None]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(service("one"))
    async with following(path) as changes:
        for name in ("two", "six"):
            replace(path, service(name))
            assert names(await change(changes)) == [name]


async def test_a_change_right_after_the_start_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for _ in range(5):
        path.write_text(service("one"))
        async with following(path) as changes:
            path.write_text(service("two"))
            assert names(await change(changes)) == ["two"]


async def test_a_mounted_config_map_is_followed_when_its_link_is_turned(tmp_path: Path) -> None:
    for version in ("one", "two"):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "a.yaml").write_text(service(version))
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    async with following(tmp_path) as changes:
        (tmp_path / "..data_tmp").symlink_to("..two")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        assert names(await change(changes)) == ["two"]


async def test_files_come_and_go_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(service("one"))
    async with following(tmp_path) as changes:
        (tmp_path / "b.yaml").write_text(service("two"))
        assert names(await change(changes)) == ["one", "two"]
        (tmp_path / "a.yaml").unlink()
        assert names(await change(changes)) == ["two"]


async def test_a_broken_file_is_told_once_for_each_content(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(service("one"))
    async with following(path) as changes:
        path.write_text("a: [")
        broken = await change(changes)
        assert isinstance(broken, ConfigError)
        assert broken.where == f"{path}:1"
        os.utime(path)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await anext(changes)


async def test_a_mended_file_takes_effect_even_if_it_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(service("one"))
    async with following(path) as changes:
        for _ in range(2):
            path.write_text(SERVICE.replace("80", "eighty"))
            broken = await change(changes)
            assert isinstance(broken, ConfigError)
            assert broken.field == "spec.ports[0].port"
            path.write_text(service("one"))
            assert names(await change(changes)) == ["one"]


async def test_a_vanished_file_is_told_and_followed_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(service("one"))
    async with following(path) as changes:
        path.unlink()
        assert str(await change(changes)) == f"{path}: cannot be read: No such file or directory"
        path.write_text(service("two"))
        assert names(await change(changes)) == ["two"]


async def test_an_emptied_file_is_told_and_what_it_had_stays_until_it_is_written(tmp_path: Path) -> None:
    """A shell empties the file of `kubectl get ... > FILE` long before kubectl has an answer."""
    path, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    path.write_text(service("one"))
    other.write_text("")  # one that never had anything is no fault
    async with following(path, other) as changes:
        path.write_text("")
        assert str(await change(changes)) == f"{path}: empty"
        other.write_text(service("three"))
        assert str(await change(changes)) == f"{path}: empty"
        path.write_text(service("two"))
        assert names(await change(changes)) == ["two", "three"]


async def test_a_file_that_could_not_be_read_for_a_while_is_read_again_though_it_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lack of descriptors leaves no trace in the file's status when it ends."""
    path = tmp_path / "a.yaml"
    path.write_text(service("one"))

    def refuse(*_: object) -> bytes:
        raise OSError(24, "Too many open files")

    async with following(path) as changes:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", refuse)
            rename_over(path, service("two"))
            await asyncio.sleep(0.2)  # so that the time stamp of the change is a settled one when it is read
            assert str(await change(changes)) == f"{path}: cannot be read: Too many open files"
        assert names(await change(changes)) == ["two"]


async def test_a_file_that_never_comes_to_rest_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SERVICE)

    async def keep_writing() -> None:
        for number in range(1_000_000):
            rename_over(path, service(f"s{number}"))
            await asyncio.sleep(0.001)

    async with following(path) as changes, asyncio.TaskGroup() as tasks:
        writer = tasks.create_task(keep_writing())
        assert names(await change(changes)) != ["web"]
        writer.cancel()


async def test_at_its_usual_pace_a_change_is_told_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(service("one"))
    files = StaticFiles([path])
    files.read()
    changes = files.changes()
    start = time.monotonic()
    path.write_text(service("two"))
    assert names(await change(changes)) == ["two"]
    assert time.monotonic() - start < 1
    await changes.aclose()


async def test_a_pipe_and_standard_input_are_read_once_and_kept(tmp_path: Path) -> None:
    pipe, path = tmp_path / "pipe", tmp_path / "a.yaml"
    os.mkfifo(pipe)
    path.write_text(service("file"))
    files = StaticFiles([pipe, "-", path], stdin=io.BytesIO(service("stdin").encode()), poll_interval_s=0.02)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(pipe.write_text, service("pipe")))
        assert names(await asyncio.to_thread(files.read)) == ["pipe", "stdin", "file"]
    changes = files.changes()
    path.write_text(service("changed"))
    assert names(await change(changes)) == ["pipe", "stdin", "changed"]
    await changes.aclose()


def test_only_documents_that_changed_are_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("---\n".join(service(f"s{number}") for number in range(10)))
    files = StaticFiles([path])
    files.read()
    parsed = list[int]()
    manifests = static.manifests
    monkeypatch.setattr(static, "manifests", lambda document: parsed.append(document.line) or manifests(document))
    path.write_text("# moved by a line\n" + path.read_text().replace("s7", "s77"))
    assert "s77" in names(files.read())
    assert parsed == [1, 7 * 11 + 1]
