"""python-iptables is compiled when it is installed, which not every machine can do."""

from __future__ import annotations

import pytest

from userspace_proxy.redirect.libiptc import is_installed

needs_libiptc = pytest.mark.skipif(not is_installed(), reason="python-iptables is not installed: it takes a compiler")
LIBIPTC = pytest.param("libiptc", marks=needs_libiptc)
