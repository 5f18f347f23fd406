"""The topology, made anew for each test, with two backends in it; the test's process is on the node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.conftest import require_namespaces
from tests.netns import topology as topology_module
from tests.netns.services import BACKEND_PORT
from tests.netns.topology import ADDRESSES, Topology
from tests.netns.traffic import backend
from userspace_proxy.core.model import IPFamily
from userspace_proxy.redirect.opening import BackendChoice


@pytest.fixture
def topology() -> Iterator[Topology]:
    require_namespaces()
    with ExitStack() as stack:
        made = stack.enter_context(topology_module.topology())
        for family in IPFamily:
            for number, pod in enumerate(made.pods):
                address = ADDRESSES[family].pods[number]
                stack.enter_context(backend(pod, address, BACKEND_PORT, f"p{number + 1}"))
        stack.enter_context(made.node.entered())
        yield made


@pytest.fixture(params=[BackendChoice.NFT, BackendChoice.LEGACY], ids=str)
def variant(request: pytest.FixtureRequest) -> BackendChoice:
    return BackendChoice(request.param)


@pytest.fixture(params=list(IPFamily), ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> IPFamily:
    return IPFamily(request.param)
