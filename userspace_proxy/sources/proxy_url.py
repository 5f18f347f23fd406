"""Which HTTP proxy stands between us and a URL: the environment's answer, by the rules of Go programs.

Unlike Python's own reading of NO_PROXY, networks such as `10.0.0.0/8` count, and loopback addresses never have a proxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from userspace_proxy.core.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}


def proxy_for(url: str, environ: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy to use for `url`, or None for a direct connection.

    Raises ConfigError for a proxy that is neither http nor https.
    """
    parts = urlsplit(url)
    variable = f"{parts.scheme}_proxy"
    proxy = environ.get(variable.upper()) or environ.get(variable) or ""
    host, port = (parts.hostname or "").rstrip("."), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    if not proxy or _is_loopback(host):
        return None
    if _is_excepted(host, port, environ.get("NO_PROXY") or environ.get("no_proxy") or ""):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise ConfigError("only http and https proxies are supported", where=variable.upper())
    return proxy


def _address(host: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address(host)
    return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _is_excepted(host: str, port: int, exceptions: str) -> bool:
    return any(_matches(host, port, each.strip().lower()) for each in exceptions.split(",") if each.strip())


def _matches(host: str, port: int, exception: str) -> bool:
    if exception == "*":
        return True
    address = _address(host)
    if "/" in exception:
        with suppress(ValueError):
            network = ip_network(exception, strict=False)
            return address is not None and address.version == network.version and address in network
        return False
    named, named_port = _split_port(exception)
    if named_port is not None and named_port != port:
        return False
    excepted = _address(named)
    if excepted is not None or address is not None:
        return excepted == address
    if named.startswith("*."):
        named = named[1:]
    return host.endswith(named) if named.startswith(".") else host == named or host.endswith(f".{named}")


def _split_port(text: str) -> tuple[str, int | None]:
    """Return the host and the port of `host:port`, `[::1]:port` or a bare host or address."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    return host, int(port) if port.isdigit() else None
