"""Which local address a datagram was sent to, and how to answer from it.

A wildcard socket answers from whatever address routing prefers, which the client takes for a stranger's. The control
message that came with the datagram says what it asked; a reply that carries it back leaves from there.
"""

from __future__ import annotations

import socket
import struct
import sys

from userspace_proxy.core.model import IPFamily

_IP_PKTINFO = 8  # Linux
_IN_PKTINFO = struct.Struct("=I4s4s")  # interface, local address, destination in the header
_IN6_PKTINFO = struct.Struct("=16sI")  # destination, interface

CONTROL_BYTES = socket.CMSG_SPACE(_IN6_PKTINFO.size)

ControlMessage = tuple[int, int, bytes]


def request_packet_info(sock: socket.socket, family: IPFamily) -> bool:
    """Make the socket report local addresses. Return False where the system cannot."""
    if family is IPFamily.IPV6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        return True
    if sys.platform != "linux":
        return False
    sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    return True


def reply_control(received: list[ControlMessage]) -> ControlMessage | None:
    """Return the control message that makes a reply leave from the address that the datagram was sent to."""
    for level, kind, data in received:
        if level == socket.IPPROTO_IP and kind == _IP_PKTINFO:
            _, local, _ = _IN_PKTINFO.unpack(data)
            return level, kind, _IN_PKTINFO.pack(0, local, b"\0" * 4)
        if level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            destination, interface = _IN6_PKTINFO.unpack(data)
            is_link_local = destination[0] == 0xFE and destination[1] & 0xC0 == 0x80
            return level, kind, _IN6_PKTINFO.pack(destination, interface if is_link_local else 0)
    return None
