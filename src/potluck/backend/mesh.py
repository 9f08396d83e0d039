"""The mesh: one rank with a link to every other, and the pump that moves their bytes.

No thread belongs to it.  Whoever waits for an operation runs the pump; see
:class:`~potluck.backend.operation.Turns`.  A mesh does not know how its links came about:
:mod:`potluck.backend.tcp` dials them, :mod:`potluck.backend.simulated` makes them in memory.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from typing import TYPE_CHECKING

from potluck.backend.base import WORLD, Backend, read_view, write_view
from potluck.backend.correspondence import Correspondence
from potluck.backend.endings import close_at_exit, left_to_parent
from potluck.backend.gates import LAST_WORDS, BarrierWait, Gates
from potluck.backend.inbox import Inbox
from potluck.backend.limits import ANNOUNCE_AFTER, COURTESY_AFTER, Limits
from potluck.backend.link import Link
from potluck.backend.losses import Interrupted, LostByAnother, SaidGoodbye, peer_lost
from potluck.backend.message import Receive, Sender
from potluck.backend.operation import DONE, Operation, Turns, finish_all
from potluck.backend.outbox import Outbox, Send
from potluck.backend.spin import Spin
from potluck.errors import ChannelClosed, DistributedError, MalformedFrame, NoConnection
from potluck.net import descriptors
from potluck.net.frames import Kind, encode

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable, Sequence  # type: ignore[attr-defined]

    from potluck.net.sealing import Opener, Sealer
    from potluck.net.transport import Poller, Stream

__all__ = ["MeshBackend"]

LOOK_AFTER = LAST_WORDS / 2
"""Seconds between two looks of a barrier at who is lost; with their last words, below 0.1."""

LINGER = 1.0
"""Seconds :meth:`MeshBackend.close` waits for what was sent to reach its peers."""


class MeshBackend(Backend):
    """A rank in a full mesh of links."""

    def __init__(
        self, rank: int, world_size: int, poller: Poller, limits: Limits | None = None
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._poller = poller
        self._limits = limits or Limits()
        self._links: dict[int, Link] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._senders: dict[int, Sender] = {}
        self._inbox = Inbox(rank, self, self._limits)
        self._gates = Gates(rank, world_size, self._tell, self._loss_of)
        self._turns = Turns(self._pump, poller.wake)
        self._spin = Spin()
        self._closed: DistributedError | None = None
        self._ending = threading.Lock()  # whoever gets it ends everything, once
        close_at_exit(self)
        descriptors.on_fork(self)

    @property
    def rank(self) -> int:
        """This process's place, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._world_size

    def add_link(
        self,
        rank: int,
        stream: Stream,
        seal: tuple[Sealer, Opener] | None = None,
        first: bytes = b"",
    ) -> None:
        """Connect to one more rank; ``first`` is what came in before the stream was ours."""
        link = Link(rank, stream, self._poller, seal)
        sender = Sender(rank, link, self._limits.credit)
        outbox = Outbox(self, link, self._limits)
        link.connect(Correspondence(sender, self._inbox, outbox, self._gates), self._limits.eager)
        self._links[rank], self._outboxes[rank], self._senders[rank] = link, outbox, sender
        self._poller.register(stream, rank)
        try:
            link.reader.push(first)
        except (OSError, MalformedFrame) as error:  # it may have said goodbye already
            self._lose(link, error)

    def peer_name(self, rank: int) -> str:
        """Where a rank is, for people."""
        return self._links[rank].stream.peer_name

    # -- the port ----------------------------------------------------------------------------

    def post_send(self, data: Buffer, dst: int, *, tag: int = 0, group: int = WORLD) -> Operation:
        """Start sending."""
        self._check_open()
        self._check_tag(tag)
        outbox = self._outboxes.get(self._check_rank(dst))
        if outbox is not None:
            if outbox.is_short_of_credit:
                self._turns.step(0)
            return outbox.send(read_view(data), group, tag) or DONE
        if dst != self._rank:
            raise self._no_connection(dst)
        send = Send(self, dst, read_view(data), group, tag)
        self._inbox.send_to_myself(send)
        self._turns.stir()  # no bytes move: whoever pumps would not see that its receive is done
        return send

    def post_recv_into(
        self, into: Buffer, src: int, *, tag: int = 0, group: int = WORLD, at_most: bool = False
    ) -> Operation:
        """Start receiving."""
        self._check_open()
        self._check_tag(tag)
        sender = self._senders.get(self._check_rank(src))
        if sender is None and src != self._rank:
            raise self._no_connection(src)
        receive = self._inbox.receive(sender, (group, src, tag), write_view(into), at_most=at_most)
        if sender is None:
            self._turns.stir()  # nor that its send to ourselves is
        return receive

    def has_message(self, src: int, *, tag: int = 0, group: int = WORLD) -> bool:
        """Whether a message waits for a receive."""
        return self._inbox.has_message((group, src, tag))

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """Arrive at a barrier."""
        self._check_open()
        return self._gates.arrive(self, group, members or range(self._world_size))

    def progress(self, timeout: float | None = 0) -> None:
        """Run the pump once, unless another thread does."""
        self._check_open()
        self._turns.step(timeout)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise copy.copy(self._closed)

    def _no_connection(self, rank: int) -> NoConnection:
        return NoConnection(f"Rank {self._rank} has no connection to rank {rank}", rank=rank)

    # -- driving operations --------------------------------------------------------------------

    def drive(self, operation: Operation, deadline: float | None) -> bool:
        """Pump or sleep until an operation is done or its deadline has passed."""
        if isinstance(operation, Send):
            while not operation.granted:
                if self._wait_briefly(operation, deadline, COURTESY_AFTER):
                    return operation.done
                self._inbox.take_offers()
        elif isinstance(operation, BarrierWait):
            return self._drive_barrier(operation, deadline)
        return self._turns.wait(operation, deadline)

    def _drive_barrier(self, operation: BarrierWait, deadline: float | None) -> bool:
        now, is_told = time.monotonic(), False
        patience = ANNOUNCE_AFTER if deadline is None else min(ANNOUNCE_AFTER, (deadline - now) / 4)
        while not self._wait_briefly(operation, deadline, LOOK_AFTER):
            if not is_told and time.monotonic() >= now + patience:
                self._gates.announce(operation)
                is_told = True
            self._gates.tick()
        return operation.done

    def _wait_briefly(self, operation: Operation, deadline: float | None, pause: float) -> bool:
        """Wait at most ``pause``; True when there is nothing more to wait for."""
        now = time.monotonic()
        if deadline is not None:
            pause = min(pause, (deadline - now) / 4)  # leave time for what comes after
        return self._turns.wait(operation, now + pause) or pause <= 0

    def give_up(self, operation: Operation) -> None:
        """Free an operation's buffer."""
        if isinstance(operation, BarrierWait):
            self._gates.give_up(operation)
            return
        with self._turns.standstill():
            if isinstance(operation, Receive):
                self._inbox.give_up(operation)
            elif isinstance(operation, Send) and operation.outbox is not None:
                operation.outbox.recall(operation)
            elif isinstance(operation, Send):
                self._inbox.recall_from_myself(operation)

    # -- the pump --------------------------------------------------------------------------------

    def _pump(self, timeout: float | None) -> None:
        """Wait for bytes to move, and move them.  Only the thread whose turn it is."""
        self._check_open()
        events = self._poller.wait(0) if timeout == 0 else self._spin.look(self._poller)
        if not events and timeout != 0 and not self._turns.is_called:
            events = self._poller.wait(timeout)  # unless our looks have spent somebody's wake-up
        for rank, readable, writable in events:
            link = self._links[rank]
            try:
                if writable:
                    with link.lock:
                        link.writer.flush()
                if readable:
                    link.reader.read()
            except (OSError, MalformedFrame) as error:
                self._lose(link, error)
            except BaseException:  # Ctrl-C: how far it got, nobody knows
                self._lose(link, Interrupted())
                raise

    def _tell(self, rank: int, kind: Kind, group: int, number: int, piece: int) -> None:
        link = self._links.get(rank)
        if link is not None:
            link.tell(encode(kind, group=group, epoch=link.epoch, operation=number, piece=piece))

    # -- endings -----------------------------------------------------------------------------------

    def _lose(self, link: Link, reason: Exception) -> None:
        """A link is over: end what depends on it and stop watching it."""
        error = peer_lost(link.rank, self.peer_name(link.rank), reason)
        self._poller.unregister(link.stream)
        self._end_link(link, error)
        self._gates.lose(link.rank, parted=isinstance(reason, SaidGoodbye))
        link.stream.close()

    def _end_link(self, link: Link, error: DistributedError) -> None:
        finish_all(self._outboxes[link.rank].lose(error), error)
        finish_all(self._inbox.lose(self._senders[link.rank]), error)

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank is gone, if it is."""
        link = self._links.get(rank)
        return self._closed if link is None else link.lost or self._closed

    def _loss_of(self, rank: int) -> DistributedError:
        return self.loss_of(rank) or peer_lost(rank, self.peer_name(rank), LostByAnother())

    def close(self) -> None:
        """Say goodbye, let what was sent arrive, and end everything that still waits here."""
        if self._closed is not None:
            return
        self._turns.refuse_nesting()
        self._prepare_to_close()
        deadline = time.monotonic() + LINGER
        self._gates.part()
        for link in self._links.values():
            link.tell(encode(Kind.GOODBYE, epoch=link.epoch))
        writers = [link.writer for link in self._links.values()]
        with contextlib.suppress(DistributedError):  # another thread closes too, and was faster
            while time.monotonic() < deadline and not all(writer.is_idle for writer in writers):
                if not self._turns.step(0.01):
                    time.sleep(0.001)  # another thread pumps
        with self._turns.standstill():
            if self._ending.acquire(blocking=False):  # otherwise another thread was faster
                closed = ChannelClosed(f"Rank {self._rank} has closed this backend")
                self._end(closed, lambda stream: stream.finish(deadline))

    def abort(self, error: DistributedError) -> None:
        """End every operation with ``error``, at once and for good; from any thread."""
        if self._closed is None and self._ending.acquire(blocking=False):
            self._closed = error  # whoever pumps finds it, and lets go
            self._interrupt()
            for link in self._links.values():
                link.tell(encode(Kind.GOODBYE, epoch=link.epoch))
            with self._turns.standstill():
                self._end(error, lambda stream: stream.finish(0.0))  # waits for nobody

    def _interrupt(self) -> None:
        """Wake those who wait elsewhere than in the pump, so that they find what has ended them."""

    def _end(self, error: DistributedError, part: Callable[[Stream], None]) -> None:
        self._closed = error
        links = [link for link in self._links.values() if link.lost is None]
        for link in links:
            self._end_link(link, error)
        self._inbox.end(error)
        self._gates.end(error)
        for link in links:
            self._poller.unregister(link.stream)
            part(link.stream)
        self._poller.close()

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, and nothing here may be used."""
        self._closed = left_to_parent(self._rank)
