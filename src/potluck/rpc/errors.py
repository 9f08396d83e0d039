"""The errors of remote calls, in one tree.

::

    RpcError                        (DistributedError)
    ├── RpcFunctionNotFound         (LookupError)   nothing of that name is registered there
    ├── RpcInvalidMessage           (MalformedFrame)
    │   └── RpcTooLarge                             over the limit, noticed before any allocation
    ├── RpcNoConnection             (NoConnection)  recoverable
    ├── RpcTimeout                  (Timeout)       recoverable
    ├── RpcBusy                                     recoverable: no worker of the other rank is free
    ├── RpcCancelled                                recoverable
    ├── RpcRemoteError                              the function itself raised
    └── RpcInternal                                 a fault of ours
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from potluck.errors import DistributedError, MalformedFrame, NoConnection, Timeout

LONG_NAME = 256
"""Characters of a name; longer ones are shortened in errors."""


class RpcError(DistributedError):
    """A remote call did not return a value.

    >>> str(RpcError("rank 1 did not answer", rank=1, hint="Ask again."))
    'rank 1 did not answer. Ask again.'
    """


class RpcFunctionNotFound(RpcError, LookupError):
    """The other rank has no function of that name.

    >>> str(RpcFunctionNotFound("ad", rank=1, near=["add"]))
    "RPC function not found: ad: function 'ad' not registered on rank 1. Did you mean 'add'?"
    """

    def __init__(self, name: str, *, rank: int, near: Iterable[str] = ()) -> None:
        self.name = name
        self.near = tuple(near)
        name = shortened(name)
        hint = " or ".join(f"'{each}'" for each in self.near)
        super().__init__(
            f"RPC function not found: {name}",
            rank=rank,
            cause=f"function '{name}' not registered on rank {rank}",
            hint=f"Did you mean {hint}?" if hint else None,
        )


class RpcInvalidMessage(RpcError, MalformedFrame):
    """A message that is malformed, or that was not expected.

    >>> str(RpcInvalidMessage("expected request tag 0x01"))
    'invalid RPC message: expected request tag 0x01'
    """

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(f"invalid RPC message: {reason}", **fields)
        self.reason = reason


class RpcTooLarge(RpcInvalidMessage):
    """A message over the limit; nothing of it was sent, or nothing was allocated for it.

    >>> RpcTooLarge(2000, 1000).expected
    1000
    """

    def __init__(
        self, size: int, limit: int, *, what: str = "message", rank: int | None = None
    ) -> None:
        super().__init__(
            f"RPC {what} size {size} exceeds maximum allowed size {limit}",
            expected=limit,
            got=size,
            rank=rank,
            hint="Send less at once, or raise max_message on both ranks.",
        )


class RpcNoConnection(RpcError, NoConnection):
    """The other rank cannot be reached, or has left.

    >>> str(RpcNoConnection(2, cause="its process has ended"))
    'no connection to rank 2: its process has ended'
    >>> str(RpcNoConnection(2, host="attic", cause="its process has ended"))
    'no connection to rank 2 (attic): its process has ended'
    """

    def __init__(self, rank: int | str, *, cause: str | None = None, **fields: Any) -> None:
        """``rank`` is a number, or the name of a node that does not belong to the group."""
        if isinstance(rank, int):
            who, fields["rank"] = f"rank {rank}", rank
            if fields.get("host"):
                who = f"{who} ({fields['host']})"
        else:
            who = f"'{shortened(rank)}'"
        super().__init__(f"no connection to {who}", cause=cause, **fields)


class RpcTimeout(RpcError, Timeout):
    """No answer came in time; whether the function ran is not known.

    >>> RpcTimeout("rank 1 did not answer", seconds=0.5).seconds
    0.5
    """

    def __init__(self, reason: str, *, seconds: float, **fields: Any) -> None:
        super().__init__("RPC timeout", seconds=seconds, cause=reason, **fields)


class RpcBusy(RpcError):
    """Every worker of the other rank is busy; the function did not run.

    >>> RpcBusy("rank 1 is busy").recoverable
    True
    """

    recoverable = True


class RpcCancelled(RpcError):
    """The caller cancelled the call.

    >>> isinstance(RpcCancelled("the call was cancelled"), RpcError)
    True
    """

    recoverable = True


class RpcRemoteError(RpcError):
    """The function raised; see ``remote_type``, ``remote_message`` and ``remote_traceback``.

    >>> str(RpcRemoteError("ValueError", "no such step", "", rank=3))
    'remote RPC error: ValueError on rank 3: no such step'
    """

    def __init__(
        self, remote_type: str, remote_message: str, remote_traceback: str, *, rank: int
    ) -> None:
        super().__init__(
            f"remote RPC error: {remote_type} on rank {rank}", rank=rank, cause=remote_message
        )
        self.remote_type = remote_type
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        if remote_traceback:  # shown below our own traceback
            # Every line begins with the rank, so that none looks like a line of this process.
            lines = remote_traceback.rstrip().split("\n")
            self.add_note("\n".join([f"On rank {rank}:", *(f"[{rank}] {line}" for line in lines)]))


class RpcInternal(RpcError):
    """An internal error of the library.

    >>> str(RpcInternal("a worker ended"))
    'RPC internal error: a worker ended'
    """

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(f"RPC internal error: {reason}", **fields)


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Known names that are similar to ``name``, the most similar first.

    >>> near_names("ech", ["add", "echo"])
    ['echo']
    """
    if len(name) > LONG_NAME:  # comparing takes memory and time for every character
        return []
    return difflib.get_close_matches(name, [each for each in known if len(each) <= LONG_NAME], n=3)


def shortened(name: str) -> str:
    """A name for an error: the beginning of a long one, without control characters.

    >>> shortened("echo"), len(shortened("e" * 1000))
    ('echo', 259)
    """
    if len(name) > LONG_NAME:
        name = f"{name[:LONG_NAME]}..."
    return name if name.isprintable() else ascii(name)[1:-1]
