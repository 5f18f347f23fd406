"""Node facts, and the wait for them that kube-proxy does."""

from __future__ import annotations

import msgspec
import pytest

from tests.apiserver import ApiServer, node
from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.objects import Node
from userspace_proxy.sources.connection import ApiConnection
from userspace_proxy.sources.kubeconfig import Access
from userspace_proxy.sources.this_node import node_name, observe, wait_for_node


class Sleeps:
    def __init__(self, api: ApiServer, appears_after: int = 99) -> None:
        self.delays: list[float] = []
        self._api = api
        self._appears_after = appears_after

    async def __call__(self, delay_s: float) -> None:
        self.delays.append(delay_s)
        if len(self.delays) == self._appears_after:
            self._api.put(node("this", "192.0.2.1"))


def test_the_name_is_trimmed_and_in_lower_case() -> None:
    assert node_name(" Node-A ", hostname="other") == "node-a"
    assert node_name("  ", hostname="Host.Example\n") == "host.example"
    assert node_name("")
    with pytest.raises(ConfigError, match="the host name is empty"):
        node_name("", hostname=" ")


@pytest.mark.parametrize(
    ("addresses", "ips"),
    [
        ([("ExternalIP", "203.0.113.1"), ("InternalIP", "192.0.2.1")], ("192.0.2.1",)),
        ([("InternalIP", "192.0.2.1"), ("InternalIP", "2001:db8::1")], ("192.0.2.1", "2001:db8::1")),
        ([("InternalIP", "2001:db8::1"), ("ExternalIP", "203.0.113.1")], ("2001:db8::1", "203.0.113.1")),
        ([("InternalIP", "192.0.2.1"), ("InternalIP", "192.0.2.2")], ("192.0.2.1",)),
        ([("Hostname", "this"), ("InternalIP", "this.example"), ("ExternalIP", "203.0.113.1")], ("203.0.113.1",)),
        ([("Hostname", "this")], ()),
    ],
)
def test_internal_addresses_come_before_external_ones(addresses: list[tuple[str, str]], ips: tuple[str, ...]) -> None:
    each = node("this")
    each["status"]["addresses"] = [{"type": type_, "address": address} for type_, address in addresses]
    assert observe(msgspec.convert(each, Node)).ips == ips


def test_a_node_that_is_being_deleted_is_not_eligible() -> None:
    each = node("this", "192.0.2.1")
    assert observe(msgspec.convert(each, Node)).is_eligible
    each["metadata"]["deletionTimestamp"] = "2024-01-01T00:00:00Z"
    assert not observe(msgspec.convert(each, Node)).is_eligible


async def test_a_node_is_waited_for_with_doubling_pauses(api: ApiServer) -> None:
    sleeps = Sleeps(api, appears_after=3)
    async with ApiConnection(Access(api.url), qps=0) as connection:
        found = await wait_for_node(connection, "this", sleep=sleeps)
    assert found is not None
    assert found.ips == ("192.0.2.1",)
    assert sleeps.delays == [1, 2, 4]


async def test_six_tries_are_enough(api: ApiServer) -> None:
    api.put(node("this"))
    sleeps = Sleeps(api)
    async with ApiConnection(Access(api.url), qps=0) as connection:
        assert await wait_for_node(connection, "this", sleep=sleeps) is None
    assert sleeps.delays == [1, 2, 4, 8, 16]
    assert api.count("get", "nodes") == 6
