from __future__ import annotations

import pytest

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.sources.proxy_url import proxy_for

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("url", "no_proxy", "is_direct"),
    [
        ("https://10.1.2.3:6443", "", False),
        ("https://10.1.2.3:6443", "10.0.0.0/8", True),
        ("https://11.1.2.3:6443", "10.0.0.0/8", False),
        ("https://[fd00::1]:6443", "10.0.0.0/8,fd00::/8", True),
        ("https://10.1.2.3:6443", "10.1.2.3", True),
        ("https://10.1.2.3:6443", "10.1.2.3:6443", True),
        ("https://10.1.2.3:6443", "10.1.2.3:443", False),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", True),
        ("https://[fd00::1]:6443", "fd00::1", True),
        ("https://api.corp.example", "corp.example", True),
        ("https://corp.example", "corp.example", True),
        ("https://api.corp.example", ".corp.example", True),
        ("https://corp.example", ".corp.example", False),
        ("https://api.corp.example", "*.corp.example", True),
        ("https://notcorp.example", "corp.example", False),
        ("https://API.Corp.Example", " other , CORP.example ", True),
        ("https://api.example", "*", True),
        ("https://10.1.2.3", "10.0.0.0/99", False),
        ("https://localhost:6443", "", True),
        ("https://127.0.0.1:6443", "", True),
        ("https://[::1]:6443", "", True),
    ],
)
def test_exceptions_count_as_in_go_programs(url: str, no_proxy: str, is_direct: bool) -> None:
    found = proxy_for(url, {"HTTPS_PROXY": PROXY, "NO_PROXY": no_proxy})
    assert found == (None if is_direct else PROXY)


def test_each_scheme_has_a_variable_of_its_own_in_either_case() -> None:
    environ = {"https_proxy": "secure.example:1", "HTTP_PROXY": PROXY}
    assert proxy_for("https://api.example", environ) == "http://secure.example:1"
    assert proxy_for("http://api.example", environ) == PROXY
    assert proxy_for("http://api.example", {}) is None


def test_other_kinds_of_proxies_are_refused() -> None:
    with pytest.raises(ConfigError, match="HTTPS_PROXY: only http and https proxies"):
        proxy_for("https://api.example", {"HTTPS_PROXY": "socks5://proxy.example"})
