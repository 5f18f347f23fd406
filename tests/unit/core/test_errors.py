"""What errors say."""

from __future__ import annotations

from userspace_proxy.core.errors import ConfigError, ListenFailed, PortsRefused
from userspace_proxy.core.model import L4Protocol, ServicePortName

WEB = ServicePortName("shop", "web", "http")
DNS = ServicePortName("kube-system", "dns", "dns", L4Protocol.UDP)


def test_a_fault_of_configuration_names_place_object_field_and_reason() -> None:
    error = ConfigError("is no port", where="shop.yaml:7", subject="Service shop/web", field="spec.ports[0].port")
    assert str(error) == "shop.yaml:7: Service shop/web: spec.ports[0].port: is no port"
    assert str(ConfigError("is empty", where="shop.yaml")) == "shop.yaml: is empty"


def test_all_refused_ports_stand_in_one_message_with_options_to_paste() -> None:
    failures = {
        WEB: (ListenFailed("127.0.0.1:80", "permission denied", "EACCES"),),
        DNS: (ListenFailed("127.0.0.1:5353", "address already in use", "EADDRINUSE"),),
    }
    assert str(PortsRefused(failures, ["shop/web:http=8080", "kube-system/dns:dns/udp=5354"])).splitlines() == [
        "2 service ports cannot be served:",
        "  shop/web:http (TCP) on 127.0.0.1:80: permission denied",
        "  kube-system/dns:dns (UDP) on 127.0.0.1:5353: address already in use",
        "Ports below 1024 need root or the capability CAP_NET_BIND_SERVICE.",
        "Give them other ports (--auto-ports chooses such by itself, --keep-going serves only the rest):",
        "  --port-map shop/web:http=8080 --port-map kube-system/dns:dns/udp=5354",
    ]


def test_privilege_is_mentioned_only_where_it_would_help() -> None:
    refused = PortsRefused({WEB: (ListenFailed("127.0.0.1:8080", "in use", "EADDRINUSE"),)}, [])
    assert str(refused).startswith("1 service port cannot be served:")
    assert "1024" not in str(refused)


def test_no_options_are_offered_where_no_other_port_would_help() -> None:
    failed = ListenFailed("10.0.0.9:80", "cannot assign requested address", "EADDRNOTAVAIL")
    assert str(PortsRefused({WEB: (failed,)}, [])).splitlines() == [
        "1 service port cannot be served:",
        "  shop/web:http (TCP) on 10.0.0.9:80: cannot assign requested address",
    ]
