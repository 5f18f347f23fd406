"""What `local` shows of a service port without endpoints."""

from __future__ import annotations

import pytest

from userspace_proxy.cli.local import print_table
from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePort, ServicePortName
from userspace_proxy.local import Row


@pytest.mark.parametrize(
    ("protocol", "wakes", "shown"),
    [
        (L4Protocol.TCP, False, "none: connections are closed"),
        (L4Protocol.UDP, False, "none: datagrams are dropped"),
        (L4Protocol.TCP, True, "none: the first client asks for pods"),
        (L4Protocol.UDP, True, "none: the first client asks for pods"),
    ],
)
def test_it_says_what_becomes_of_clients(
    capsys: pytest.CaptureFixture[str], protocol: L4Protocol, wakes: bool, shown: str
) -> None:
    name = ServicePortName("shop", "web", "http", protocol)
    print_table([Row(ServicePort(name, 80, wakes_on_connect=wakes), (ListenAddress("127.0.0.1", 80),))])
    assert f"127.0.0.1:80   {shown}" in capsys.readouterr().out
