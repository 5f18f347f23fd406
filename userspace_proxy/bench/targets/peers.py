"""HAProxy and nginx, with configurations that make the comparison fair: same endpoints, same ports, nothing logged."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from userspace_proxy.bench.addresses import Address, text_of
from userspace_proxy.bench.scenario import HAProxy, Nginx
from userspace_proxy.bench.targets.base import HOST, Managed

_STREAM_MODULES = ("/usr/lib/nginx/modules/ngx_stream_module.so", "/usr/lib64/nginx/modules/ngx_stream_module.so")
_NEVER_S = 365 * 24 * 3600


class HAProxyTarget(Managed):
    """HAProxy. Endpoints come and go through its runtime interface, without a reload."""

    def __init__(self, spec: HAProxy, *, directory: Path, cpus: Collection[int]) -> None:
        super().__init__(spec.name, (spec.program,), directory=directory, cpus=cpus)
        self._spec = spec
        self._socket = self.directory / "admin.sock"
        self._known: list[Address] = []

    def why_not(self, *, udp: bool, affinity: bool, endpoints_change: bool) -> str | None:
        return "HAProxy has no UDP" if udp else None

    def configure(self, backends: Sequence[Address], *, tcp: bool, udp: bool) -> list[str]:
        self._known = list(backends)
        path = self.directory / "haproxy.cfg"
        path.write_text(self._text())
        return ["-db", "-f", str(path)]

    def configuration(self) -> str:
        return self._text()

    async def set_endpoints(self, backends: Sequence[Address]) -> None:
        commands = []
        for address in backends:
            if address not in self._known:
                self._known.append(address)
                name = f"bench/s{len(self._known)}"
                commands += [f"add server {name} {text_of(address)}", f"set server {name} state ready"]
        for number, address in enumerate(self._known, 1):
            state = "ready" if address in backends else "maint"
            commands.append(f"set server bench/s{number} state {state}")
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        writer.write(("; ".join(commands) + "\n").encode())
        await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _text(self) -> str:
        spec = self._spec
        servers = "\n".join(f"    server s{number} {text_of(a)}" for number, a in enumerate(self._known, 1))
        sticky = ""
        if self.affinity_s is not None:
            sticky = f"    stick-table type ip size 100k expire {round(self.affinity_s * 1000)}ms\n    stick on src\n"
        splice = "    option splice-request\n    option splice-response\n" if spec.splice else ""
        return (
            f"global\n    maxconn 9000\n    nbthread {spec.threads}\n    stats socket {self._socket} level admin\n"
            f"{'    maxpipes 200' if spec.splice else ''}\n"
            "defaults\n    mode tcp\n    timeout connect 5s\n    timeout client 1h\n    timeout server 1h\n"
            f"    retries 3\n    option redispatch 1\n{splice}"
            f"frontend in\n    bind {HOST}:{self.port} backlog 4096\n    default_backend bench\n"
            f"backend bench\n    balance roundrobin\n{sticky}{servers}\n"
        )


class NginxTarget(Managed):
    """nginx with its stream module. Endpoints come and go by a reload."""

    def __init__(self, spec: Nginx, *, directory: Path, cpus: Collection[int]) -> None:
        super().__init__(spec.name, (spec.program,), directory=directory, cpus=cpus)
        self._spec = spec
        self._backends: list[Address] = []
        self._udp = False

    def missing(self) -> str | None:
        return super().missing() or (None if _stream_module() is not None else "nginx's stream module is not installed")

    def configure(self, backends: Sequence[Address], *, tcp: bool, udp: bool) -> list[str]:
        self._backends, self._udp = list(backends), udp
        path = self.directory / "nginx.conf"
        path.write_text(self._text())
        return ["-e", "/dev/null", "-c", str(path)]

    def configuration(self) -> str:
        return self._text()

    async def set_endpoints(self, backends: Sequence[Address]) -> None:
        self._backends = list(backends)
        (self.directory / "nginx.conf").write_text(self._text())
        if self._child is not None:
            self._child.signal(signal.SIGHUP)

    def _text(self) -> str:
        servers = " ".join(f"server {text_of(address)};" for address in self._backends)
        sticky = "hash $remote_addr;" if self.affinity_s is not None else ""
        listen = f"listen {HOST}:{self.port}"
        reuse = "reuseport" if self._spec.workers > 1 else ""
        udp = f"    server {{ {listen} udp; proxy_pass bench; proxy_timeout 10s; }}\n" if self._udp else ""
        return (
            f"load_module {_stream_module()};\nworker_processes {self._spec.workers};\ndaemon off;\n"
            f"pid {self.directory}/nginx.pid;\nerror_log /dev/null;\nworker_rlimit_nofile 19000;\n"
            "events { worker_connections 18000; multi_accept on; }\n"
            "stream {\n"
            f"    upstream bench {{ {sticky} {servers} }}\n"
            f"    server {{ {listen} backlog=4096 {reuse}; proxy_pass bench; proxy_timeout {_NEVER_S}s; }}\n"
            f"{udp}}}\n"
        )


def _stream_module() -> str | None:
    return next((path for path in _STREAM_MODULES if Path(path).exists()), None)
