"""Idled services in `userspace-proxy local`: what it shows, what it says, and what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, service
from userspace_proxy.core.model import ServicePortName
from userspace_proxy.local import FileSource
from userspace_proxy.sources.cluster import ClusterSource
from userspace_proxy.sources.kubeconfig import Access

from .conftest import RunLocal, RunToEnd, free_port, manifest


def idled(port: int, *, annotation: str = 'userspace-proxy.dev/wake-on-connect: "true"') -> str:
    """Return a Service without endpoints that has an annotation."""
    return manifest("web", port, []).replace("namespace: shop", f"namespace: shop, annotations: {{{annotation}}}", 1)


@pytest.mark.parametrize(
    "annotation",
    ['userspace-proxy.dev/wake-on-connect: "true"', 'idling.alpha.openshift.io/idled-at: "2026-01-31T12:00:00Z"'],
)
async def test_the_table_says_which_services_are_idled(local: RunLocal, tmp_path: Path, annotation: str) -> None:
    (tmp_path / "shop.yaml").write_text(idled(free_port(), annotation=annotation))
    async with local("-f", tmp_path / "shop.yaml") as running:
        assert "none: the first client asks for pods" in running.table


async def test_an_annotation_that_makes_no_sense_is_told(local: RunLocal, tmp_path: Path) -> None:
    text = idled(free_port(), annotation="userspace-proxy.dev/wake-on-connect: maybe")
    (tmp_path / "shop.yaml").write_text(text)
    async with local("-f", tmp_path / "shop.yaml") as running:
        await running.logged(
            "shop/web: annotation userspace-proxy.dev/wake-on-connect: 'maybe' is neither true nor false"
        )
        assert "none: connections are closed" in running.table


async def test_an_annotation_without_quotes_is_refused_with_its_place(run_to_end: RunToEnd, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(idled(free_port(), annotation="userspace-proxy.dev/wake-on-connect: true"))
    ended = await run_to_end("local", "-f", tmp_path / "shop.yaml")
    assert ended.exit_code == 1
    assert "Service shop/web: metadata.annotations: expected text, got true or false (put it in quotes)" in ended.stderr


async def test_there_is_nothing_to_scale_without_a_cluster(run_to_end: RunToEnd, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(idled(free_port()))
    ended = await run_to_end("local", "-f", tmp_path / "shop.yaml", "--wake-scale")
    assert ended.exit_code == 2
    assert "--wake-scale: there is nothing to scale without a cluster" in ended.stderr


def test_with_files_that_pods_are_needed_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    caplog.set_level("INFO")
    FileSource([]).needs_pods(ServicePortName("shop", "web", "main"))
    assert "shop/web:main (TCP): idled, and a client waits for the files to have endpoints" in caplog.text


async def test_with_a_cluster_it_is_asked_for_pods() -> None:
    name = ServicePortName("default", "web")
    async with ApiServer() as api, asyncio.TaskGroup() as tasks, asyncio.timeout(10):
        api.put(service("web", annotations={"userspace-proxy.dev/wake-on-connect": "true"}))
        source = ClusterSource(Access(api.url))
        running = tasks.create_task(source.run())
        snapshot = await anext(source.snapshots())
        assert snapshot.service_ports[name].is_idled
        source.needs_pods(name)
        await api.until(lambda: bool(api.posted))
        running.cancel()
    assert api.posted[0]["message"] == "The service-port web: needs pods."
