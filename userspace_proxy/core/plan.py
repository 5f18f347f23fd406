"""What has to be done to get from what runs to what is wanted, as data, in an order that interrupts nobody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

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

    @property
    def making(self) -> Plan:
        """The steps after which all that is wanted runs."""
        return replace(self, close=(), remove=())

    @property
    def breaking(self) -> Plan:
        """The steps that take away what is not wanted any more."""
        return Plan(close=self.close, remove=self.remove)

    def __bool__(self) -> bool:
        return bool(self.release or self.update or self.open or self.close or self.remove)


def diff(running: Snapshot, desired: Snapshot) -> Plan:
    """Return the plan that turns `running` into `desired`. Whole service ports are compared: no field is forgotten."""
    before, after = running.service_ports, desired.service_ports
    # What did not change is mostly the same object at the same place, which is far cheaper to see than to look up.
    pairs = [(old, new) for old, new in zip_longest(before.values(), after.values()) if old is not new]
    changed = [new for _, new in pairs if new is not None and before.get(new.name) != new]
    removed = [old.name for old, _ in pairs if old is not None and old.name not in after]

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
