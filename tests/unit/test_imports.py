"""What the package needs to be there, and what it does not."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_UVLOOP = """
import asyncio, importlib, pkgutil, sys
sys.modules["uvloop"] = None  # importing it raises ImportError
import userspace_proxy
for module in pkgutil.walk_packages(userspace_proxy.__path__, "userspace_proxy."):
    if not module.name.startswith("userspace_proxy.cli"):
        importlib.import_module(module.name)
from userspace_proxy import *

async def main():
    backend = await asyncio.start_server(lambda reader, writer: (writer.write(b"hello"), writer.close()), "127.0.0.1")
    endpoint = Endpoint("127.0.0.1", backend.sockets[0].getsockname()[1])
    name = ServicePortName("default", "web")
    async with Proxy() as proxy:
        await proxy.apply(Snapshot.of(ServicePort(name, 80, (endpoint,), listen=(ListenAddress("127.0.0.1", 0),))))
        address = proxy.addresses(name)[0]
        reader, writer = await asyncio.open_connection(address.address, address.port)
        print((await reader.read()).decode())
        writer.close()
    backend.close()

asyncio.run(main())
"""

FIRST_PICK = """
from userspace_proxy import Endpoint, RoundRobin
balancer = RoundRobin()
balancer.update([Endpoint("10.0.0.1", port) for port in range(1, 51)], None)
print([balancer.pick("10.1.0.1", now=0.0).port for _ in range(5)])
"""


def run(program: str) -> str:
    return subprocess.check_output([sys.executable, "-W", "error", "-c", program], text=True, timeout=30).strip()


def test_the_data_path_works_on_plain_asyncio_where_uvloop_is_missing() -> None:
    assert run(WITHOUT_UVLOOP) == "hello"


def test_fresh_processes_begin_with_endpoints_of_their_own() -> None:
    """cases.md 25"""
    assert len({run(FIRST_PICK) for _ in range(5)}) > 1


ORDINARY_USER = """
import os, resource
from userspace_proxy.node.limits import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
if os.geteuid() == 0:
    os.setuid(65534)
print(raise_descriptor_limit())
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_an_ordinary_user_gets_as_many_descriptors_as_the_hard_limit_allows_and_is_told() -> None:
    """cases.md 14"""
    warning, limits = run(ORDINARY_USER).splitlines()
    assert warning.startswith("at most 4096 files can be open, so about 2048 connections; ")
    assert limits == "4096 4096"
