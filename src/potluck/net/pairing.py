"""Bytes of a pairing: one TCP connection that carries messages of a bounded size.

Pairing has a port and a format of its own: whoever calls there is a stranger by definition and
shares nothing with us but, perhaps, a code.  A message is its length in four bytes, then itself.
The length is compared with what the receiver is ready for before a byte of the message is read,
and never more is read than the message has: the rest stays with the kernel.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from potluck.errors import MalformedFrame, PeerLost, from_os_error
from potluck.net.addresses import Address, unmapped
from potluck.net.tcp import connect, prepare

__all__ = ["PAIRING_PORT", "PairingLine", "dial"]

PAIRING_PORT = 29517
"""Where a machine that shows a code listens, if it can: firewalls are opened for a number."""

_LENGTH = struct.Struct(">I")
_PORTION = 4096  # bytes read at a time: what is allocated follows what has really arrived


class PairingLine:
    """A connection that never blocks; whoever owns it waits for it with a selector."""

    def __init__(self, sock: socket.socket) -> None:
        prepare(sock)
        self._sock = sock
        self._input = bytearray()
        self._length: int | None = None  # of the message that is arriving
        self._output = bytearray()
        self.fileno = sock.fileno
        host, port = sock.getpeername()[:2]
        self.peer = Address(unmapped(host), port)

    @property
    def has_output(self) -> bool:
        """Whether something waits for room in the kernel's buffer."""
        return bool(self._output)

    def receive(self, limit: int) -> bytes | None:
        """The next message if it is complete; None until then.

        Raises :class:`MalformedFrame` for one that has more than ``limit`` bytes, and
        :class:`Disconnected` at the end of the connection.
        """
        if self._length is None:
            if not self._fill(_LENGTH.size):
                return None
            (length,) = _LENGTH.unpack(self._input)
            if not 0 < length <= limit:
                raise MalformedFrame(
                    f"A message of {length} bytes was announced where 1 to {limit} are allowed",
                    expected=limit,
                    got=length,
                )
            self._length = length
            self._input.clear()
        if not self._fill(self._length):
            return None
        message = bytes(self._input)
        self._input.clear()
        self._length = None
        return message

    def _fill(self, wanted: int) -> bool:
        """Read until so many bytes are there, without waiting; whether they are."""
        while len(self._input) < wanted:
            try:
                data = self._sock.recv(min(wanted - len(self._input), _PORTION))
            except BlockingIOError:
                return False
            except OSError as error:
                raise from_os_error("The connection broke", error, hint=None) from error
            if not data:
                raise PeerLost("The other side hung up")
            self._input += data
        return True

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as there is room; reading shows if the line broke."""
        self._output += _LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        try:
            while self._output:
                del self._output[: self._sock.send(self._output)]
        except BlockingIOError:
            pass
        except OSError:
            self._output.clear()

    def end(self) -> None:
        """Say that nothing follows."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def drain(self) -> bool:
        """Drop what has arrived; True once the other side has ended too.

        Closing with unread bytes makes the kernel send a reset, which can overtake our last words.
        """
        try:
            # Bounded: somebody who never stops sending must not keep us here.
            return any(not self._sock.recv(_PORTION) for _ in range(16))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close at once."""
        self._sock.close()


def dial(address: Address, deadline: float) -> PairingLine:
    """Connect to a machine that shows a code; ``deadline`` is a monotonic time."""
    try:
        sock = connect(address, deadline)
        try:
            return PairingLine(sock)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be looked up
        raise from_os_error(
            f"No connection to {address}",
            error if isinstance(error, OSError) else OSError(str(error)),
            host=address.host,
            hint="Check that `potluck pair` is waiting there and that no firewall is in between.",
        ) from error
