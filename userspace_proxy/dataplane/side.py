"""One direction of a relayed connection: from a socket to its peer.

A relayed connection is two `Side`s. Each side owns the direction that leads away from it: what it receives goes to its
peer. A direction *has ended* when its last byte was read and written, and a FIN behind it. A side is *lost* when its
socket takes no more bytes. The survivor of a dead socket is told so, by `parting`, once it has everything.

Nothing is read while the peer has not taken what was read before, which bounds memory and stops a fast sender.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from os import read, write
from typing import TYPE_CHECKING

from userspace_proxy.dataplane.backends import Tally
from userspace_proxy.dataplane.poller import ERROR, HANGUP, READ_HANGUP, URGENT, WRITABLE
from userspace_proxy.dataplane.sockets import borrowed, is_closed
from userspace_proxy.dataplane.splice import SPLICE_FLAGS, Pipe, splice

if TYPE_CHECKING:
    from userspace_proxy.dataplane.relay import Relay

_CHUNK = 64 << 10
_SMALL = 4 << 10
_SPLICE_AFTER = 128 << 10
_READS_PER_TURN = 4
_SPLICE_PER_TURN = 512 << 10
_TURNS_IN_A_ROW = 8
"""Bulk moves in turns, and a stream has some in a row, between which small messages of others pass.

benchmarks/fairness.py: whole rows at once make requests beside 16 streams wait for 20 ms; single turns cost 16 streams
a third of their throughput.
"""


class Side:
    """One socket of a relayed connection, and the direction from it to its peer."""

    __slots__ = (
        "_bulk_from",
        "_fin_came",
        "_is_due",
        "_pipe",
        "_relay",
        "_told",
        "_turns",
        "_unwritten",
        "ended",
        "family",
        "fd",
        "lost",
        "moved",
        "peer",
        "sock",
        "tally",
        "was_reset",
    )

    peer: Side

    def __init__(self, relay: Relay, fd: int, family: int, sock: socket.SocketType | None, tally: Tally) -> None:
        self._relay = relay
        self.fd = fd  # -1 once this side is closed or has left for its parting
        self.family = family
        self.sock = sock  # where there is a socket object for the descriptor, which owns it
        self.tally = tally
        self.moved = 0
        self.ended = self.lost = self.was_reset = False
        self._bulk_from = 0  # what had been moved when the last small message was seen
        self._is_due = False  # waits for a turn
        self._turns = 0  # in a row
        self._fin_came = False  # told of while the socket lived
        self._told = 0  # beyond readability; remembered, as an edge may come while this direction waits
        self._unwritten: memoryview | None = None
        self._pipe: Pipe | None = None

    def on_ready(self, events: int) -> None:
        """The socket has something to read, or room again, or is gone."""
        if events & WRITABLE:
            self.peer._resume()
            if self.fd < 0:
                return
        if events & ~WRITABLE:
            beyond = events & (URGENT | READ_HANGUP | ERROR | HANGUP)
            if beyond:
                self._told |= beyond
                self._fin_came |= beyond & (READ_HANGUP | ERROR | HANGUP) == READ_HANGUP
            self.pump()
            if beyond & ERROR and self.fd >= 0:  # dead, but its peer takes the last words slowly, or never
                self._relay.watch_half_closed(self)

    @property
    def is_dead(self) -> bool:
        """Tell whether the socket is known to have been reset, though its last bytes are not passed on yet."""
        return self.lost or bool(self._told & ERROR)

    def pump(self, *, has_turn: bool = False) -> None:
        """Move bytes to the peer until there are none, or it has no room, or others are due."""
        if self._is_due:
            return
        peer = self.peer
        if peer.lost or self._unwritten is not None or (self._pipe is not None and self._pipe.held):
            return
        if self.ended:
            if self._told & HANGUP:
                self._die_after_end()
            return
        if self.moved - self._bulk_from > _SPLICE_AFTER:
            if not has_turn:
                self._wait_for_turn()
                return
            if not self._told & URGENT and self._take_pipe():
                if self._splice():
                    self._wait_for_turn(in_a_row=True)
                return
        for _ in range(_READS_PER_TURN):
            try:
                data = read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError as error:
                self._die_by_reset(error)
                return
            size = len(data)
            if not size:
                self._end()
                return
            self.moved += size
            self.tally.bytes += size
            try:
                written = write(peer.fd, data)
            except BlockingIOError:
                written = 0
            except OSError as error:
                self._lose_peer(error)
                return
            if written < size:
                self._unwritten = memoryview(data)[written:]
                self._wait_for_room()
                return
            if size < _CHUNK:
                if size < _SMALL:
                    self._bulk_from = self.moved
                if not self._told:  # all is read; but at urgent data a read stops short
                    return
                if self._told == READ_HANGUP:  # only a FIN is behind these bytes: spare the read of it
                    self._end()
                    return
        self._wait_for_turn(in_a_row=True)

    def _wait_for_turn(self, *, in_a_row: bool = False) -> None:
        """Get on with it soon: after others that wait, unless it is in a row of turns that is not over."""
        if not self._is_due:
            self._is_due = True
            self._turns = self._turns + 1 if in_a_row else 0
            self._relay.poller.defer(self._take_turn, first=self._turns % _TURNS_IN_A_ROW != 0)

    def _take_turn(self) -> None:
        self._is_due = False
        if self.fd < 0:  # it comes too late
            return
        if self._pipe is not None and self._pipe.held:
            if not self._write():
                return
            self._relay.poller.resume_reading(self.fd)
        self.pump(has_turn=True)

    def _splice(self) -> bool:
        """Move one pipe full inside the kernel. Return whether there may be more to move now."""
        pipe = self._pipe
        assert pipe is not None
        assert splice is not None
        try:
            size = splice(self.fd, pipe.write_fd, _SPLICE_PER_TURN, flags=SPLICE_FLAGS)
        except BlockingIOError:
            self.give_back_pipe()
            return False
        except OSError as error:
            self._die_by_reset(error)
            return False
        if not size:  # the end, or urgent data before it, which a splice does not get past: a read can tell
            self._told |= URGENT
            self.give_back_pipe()
            return True
        pipe.held = size
        self.moved += size
        self.tally.bytes += size
        if not self._write():
            return False
        if size < _SMALL:  # the bulk is over, so others may have the pipe
            self._bulk_from = self.moved
            self.give_back_pipe()
        return True

    def _write(self) -> bool:
        """Write what is held for the peer. Return whether all of it went; if not, wait for room or lose the peer."""
        try:
            if self._unwritten is not None:
                self._unwritten = self._unwritten[write(self.peer.fd, self._unwritten) :] or None
            elif self._pipe is not None and self._pipe.held:
                assert splice is not None
                self._pipe.held -= splice(self._pipe.read_fd, self.peer.fd, self._pipe.held, flags=SPLICE_FLAGS)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose_peer(error)
            return False
        if self._unwritten is not None or (self._pipe is not None and self._pipe.held):
            self._wait_for_room()
            return False
        return True

    def _wait_for_room(self) -> None:
        self._relay.poller.want_write(self.peer.fd)
        self._relay.poller.pause_reading(self.fd)

    def _resume(self) -> None:
        """The peer has room again: write what waits, then go on reading."""
        if self._pipe is not None and self._pipe.held:
            self._wait_for_turn()
        elif self._unwritten is not None and self._write():
            self._relay.poller.resume_reading(self.fd)
            self.pump()

    def _end(self) -> None:
        """The last byte of this direction was read, and the peer has taken all of them: pass the FIN on."""
        self.ended = True
        self.give_back_pipe()
        peer = self.peer
        if self.was_reset or self._was_reset_unheard():
            self._relay.part(peer, reset=True)
        elif peer.ended:
            self._relay.close(self)
        else:
            self._relay.poller.pause_reading(self.fd)
            peer.shut_down_writing()
            if self.lost or self._told & HANGUP:
                self._relay.part(peer, reset=False)
            else:
                self._relay.watch_half_closed(self)

    def _die_by_reset(self, error: OSError) -> None:
        """Reading failed, so this socket is dead; the peer was given all that came before."""
        self._relay.note_error(self, error)
        self._relay.part(self.peer, reset=True)

    def _die_after_end(self) -> None:
        """This socket died after its FIN. Its own direction stays a clean end; the other has nowhere to go."""
        self._relay.part(self.peer, reset=False)

    def _lose_peer(self, error: OSError) -> None:
        """Writing failed: the peer takes nothing more, but what it sent before still has to reach this side."""
        self._relay.note_error(self.peer, error)
        peer = self.peer
        may_be_second_error = self._pipe is not None and self._pipe.held > 0 and not peer._fin_came
        self._unwritten = None
        self.give_back_pipe()
        if self.lost:
            self._relay.close(self)
        elif peer.ended:
            self._relay.part(self, reset=False)
        else:
            peer.lost = True
            # EPIPE: the peer's FIN had come before it died; or a splice met the reset and kept it to itself.
            peer.was_reset = error.errno != errno.EPIPE or may_be_second_error
            self._relay.poller.pause_reading(self.fd)
            self._relay.watch_half_closed(self)
            peer.pump()

    def _was_reset_unheard(self) -> bool:
        """Tell whether what looks like a FIN is a reset that a splice to this socket met and did not report.

        A splice that has moved something before the error returns that, and the error is gone: reads then return 0.
        """
        pipe = self.peer._pipe
        return pipe is not None and pipe.held > 0 and not self._fin_came and is_closed(self.fd, self.family)

    def shut_down_writing(self) -> None:
        """Send a FIN. A socket that is dead already ignores it: its death shows by itself."""
        with contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_WR)
            else:
                with borrowed(self.fd, self.family) as sock:
                    sock.shutdown(socket.SHUT_WR)

    def release(self) -> int:
        """Give up all that this side holds and return its descriptor, which the caller closes or keeps."""
        fd, self.fd = self.fd, -1
        self._unwritten = None
        self.give_back_pipe()
        if self.sock is not None:
            self.sock.detach()
        del self.peer
        return fd

    def give_back_pipe(self) -> None:
        if self._pipe is not None:
            assert self._relay.pipes is not None
            self._relay.pipes.give_back(self._pipe)
            self._pipe = None

    def _take_pipe(self) -> bool:
        if self._pipe is None and self._relay.pipes is not None:
            self._pipe = self._relay.pipes.take()
        return self._pipe is not None
