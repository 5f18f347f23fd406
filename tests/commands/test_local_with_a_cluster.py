"""`userspace-proxy local --kubeconfig`: the services of a cluster, followed as its pods come and go."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver import ApiServer, endpoint_slice, service

from .conftest import RunLocal, RunToEnd, ask, connection, free_port, until

StartBackends = Callable[[int], Awaitable[list[int]]]


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer(tokens={"secret"}) as server:
        yield server


def write_kubeconfig(path: Path, api: ApiServer, token: str = "secret") -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "test", "cluster": {"server": api.url}},
            {"name": "off", "cluster": {"server": "http://127.0.0.1:1"}},
        ],
        "users": [{"name": "me", "user": {"token": token}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "me"}},
            {"name": "off", "context": {"cluster": "off", "user": "me"}},
        ],
        "current-context": "off",
    }
    path.write_text(json.dumps(document))
    return path


def web(port: int, *, namespace: str = "shop") -> dict[str, Any]:
    return service("web", namespace=namespace, ports=[{"port": port, "protocol": "TCP"}])


def pod(port: int, *, namespace: str = "shop") -> dict[str, Any]:
    return endpoint_slice("web", "127.0.0.1", namespace=namespace, port=port)


async def answers(port: int, backend: int) -> bool:
    try:
        return await ask(port) == b"%d" % backend
    except ConnectionError:
        return False


async def test_a_restarted_pod_is_followed_on_the_same_local_port(
    local: RunLocal, backends: StartBackends, api: ApiServer, tmp_path: Path
) -> None:
    """Case 85."""
    (before, after), port = await backends(2), free_port()
    api.put(web(port))
    api.put(pod(before))
    async with local("--kubeconfig", write_kubeconfig(tmp_path / "config", api), "--context", "test") as running:
        assert running.table.splitlines()[1].split()[:3] == ["shop/web", "TCP", f"127.0.0.1:{port}"]
        assert await ask(port) == b"%d" % before
        async with connection(port) as (reader, _):
            await reader.read(1)
            api.delete("endpointslices", "web-1", "shop")
            await running.logged("no endpoints")
            api.put(pod(after))
            assert await until(lambda: answers(port, after), 5.0) < 5.0
        assert await running.stop() == 0


async def test_a_restarted_api_server_does_not_disturb_traffic_and_is_followed_again(
    local: RunLocal, backends: StartBackends, api: ApiServer, tmp_path: Path
) -> None:
    (before, after), port = await backends(2), free_port()
    api.put(web(port))
    api.put(pod(before))
    async with local("--kubeconfig", write_kubeconfig(tmp_path / "config", api), "--context", "test") as running:
        await api.until(lambda: len(api.open_watches()) == 3)
        await api.stop()
        await running.logged("cannot be reached")
        assert await ask(port) == b"%d" % before
        api.put(pod(after))
        await api.start()
        assert await until(lambda: answers(port, after), 5.0) < 5.0


async def test_only_the_namespaces_asked_for_are_served(
    local: RunLocal, backends: StartBackends, api: ApiServer, tmp_path: Path
) -> None:
    (backend,), one, other = await backends(1), free_port(), free_port()
    for namespace, port in (("one", one), ("other", other)):
        api.put(web(port, namespace=namespace))
        api.put(pod(backend, namespace=namespace))
    config = write_kubeconfig(tmp_path / "config", api)
    async with local("--kubeconfig", config, "--context", "test", "--namespace", "one") as running:
        assert await ask(one) == b"%d" % backend
        assert "other" not in running.table
    assert {each.namespace for each in api.requests} == {"one"}


async def test_a_context_that_does_not_exist_is_named(run_to_end: RunToEnd, api: ApiServer, tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", api)
    ended = await run_to_end("local", "--kubeconfig", config, "--context", "live")
    assert ended.exit_code == 1
    assert f"userspace-proxy: {config}: there is no context 'live' (there are: off, test)\n" in ended.stderr


async def test_a_cluster_without_services_ends_with_a_message(
    run_to_end: RunToEnd, api: ApiServer, tmp_path: Path
) -> None:
    config = write_kubeconfig(tmp_path / "config", api)
    ended = await run_to_end("local", "--kubeconfig", config, "--context", "test")
    assert ended.exit_code == 1
    assert "there is nothing to serve" in ended.stderr


async def test_the_kubernetes_client_is_loaded_for_clusters_only() -> None:
    code = "import sys, userspace_proxy.cli.main; print([m for m in ('kubernetes', 'aiohttp') if m in sys.modules])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0] == b"[]\n"
