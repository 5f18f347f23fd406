"""The machine and the programs that a result came from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import resource
from pathlib import Path

from userspace_proxy import __version__
from userspace_proxy.bench.processes import split_cpus
from userspace_proxy.bench.results import Environment
from userspace_proxy.bench.scenario import Command, HAProxy, Nginx, ThisProxy

_SYSCTLS = (
    "net/core/somaxconn", "net/core/rmem_max", "net/core/wmem_max", "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem",
    "net/ipv4/tcp_congestion_control", "net/ipv4/tcp_tw_reuse", "net/ipv4/ip_local_port_range", "net/ipv4/udp_mem",
    "net/ipv4/tcp_max_syn_backlog", "fs/pipe-user-pages-soft",
)  # fmt: skip


def describe_environment(*, pin: bool) -> Environment:
    """Return what this machine is."""
    harness, targets = split_cpus(pin=pin)
    return Environment(
        versions={"userspace-proxy": __version__, "python": platform.python_version(), **_library_versions()},
        kernel=f"{platform.system()} {platform.release()}",
        cpu=_first("/proc/cpuinfo", "model name") or platform.processor(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],
        sysctls={name.replace("/", "."): value for name in _SYSCTLS if (value := _read(f"/proc/sys/{name}"))},
        descriptor_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        cpus_of_harness=harness,
        cpus_of_targets=targets,
    )


async def version_of(spec: object) -> str:
    """Return what the program of a target says of its version, in one line; nothing where it says nothing."""
    match spec:
        case ThisProxy():
            return __version__ if not spec.program else await first_line(*spec.program, "--version")
        case HAProxy() | Nginx():
            return await first_line(spec.program, "-v")
        case Command():
            return ""
    return ""


async def first_line(*command: str) -> str:
    """Return the first line that a command prints, wherever."""
    with contextlib.suppress(OSError, TimeoutError):
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(5):
            out, _ = await process.communicate()
        return out.decode(errors="replace").strip().partition("\n")[0]
    return ""


def _library_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("uvloop", "hdrhistogram", "msgspec"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _first(path: str, field: str) -> str:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
