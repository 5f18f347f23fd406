"""This package's proxy: `userspace-proxy local`, told of endpoints through the file that it watches."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from userspace_proxy.bench.addresses import Address
from userspace_proxy.bench.scenario import ThisProxy
from userspace_proxy.bench.targets.base import HOST, Managed

_SERVICE = "bench"


class ThisProxyTarget(Managed):
    """The proxy as a user runs it."""

    def __init__(self, spec: ThisProxy, *, directory: Path, cpus: Collection[int]) -> None:
        program = spec.program or (sys.executable, "-m", "userspace_proxy")
        super().__init__(spec.name, program, directory=directory, cpus=cpus)
        self._spec = spec
        self._protocols: list[str] = []
        self._backends: list[Address] = []

    def configure(self, backends: Sequence[Address], *, tcp: bool, udp: bool) -> list[str]:
        self._protocols = [protocol for protocol, wanted in (("TCP", tcp), ("UDP", udp)) if wanted]
        self._write(backends)
        return ["local", "-f", str(self._file), "--listen-address", HOST, "--drain-timeout", "0s", *self._spec.options]

    async def set_endpoints(self, backends: Sequence[Address]) -> None:
        self._write(backends)

    def configuration(self) -> str:
        return self._manifest()

    def description(self) -> tuple[str, str]:
        command = ["userspace-proxy"] if not self._spec.program else list(self._spec.program)
        return " ".join([*command, "local", "-f", "services.yaml", *self._spec.options]), self._manifest()

    @property
    def _file(self) -> Path:
        return self.directory / "services.yaml"

    def _write(self, backends: Sequence[Address]) -> None:
        self._backends = list(backends)
        new = self._file.with_suffix(".new")
        new.write_text(self._manifest())
        new.replace(self._file)

    def _manifest(self) -> str:
        """Return a Service and its slices; backends need not share a port, so each port has a slice of its own."""
        ports = [{"name": p.lower(), "port": self.port or 1, "protocol": p} for p in self._protocols]
        spec: dict[str, object] = {"clusterIP": "10.96.0.100", "ports": ports}
        if self.affinity_s is not None:
            seconds = max(1, round(self.affinity_s))
            spec |= {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}
        metadata = {"name": _SERVICE, "namespace": "default"}
        documents: list[dict[str, object]] = [
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
        ]
        for number, (host, port) in enumerate(self._backends, 1):
            labels = {"kubernetes.io/service-name": _SERVICE}
            documents.append(
                {
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {"name": f"{_SERVICE}-{number}", "namespace": "default", "labels": labels},
                    "addressType": "IPv6" if ":" in host else "IPv4",
                    "endpoints": [{"addresses": [host], "conditions": {"ready": True}}],
                    "ports": [{"name": p.lower(), "port": port, "protocol": p} for p in self._protocols],
                }
            )
        return "\n---\n".join(json.dumps(document, indent=2) for document in documents) + "\n"
