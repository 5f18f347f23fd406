"""What has to be done to get from what runs to what is wanted, as data, in an order that interrupts nobody."""

from __future__ import annotations

from dataclasses import dataclass

from userspace_proxy.core.model import L4Protocol, ListenAddress, ServicePort, ServicePortName, Snapshot

Listening = tuple[ServicePortName, ListenAddress]


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order in which they are to be carried out.

    `release`: listeners to close first, because `open` claims their very port for another service port.
    `update`: service ports that are new or differ in any way; their balancers take over the new endpoints.
    `open`: listeners to open. `close`: listeners to close, after all others stand. `remove`: service ports that go.
    """

    release: tuple[Listening, ...] = ()
    update: tuple[ServicePort, ...] = ()
    open: tuple[Listening, ...] = ()
    close: tuple[Listening, ...] = ()
    remove: tuple[ServicePortName, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.release or self.update or self.open or self.close or self.remove)


def diff(running: Snapshot, desired: Snapshot) -> Plan:
    """Return the plan that turns `running` into `desired`. Whole service ports are compared: no field is forgotten."""
    before, after = running.service_ports, desired.service_ports
    changed = [port for name, port in after.items() if before.get(name) is not port and before.get(name) != port]
    removed = [name for name in before if name not in after]

    opened: list[Listening] = []
    closed: list[Listening] = [(name, address) for name in removed for address in before[name].listen]
    for port in changed:
        listening = before[port.name].listen if port.name in before else ()
        opened += [(port.name, address) for address in port.listen if address not in listening]
        closed += [(port.name, address) for address in listening if address not in port.listen]

    claimed = {_fixed_port(name, address) for name, address in opened if address.port}
    return Plan(
        release=tuple(item for item in closed if _fixed_port(*item) in claimed),
        update=tuple(changed),
        open=tuple(opened),
        close=tuple(item for item in closed if _fixed_port(*item) not in claimed),
        remove=tuple(removed),
    )


def _fixed_port(name: ServicePortName, address: ListenAddress) -> tuple[L4Protocol, int]:
    """Return what two listeners cannot both have. The address is left out: a wildcard excludes each single address."""
    return name.protocol, address.port
