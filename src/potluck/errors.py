"""Every error Potluck raises, in one tree.

Each class also derives from the builtin a caller would reach for, carries its facts as fields
(``rank``, ``node``, ``host``, ``expected``, ``got``, ``cause``) and a ``hint`` that says in plain
words what to do next.  ``recoverable`` tells whether the same call may succeed later in the same
process.  Errors of the operating system become ours in one place: :func:`from_os_error`.

What only one part of the library raises is defined there, below a class of this tree:

* ``DistributedError``: ``Cancelled`` (backend.operation), ``MembershipChanged``
  (trust.membership_store), ``DamagedFile``, ``UnsafeFile`` (identity.private_files),
  ``DiscoveryUnavailable`` (discovery.mdns), ``InvalidCode`` (trust.pairing_code),
  ``InvalidNamespaceName``, ``NamespaceExists``, ``UnknownNamespace`` (identity.namespace),
  ``PairingFailed`` (trust.pairing), ``RosterRefused`` (trust.roster_records), ``RpcError`` and
  those below it (rpc.errors), ``ScenarioError`` (testing.scenario), ``WeakPassphrase``
  (identity.namespace)
* ``HandshakeRefused``: ``AnotherNamespace``, ``NodeMismatch`` (net.tls), ``Declined``,
  ``SecretChanged`` (trust.connect), ``RefusedByPeer``, ``RefusedForNow`` (net.opening),
  ``VersionMismatch`` (_version)
* ``IoError``: ``Incomplete`` (training.checkpoint_files), ``NewerFile`` (_version)
* of the command: ``CannotAsk`` (apps.cli.membership), ``NodeFailed`` (apps.cli.demo_story),
  ``UnknownMember`` (apps.cli.membership), ``UnreadableDump`` (apps.cli.trace_analysis)

::

    DistributedError
    ├── InvalidWorldSize      (ValueError)
    ├── InvalidRank           (ValueError)
    ├── SelfSend              (ValueError)
    ├── SizeMismatch          (ValueError)
    ├── CollectiveMismatch    (ValueError)
    ├── UnsupportedOperation  (NotImplementedError)
    ├── BackendUnavailable    (RuntimeError)
    ├── Aborted               (RuntimeError)       recoverable
    │   └── ViewChanged                            recoverable
    │       └── LeftOut                            recoverable
    ├── Timeout               (TimeoutError)       recoverable
    │   └── NoQuorum                               recoverable
    ├── IoError               (OSError)
    ├── MalformedFrame        (ValueError)         the fault of the other side
    └── Disconnected          (ConnectionError)
        ├── ChannelClosed
        ├── NoConnection                           recoverable
        ├── PeerLost                               recoverable
        └── HandshakeRefused
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Any, ClassVar

__all__ = [
    "Aborted",
    "BackendUnavailable",
    "ChannelClosed",
    "CollectiveMismatch",
    "Disconnected",
    "DistributedError",
    "HandshakeRefused",
    "InvalidRank",
    "InvalidWorldSize",
    "IoError",
    "LeftOut",
    "MalformedFrame",
    "NoConnection",
    "NoQuorum",
    "PeerLost",
    "SelfSend",
    "SizeMismatch",
    "Timeout",
    "UnsupportedOperation",
    "ViewChanged",
]

_FIELDS = ("rank", "node", "host", "expected", "got", "cause", "hint")


class DistributedError(Exception):
    """The root of everything Potluck raises.

    The text of an error reads: what happened, then the cause if one is known, then what to do.

    >>> str(DistributedError("The link broke", cause="cable pulled", hint="Plug it in."))
    'The link broke: cable pulled. Plug it in.'
    """

    recoverable: ClassVar[bool] = False
    trace: str | None = None
    """Where what came before was written down, if it was."""

    def __init__(self, message: str, **fields: Any) -> None:
        unknown = fields.keys() - set(_FIELDS)
        if unknown:
            msg = f"{type(self).__name__} has no field {', '.join(sorted(unknown))}"
            raise TypeError(msg)
        super().__init__(message)
        self.message = message
        self.rank: int | None = fields.get("rank")
        self.node: str | None = fields.get("node")
        self.host: str | None = fields.get("host")
        self.expected: Any = fields.get("expected")
        self.got: Any = fields.get("got")
        self.cause: str | None = fields.get("cause")
        self.hint: str | None = fields.get("hint")

    def __str__(self) -> str:
        """One or two sentences for a person."""
        text = self.message
        if self.cause:
            text = f"{text}: {self.cause}"
        if self.hint:
            text = f"{text}{'' if text.endswith(('.', '!', '?')) else '.'} {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the trip through :mod:`multiprocessing` with every field intact."""
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(
    cls: type[DistributedError], args: tuple[Any, ...], state: dict[str, Any]
) -> DistributedError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidWorldSize(DistributedError, ValueError):
    """A group cannot have this many ranks.

    >>> InvalidWorldSize(0).world_size
    0
    """

    def __init__(self, world_size: int, *, minimum: int = 1, hint: str | None = None) -> None:
        super().__init__(
            f"World size {world_size} is not possible; it must be at least {minimum}",
            expected=minimum,
            got=world_size,
            hint=hint,
        )
        self.world_size = world_size


class InvalidRank(DistributedError, ValueError):
    """A rank that the group does not have.

    >>> str(InvalidRank(5, 2))
    'Rank 5 does not exist in a group of 2 (ranks 0 to 1)'
    """

    def __init__(
        self, rank: int, world_size: int, *, message: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(
            message
            or f"Rank {rank} does not exist in a group of {world_size} "
            f"(ranks 0 to {world_size - 1})",
            rank=rank,
            expected=world_size,
            got=rank,
            hint=hint,
        )
        self.world_size = world_size


class SelfSend(DistributedError, ValueError):
    """A message to oneself on a backend that only knows other processes.

    >>> SelfSend(0).message
    'Rank 0 tried to exchange a message with itself'
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} tried to exchange a message with itself",
            rank=rank,
            hint="Copy the data locally, or address another rank.",
        )


class SizeMismatch(DistributedError, ValueError):
    """The message that arrived has another size than the buffer given for it.

    The message is consumed; the next receive gets the next message.

    >>> error = SizeMismatch(expected=4, got=10, rank=1)
    >>> (error.expected, error.got, error.rank)
    (4, 10, 1)
    """

    def __init__(self, expected: int, got: int, *, rank: int | None = None) -> None:
        sender = "A message" if rank is None else f"The message from rank {rank}"
        super().__init__(
            f"{sender} has {got} bytes but the buffer given for it has {expected}",
            rank=rank,
            expected=expected,
            got=got,
            hint="Receive into a buffer of exactly the size that was sent.",
        )


class CollectiveMismatch(DistributedError, ValueError):
    """Two ranks are in the same operation with different ideas of what it is.

    >>> error = CollectiveMismatch("The ranks disagree", rank=1, expected="sum", got="max")
    >>> error.rank, error.expected, error.got
    (1, 'sum', 'max')
    """

    is_heard = False
    """Whether another rank has found it and told this one."""
    odd_one: int | None = None
    """The rank that differs from most ranks, if that is known and this rank does not."""
    ballot: Any = None
    """What the ranks believe, where they were asked."""


class UnsupportedOperation(DistributedError, NotImplementedError):
    """This backend cannot do that.

    >>> isinstance(UnsupportedOperation("No such sum here"), NotImplementedError)
    True
    """


class BackendUnavailable(DistributedError, RuntimeError):
    """The backend is closed, belongs to another process, or cannot run here.

    >>> str(BackendUnavailable("This group is closed", hint="Make a new one."))
    'This group is closed. Make a new one.'
    """


class Aborted(DistributedError, RuntimeError):
    """The operation was ended from outside: by this process, or by another rank.

    >>> error = Aborted("The group was aborted", hint="Call again.")
    >>> error.recoverable, str(error)
    (True, 'The group was aborted. Call again.')
    """

    recoverable = True
    is_final = False
    """Whether the other rank has left the group, or has to, and is not worked with again."""
    is_unclear = False
    """Whether it is not known who is at fault, so that a training tries again by itself."""
    teller: int | None = None
    """The rank that ended the operation, if that rank itself has told this one."""


class ViewChanged(Aborted):
    """Who is in the cluster has changed: what ran among those before has ended, on all of them.

    The next call runs among those who are here now; ranks and the number of them may be others.

    >>> ViewChanged("desk has joined").recoverable
    True
    """


class LeftOut(ViewChanged):
    """The others continue without this process; it waits until they let it in again.

    Nothing is lost here: the next call waits for that, up to its timeout.

    >>> issubclass(LeftOut, ViewChanged), LeftOut("Left out of view 4").recoverable
    (True, True)
    """


class Timeout(DistributedError, TimeoutError):
    """A deadline passed.  Nothing was lost: the same call may be made again.

    >>> Timeout("No message from rank 1 within 0.5 s", seconds=0.5).seconds
    0.5
    """

    recoverable = True

    def __init__(
        self, message: str, *, seconds: float, missing: Iterable[int] = (), **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.seconds = seconds
        self.missing = tuple(missing)


class NoQuorum(Timeout):
    """A deadline passed while too few members of the cluster were in contact to continue.

    ``missing`` has their ranks; the text names them and says since when.

    >>> error = NoQuorum("Waited 5 s, but rank 1 (attic) is missing", seconds=5, missing=[1])
    >>> isinstance(error, TimeoutError), error.missing
    (True, (1,))
    """


class IoError(DistributedError, OSError):
    """The operating system refused something; ``cause`` has its words.

    >>> error = IoError("The key could not be read", cause="Permission denied")
    >>> isinstance(error, OSError), str(error)
    (True, 'The key could not be read: Permission denied')
    """


class MalformedFrame(DistributedError, ValueError):
    """The other side sent bytes that do not follow the protocol.

    >>> MalformedFrame("A frame is too long", expected=64, got=99).got
    99
    """


class Disconnected(DistributedError, ConnectionError):
    """Something between two ranks is not connected, or no longer.

    >>> try:
    ...     raise PeerLost("Rank 1 is gone", rank=1)
    ... except Disconnected as error:
    ...     error.rank
    1
    """


class ChannelClosed(Disconnected):
    """This side closed the channel while an operation was using it.

    >>> isinstance(ChannelClosed("This side closed"), ConnectionError)
    True
    """


class NoConnection(Disconnected):
    """No connection to that rank exists or could be made.

    >>> NoConnection("Rank 2 cannot be reached", rank=2).recoverable
    True
    """

    recoverable = True


class PeerLost(Disconnected):
    """A rank that was here is gone: its process ended, it closed, or its link broke.

    >>> error = PeerLost("Rank 1 is gone", rank=1, host="desk", cause="its process ended")
    >>> error.host, str(error)
    ('desk', 'Rank 1 is gone: its process ended')
    """

    recoverable = True


class HandshakeRefused(Disconnected):
    """The other side answered, and declined, with a sentence saying why.

    >>> HandshakeRefused("It declined", cause="not a member").cause
    'not a member'
    """


_HINTS = {
    errno.EADDRINUSE: "Another process uses this port; stop it or choose another port.",
    errno.EADDRNOTAVAIL: "This address belongs to no interface of this machine.",
    errno.EACCES: "Ports below 1024 need privileges; choose a higher one.",
    errno.ECONNREFUSED: "Nothing listens there; check that rank 0 runs and the port is right.",
    errno.EHOSTUNREACH: "There is no way to that machine; check the network and its firewall.",
    errno.ENETUNREACH: "This machine has no route there; check that it is on the same network.",
    errno.EMFILE: "This process has too many open files; raise the limit with `ulimit -n`.",
}
_UNKNOWN_NAME = "Check the spelling of the machine's name, or give its address in numbers."
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


def describe(error: BaseException) -> str:
    """What an error says, without its number and its hint.

    >>> describe(ConnectionResetError(104, "Connection reset by peer"))
    'Connection reset by peer'
    >>> describe(IoError("The key could not be read", cause="Permission denied", hint="Run: ls"))
    'The key could not be read: Permission denied'
    """
    if isinstance(error, DistributedError):
        return f"{error.message}: {error.cause}" if error.cause else error.message
    if isinstance(error, OSError):
        return error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    return str(error)


def describe_loss(error: BaseException) -> str:
    """What an error on a connection says about the peer, as a clause that begins with "it".

    >>> describe_loss(TimeoutError())
    'it no longer answers (asleep, switched off or unplugged)'
    """
    if isinstance(error, MalformedFrame):
        return f"it sent an invalid message ({error})"
    # A neighbour that is gone shows as unreachable, one behind a router as silent.
    if isinstance(error, TimeoutError) or _is_unreachable(error):
        return "it no longer answers (asleep, switched off or unplugged)"
    if isinstance(error, ConnectionError) and not isinstance(error, DistributedError):
        return "its process ended (it crashed or was killed)"
    return str(error)


def _is_unreachable(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in UNREACHABLE


def from_os_error(action: str, error: OSError, **fields: Any) -> DistributedError:
    """Translate an error of the operating system; ``action`` says what was being done.

    >>> str(from_os_error("Dialling failed", ConnectionResetError(104, "reset")))
    'Dialling failed: reset'
    """
    if isinstance(error, DistributedError):
        return error
    if type(error).__name__ == "gaierror":  # its numbers are others, and differ between systems
        return NoConnection(action, **{"cause": error.strerror, "hint": _UNKNOWN_NAME, **fields})
    fields = {"cause": describe(error), "hint": _HINTS.get(error.errno or 0), **fields}
    if isinstance(error, ConnectionRefusedError | TimeoutError) or _is_unreachable(error):
        return NoConnection(action, **fields)
    if isinstance(error, ConnectionError):
        return PeerLost(action, **fields)
    return IoError(action, **fields)
