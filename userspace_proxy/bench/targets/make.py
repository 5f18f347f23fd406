"""From what a scenario says of a target to the target."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import assert_never

from userspace_proxy.bench import scenario
from userspace_proxy.bench.targets.base import Target
from userspace_proxy.bench.targets.others import AddressTarget, CommandTarget, DirectTarget
from userspace_proxy.bench.targets.ours import ThisProxyTarget
from userspace_proxy.bench.targets.peers import HAProxyTarget, NginxTarget


def make_target(spec: scenario.Target, *, directory: Path, cpus: Collection[int], allow_remote: bool) -> Target:
    """Return the target, not started yet. Raises ConfigError for an address that must not be used."""
    match spec:
        case scenario.Direct():
            return DirectTarget(spec)
        case scenario.ThisProxy():
            return ThisProxyTarget(spec, directory=directory, cpus=cpus)
        case scenario.HAProxy():
            return HAProxyTarget(spec, directory=directory, cpus=cpus)
        case scenario.Nginx():
            return NginxTarget(spec, directory=directory, cpus=cpus)
        case scenario.Command():
            return CommandTarget(spec, directory=directory, cpus=cpus)
        case scenario.Address():
            return AddressTarget(spec, allow_remote=allow_remote)
        case _:
            assert_never(spec)
