"""Bytes of a pairing: one TCP connection that carries messages of a bounded size.

Pairing has a port and a format of its own: a caller is a stranger by definition and shares nothing
with us but, perhaps, a code.  A message is its length in four bytes, then itself.
The length is compared with what the receiver is ready for before a byte of the message is read,
and never more is read than the message has: the rest stays with the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import queue
import re
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from potluck import _process
from potluck._process import Closing
from potluck.discovery.mdns import LOOPBACK, open_zeroconf, scoped, unavailable, unscoped
from potluck.errors import DistributedError, MalformedFrame, PeerLost, from_os_error
from potluck.logs import get_logger
from potluck.net.addresses import Address, unmapped, usable_hosts
from potluck.net.tcp import connect, listen, prepare

if TYPE_CHECKING:
    from zeroconf import ServiceBrowser


PAIRING_PORT = 29517
"""Where a machine that shows a code listens, if it can: firewalls are opened for a number."""

_LENGTH = struct.Struct(">I")
_PORTION = 4096  # bytes read at a time: what is allocated follows what has really arrived


class PairingLine:
    """A connection that never blocks; its owner waits for it with a selector."""

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
        """Read up to ``wanted`` bytes without waiting; whether all of them are there."""
        while len(self._input) < wanted:
            try:
                data = self._sock.recv(min(wanted - len(self._input), _PORTION))
            except BlockingIOError:
                return False
            except OSError as error:
                raise from_os_error("The connection broke", error, hint=None) from error
            if not data:
                raise PeerLost("The other side closed the connection")
            self._input += data
        return True

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as there is room; reading shows a broken connection."""
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
        """Tell the other side that nothing follows."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def drain(self) -> bool:
        """Drop what has arrived; True once the other side has ended too.

        Closing with unread bytes makes the kernel send a reset, which can overtake what we sent.
        """
        try:
            # Bounded: a peer that never stops sending must not keep us here.
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


# --------------------------------------------------------------------------------------------------
# How the two machines of a pairing find each other: a line in the local network's own directory.
#
# A machine that shows a code announces its number (the 7 of ``7-guitar-harbor``), the version of
# the pairing protocol and a port, by multicast DNS under a service type of pairing's own.  Neither
# the words nor a name nor an id is in it.  Any machine may answer for any number; a false answer
# leads to a stranger that does not know the code, and the searching side limits how many it tries.
#
# zeroconf brings its own threads and event loop; they begin and end with :class:`PairingDiscovery`.

SERVICE = "_potluck-pair._tcp.local."
MAX_ANSWERS = 64
"""Different answers that are looked at; a flood of them must cost no more than that."""

MAX_HOSTS = 6
"""Addresses of one answer that are tried: more would let it point us at a whole network."""

_RESOLVE = 1.5  # seconds to learn address and port of a machine that has just answered
_HINT = "Give the address of the other machine: potluck pair CODE --host ADDRESS"
_LABEL = re.compile(r"(?P<slot>[0-9]{1,2})-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class PairingOffer:
    """A machine that claims to show the code with this number."""

    slot: int
    addresses: tuple[Address, ...]


class PairingDiscovery(Closing):
    """Announces and searches codes in the local network, until closed; a context manager.

    Raises :class:`DiscoveryUnavailable` where there is no multicast.
    """

    def __init__(self) -> None:
        self._zeroconf = open_zeroconf(usable_hosts() or [LOOPBACK], hint=_HINT)
        self._browser: ServiceBrowser | None = None
        self._answers = _Answers()

    def announce(self, slot: int, port: int, version: int) -> None:
        """Tell the network, until closed, that the code with this number is shown here."""
        from zeroconf import Error, ServiceInfo

        token = secrets.token_hex(6)
        info = ServiceInfo(
            SERVICE,
            f"{slot}-{token}.{SERVICE}",
            port=port,
            properties={"slot": str(slot), "v": str(version)},
            server=f"potluck-{token}.local.",  # not this machine's own name
            parsed_addresses=[unscoped(host) for host in usable_hosts() or [LOOPBACK]],
        )
        try:
            # The name is random: asking the network whether it is taken would cost time.
            self._zeroconf.register_service(info, cooperating_responders=True)
        except (Error, OSError) as error:
            raise unavailable(error, _HINT) from error

    def slots(self, seconds: float) -> set[int]:
        """The numbers that other machines show, as far as they answer within this time."""
        self._browse()
        deadline = time.monotonic() + seconds
        found = set()
        while (label := self._answers.next_label(deadline)) is not None:
            found.add(int(label[1]["slot"]))
        return found

    def find(self, slot: int, seconds: float) -> PairingOffer | None:
        """The next machine that answers for this number, each once; None if none does in time."""
        self._browse()
        deadline = time.monotonic() + seconds
        while (label := self._answers.next_label(deadline)) is not None:
            name, parts = label
            if int(parts["slot"]) == slot and (found := self._resolve(name, slot)) is not None:
                return found
            if time.monotonic() >= deadline:  # a flood of answers leading nowhere ends too
                break
        return None

    def close(self) -> None:
        """Take back what was announced, and end every thread."""
        if self._browser is not None:
            self._browser.cancel()
            self._browser = None
        self._zeroconf.close()

    def _browse(self) -> None:
        if self._browser is None:
            from zeroconf import ServiceBrowser

            self._browser = ServiceBrowser(self._zeroconf, SERVICE, [self._answers])

    def _resolve(self, name: str, slot: int) -> PairingOffer | None:
        from zeroconf import ServiceInfo

        info = ServiceInfo(SERVICE, name)
        if not info.request(self._zeroconf, _RESOLVE * 1000) or not info.port:
            return None
        if info.properties.get(b"slot") != str(slot).encode():
            return None
        hosts = [scoped(host) for host in info.parsed_scoped_addresses()][:MAX_HOSTS]
        return PairingOffer(slot, tuple(Address(host, info.port) for host in hosts))


class _Answers:
    """Collects the names that answer, on zeroconf's thread, for the searching one."""

    def __init__(self) -> None:
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seen: set[str] = set()

    def __call__(self, *, name: str, **_details: Any) -> None:
        """A machine answered, or changed or withdrew its answer; dialling will tell which."""
        if name not in self._seen and len(self._seen) < MAX_ANSWERS:
            self._seen.add(name)
            self._names.put(name)

    def next_label(self, deadline: float) -> tuple[str, re.Match[str]] | None:
        """The next name of ours that answered; None when the time is over."""
        while True:
            try:
                name = self._names.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if label := _LABEL.fullmatch(name.removesuffix(f".{SERVICE}")):
                return name, label


# --------------------------------------------------------------------------------------------------
# The listener that is open while a code is shown: strangers come, few at a time.
#
# There are a few places.  A new caller that finds none takes that of the caller that has been
# silent for longest: one of its own address if that has its share already, else any.  A crowd that
# only connects therefore keeps out no caller that sends something.  How long a caller may take is
# decided by the user of this class; nothing here waits for a caller.

logger = get_logger(__name__)

PLACES = 8
PER_ADDRESS = 4
"""Of the places, how many one address may have."""

LINGER = 1.0
"""Seconds in which a caller that we hang up on may read our last message."""

LEAVING = 16
"""How many such callers there may be at once."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A machine has connected; ``link`` is the number of the connection from now on."""

    link: int
    peer: Address


@dataclass(frozen=True, slots=True)
class Received:
    """A message came in."""

    link: int
    message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Closed:
    """A call has ended, and not because we hung up."""

    link: int
    reason: str


Event: TypeAlias = Connected | Received | Closed


@dataclass(slots=True)
class _Call:
    link: int
    line: PairingLine
    spoke: bool = False
    leaving_until: float | None = None


class PairingListener(Closing):
    """Listens until closed; used as a context manager, by one thread."""

    def __init__(self, *, port: int = PAIRING_PORT, places: int = PLACES) -> None:
        self._listener = _listen(port)
        self._places = places
        self._selector = selectors.DefaultSelector()
        _process.track(self._selector)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # in order of arrival
        self._leaving: dict[int, _Call] = {}

    @property
    def port(self) -> int:
        """The port callers use."""
        return int(self._listener.getsockname()[1])

    def wait(self, timeout: float, limit: Callable[[int], int]) -> list[Event]:
        """What happens next, or nothing after ``timeout`` seconds.

        ``limit`` says how long the next message of a call may be.  At most one message of each call
        is returned at a time, since the limit may depend on the one before.
        """
        events: list[Event] = []
        is_ringing = False
        for key, mask in self._selector.select(max(0.0, timeout)):
            call: _Call | None = key.data
            if call is None:
                is_ringing = True
            elif call.link in self._leaving:
                self._see_off(call)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._flush(call)
                if mask & selectors.EVENT_READ:
                    events += self._read(call, limit(call.link))
        if is_ringing:  # last, and one at a time: a caller is heard before it has to make room
            events += self._accept()
        self._expire()
        return events

    def send(self, link: int, message: bytes) -> None:
        """Send a message; nothing happens if the call has ended meanwhile."""
        call = self._calls.get(link)
        if call is not None:
            call.line.send(message)
            self._watch(call)

    def hang_up(self, link: int) -> None:
        """End a call as soon as what was sent is out."""
        call = self._calls.pop(link, None)
        if call is None:
            return
        while len(self._leaving) >= LEAVING:
            self._forget(next(iter(self._leaving.values())))
        call.leaving_until = time.monotonic() + LINGER
        self._leaving[link] = call
        self._see_off(call)

    def finish(self) -> None:
        """Stop answering, and let those who were hung up on read our last message."""
        self._stop_listening()
        for call in list(self._calls.values()):
            self._forget(call)
        while self._leaving:
            nearest = min(call.leaving_until or 0.0 for call in self._leaving.values())
            for key, _ in self._selector.select(max(0.0, nearest - time.monotonic())):
                self._see_off(key.data)
            self._expire()

    def close(self) -> None:
        """Close everything at once."""
        self._stop_listening()
        for call in [*self._calls.values(), *self._leaving.values()]:
            self._forget(call)
        self._selector.close()

    # --- callers ---

    def _accept(self) -> list[Event]:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return []
        except OSError as error:
            logger.warning("could not accept a connection: %s", error)
            time.sleep(0.05)  # out of descriptors, most likely: without a pause this would spin
            return []
        _process.track(sock)
        try:
            line = PairingLine(sock)
        except OSError:  # gone already
            sock.close()
            return []
        try:
            events: list[Event] = list(self._make_room(line.peer.host))
        except _Full:
            logger.info("hung up on %s: too many callers at once", line.peer)
            line.close()
            return []
        call = _Call(next(self._numbers), line)
        self._calls[call.link] = call
        self._selector.register(line, selectors.EVENT_READ, call)
        return [*events, Connected(call.link, line.peer)]

    def _make_room(self, host: str) -> list[Closed]:
        """End the call that has to give way to one from ``host``, if there is need."""
        calls = list(self._calls.values())
        same = [call for call in calls if call.line.peer.host == host]
        if len(same) >= PER_ADDRESS:
            crowd = same
        elif len(calls) >= self._places:
            crowd = calls
        else:
            return []
        silent = [call for call in crowd if not call.spoke]
        if not silent:
            raise _Full
        self._forget(silent[0])
        return [Closed(silent[0].link, "It sent nothing and had to make room for another caller.")]

    def _read(self, call: _Call, limit: int) -> list[Event]:
        try:
            message = call.line.receive(limit)
        except DistributedError as error:
            self._forget(call)
            return [Closed(call.link, str(error))]
        if message is None:
            return []
        call.spoke = True
        return [Received(call.link, message)]

    # --- writing and leaving ---

    def _flush(self, call: _Call) -> None:
        call.line.flush()
        self._watch(call)

    def _watch(self, call: _Call) -> None:
        write = selectors.EVENT_WRITE if call.line.has_output else 0
        self._selector.modify(call.line, selectors.EVENT_READ | write, call)

    def _see_off(self, call: _Call) -> None:
        """Continue to end a call: first our message, then our end, then theirs."""
        self._flush(call)
        if not call.line.has_output:
            call.line.end()
        if call.line.drain():
            self._forget(call)

    def _expire(self) -> None:
        now = time.monotonic()
        for call in list(self._leaving.values()):
            if call.leaving_until is not None and call.leaving_until <= now:
                self._forget(call)

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.link, None)
        self._leaving.pop(call.link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(call.line)
        call.line.close()

    def _stop_listening(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()


class _Full(Exception):
    """No caller has to make room."""


def _listen(port: int) -> socket.socket:
    """Listen on this port; on any other if it is taken."""
    try:
        return listen("", port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not port:
            raise from_os_error(f"Could not listen on port {port}", error) from error
    return _listen(0)
