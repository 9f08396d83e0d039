"""What the frames of one peer mean: a table from kind to action."""

from __future__ import annotations

from collections.abc import Callable

from potluck.backend.gates import Gates
from potluck.backend.inbox import Inbox
from potluck.backend.losses import SaidGoodbye
from potluck.backend.message import Sender
from potluck.backend.outbox import Outbox
from potluck.errors import MalformedFrame
from potluck.net.frames import Header, Kind

__all__ = ["Correspondence"]


class Correspondence:
    """Hands each frame of one peer to whom it concerns.  Only the pump calls this."""

    def __init__(self, sender: Sender, inbox: Inbox, outbox: Outbox, gates: Gates) -> None:
        rank = sender.rank
        self._sender = sender
        self._inbox = inbox
        self._actions: dict[Kind, Callable[[Header], None]] = {
            Kind.EAGER: lambda header: inbox.complete_eager(sender, header),
            Kind.DATA: lambda header: inbox.complete_piece(sender, header),
            Kind.OFFER: lambda header: inbox.complete_offer(sender, header),
            Kind.WITHDRAW: lambda header: inbox.complete_withdrawal(sender, header.operation),
            Kind.GRANT: lambda header: outbox.receive_grant(header.operation, wanted=True),
            Kind.DISCARD: lambda header: outbox.receive_grant(header.operation, wanted=False),
            Kind.CREDIT: lambda header: outbox.receive_credit(header.operation),
            Kind.TOKEN: lambda header: gates.receive(rank, header),
            Kind.ARRIVED: lambda header: gates.receive(rank, header),
            Kind.BROKEN: lambda header: gates.receive(rank, header),
            Kind.GOODBYE: _leave,
        }

    def begin(self, header: Header) -> memoryview:
        """Say where a payload lands."""
        return self._inbox.begin(self._sender, header)

    def complete(self, header: Header) -> None:
        """Act on a frame."""
        action = self._actions.get(header.kind)
        if action is None:
            rank, name = self._sender.rank, header.kind.name
            raise MalformedFrame(f"Rank {rank} sent a {name} frame out of place")
        action(header)

    def complete_small(self, header: Header, payload: memoryview) -> None:
        """Act on a small message."""
        self._inbox.complete_small(self._sender, header, payload)


def _leave(_: Header) -> None:
    raise SaidGoodbye
