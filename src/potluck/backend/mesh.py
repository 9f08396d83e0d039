"""The mesh: one rank with a link to every other, and the pump that moves their bytes.

It has no thread.  A thread that waits for an operation runs the pump; see
:class:`~potluck.backend.operation.PumpLock`.  A mesh does not know how its links came about:
:mod:`potluck.backend.tcp` dials them, :mod:`potluck.backend.simulated` makes them in memory.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from potluck import _process
from potluck._future import deadline_after
from potluck._process import close_at_exit, left_to_parent
from potluck.backend.barrier import Announce, Barrier, BarrierFailed, Effect, Token
from potluck.backend.base import WORLD, Backend, read_view, write_view
from potluck.backend.framing import FrameHandler, PeerConnection
from potluck.backend.messages import (
    ANNOUNCE_AFTER,
    Inbox,
    MessageLimits,
    Outbox,
    SenderState,
    SendOperation,
)
from potluck.backend.operation import DONE, Cancelled, Operation, PumpLock, finish_all
from potluck.errors import (
    ChannelClosed,
    DistributedError,
    InvalidRank,
    MalformedFrame,
    NoConnection,
    PeerLost,
    Timeout,
    describe_loss,
)
from potluck.net.frames import FrameType, Header, encode
from potluck.net.transport import Spin

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from potluck.net.aead import Decryptor, Encryptor
    from potluck.net.transport import Poller, Stream


# --------------------------------------------------------------------------------------------------
# Losing a peer: what was seen, in words.


class PeerClosed(ConnectionError):
    """The peer closed its backend."""


class Interrupted(ConnectionError):
    """This side was stopped in the middle of a frame."""


class LossReported(ConnectionError):
    """Another rank saw it go and told us."""


def peer_lost(rank: int, name: str, reason: Exception) -> PeerLost:
    """The error for a peer that is gone."""
    return PeerLost(
        f"Rank {rank} ({name}) is gone",
        rank=rank,
        host=name,
        cause=_explain(reason),
        hint=f"Check the output of rank {rank}.",
    )


def _explain(reason: Exception) -> str:
    if isinstance(reason, PeerClosed):
        return "it closed its backend"
    if isinstance(reason, Interrupted):
        return "this side was interrupted in the middle of a frame"
    if isinstance(reason, LossReported):
        return "another rank lost its connection to it"
    return describe_loss(reason)


# --------------------------------------------------------------------------------------------------
# Barriers of all groups of one rank: drives :class:`potluck.backend.barrier.Barrier`.
#
# Tokens are handled by whichever thread runs the pump, so the rounds of a barrier follow each other
# without waking anybody in between.

MAX_GROUPS = 16_384
"""Groups whose barriers one peer may make us remember before we use them ourselves."""

LAST_WORDS = 0.03
"""Seconds after which a peer that died is not going to be reported as having arrived."""

LOOK_AFTER = LAST_WORDS / 2
"""Seconds between two looks of a barrier at who is lost; with their last words, below 0.1."""

MAX_ROUNDS = 32
"""More rounds than any group has: enough for four billion ranks."""

Tell: TypeAlias = Callable[[int, FrameType, int, int, int], None]
"""(rank, kind, group, number, round or lost rank)"""


class BarrierWait(Operation):
    """A rank's arrival at a barrier, until everybody is there."""

    __slots__ = ("gate", "gates", "group", "members")

    def __init__(self, gates: BarrierManager, group: int, members: Sequence[int]) -> None:
        super().__init__(gates.pump)
        self.gates = gates
        self.group = group
        self.members = members

    def describe(self) -> str:
        """Count the members."""
        return f"The barrier of {len(self.members)} ranks"

    def drive(self, limit: float | None) -> bool:
        """Run or await the pump, and tell the others after a while that we are here."""
        now, deadline, is_told = time.monotonic(), deadline_after(limit), False
        patience = ANNOUNCE_AFTER if limit is None else min(ANNOUNCE_AFTER, limit / 4)
        while not self.pump.wait_briefly(self, deadline, LOOK_AFTER):
            if not is_told and time.monotonic() >= now + patience:
                self.gates.announce(self)
                is_told = True
            self.gates.tick()
        return self.ended

    def _give_up(self) -> None:
        self.gates.give_up(self)

    def timeout_error(self, seconds: float) -> Timeout:
        """Name the absent."""
        missing = self.gates.missing(self.group)
        names = ", ".join(map(str, missing))
        who = f"rank {names} has" if len(missing) == 1 else f"ranks {names} have"
        cause = f"{who} not arrived" if missing else "all ranks arrived, but too late"
        return Timeout(
            f"{self.describe()} timed out after {seconds:g} s",
            seconds=seconds,
            missing=missing,
            rank=missing[0] if len(missing) == 1 else None,
            cause=cause,
            hint="Check what they are doing, then call the barrier again: it continues from here.",
        )


class _GroupBarriers:
    """The barriers of one group."""

    __slots__ = ("barrier", "named_by", "unclaimed", "waiting")

    def __init__(self, rank: int, named_by: int | None) -> None:
        self.barrier = Barrier(rank)
        self.named_by = named_by  # the peer we heard of it from, until we use it ourselves
        self.waiting: deque[BarrierWait] = deque()
        self.unclaimed = False  # passed after its caller had given up: the next caller has it


class BarrierManager:
    """The barriers of all groups."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        pump: PumpLock,
        tell: Tell,
        lost: Callable[[int], DistributedError],
    ) -> None:
        self.pump = pump
        self._rank = rank
        self._world_size = world_size
        self._tell = tell
        self._lost_error = lost
        self._lock = threading.Lock()
        self._gates: dict[int, _GroupBarriers] = {}
        self._named: dict[int, int] = {}  # rank -> groups we know from it alone
        self._lost: dict[int, float] = {}  # rank -> from when on its silence is certain

    def arrive(self, group: int, members: Sequence[int]) -> BarrierWait:
        """Arrive at the next barrier of a group."""
        stranger = next((m for m in members if not 0 <= m < self._world_size), None)
        if stranger is not None or self._rank not in members:
            rank = self._rank if stranger is None else stranger
            raise InvalidRank(
                rank, self._world_size, hint=f"The members of this barrier are {list(members)}."
            )
        wait = BarrierWait(self, group, members)
        with self._lock:
            gate = self._gate(group)
            if gate.named_by is not None:
                self._named[gate.named_by] -= 1
                gate.named_by = None
            if gate.unclaimed:
                gate.unclaimed = False
                wait.finish()
                return wait
            gate.waiting.append(wait)
            if len(gate.waiting) == 1:
                self._carry_out(group, gate, gate.barrier.enter(members))
        self.tick()
        return wait

    def announce(self, wait: BarrierWait) -> None:
        """It takes long: let everybody know that we are here."""
        with self._lock:
            gate = self._gate(wait.group)
            if gate.waiting and gate.waiting[0] is wait:
                self._carry_out(wait.group, gate, gate.barrier.announce())

    def give_up(self, wait: BarrierWait) -> None:
        """Stop waiting; the barrier itself stays where it is."""
        with self._lock:
            if not wait.ended:
                self._gate(wait.group).waiting.remove(wait)
                wait.finish(Cancelled("The barrier was cancelled"))

    def missing(self, group: int) -> list[int]:
        """Who has not arrived at the current barrier of a group."""
        with self._lock:
            return self._gate(group).barrier.missing()

    def receive(self, sender: int, header: Header) -> None:
        """A frame about a barrier."""
        bound = MAX_ROUNDS if header.kind == FrameType.TOKEN else self._world_size
        blames_us = header.kind == FrameType.BROKEN and header.piece == self._rank
        if header.length or header.piece >= bound or blames_us:
            raise MalformedFrame(f"Rank {sender} sent an impossible {header.kind.name} frame")
        with self._lock:
            gate = self._gate(header.group, named_by=sender)
            barrier, number = gate.barrier, header.operation
            effects: list[Effect] = []
            if header.kind == FrameType.TOKEN:
                effects = barrier.receive_token(sender, number, header.piece)
            elif header.kind == FrameType.ARRIVED:
                barrier.receive_arrival(sender, number)
            else:
                effects = barrier.receive_failure(number, header.piece)
            self._carry_out(header.group, gate, effects)

    def lose(self, rank: int, *, parted: bool) -> None:
        """A peer is gone; one that ``parted`` properly has said which barriers it had passed."""
        now = time.monotonic()
        with self._lock:
            self._lost[rank] = now if parted else now + LAST_WORDS
            for group, gate in self._gates.items():
                self._carry_out(group, gate, gate.barrier.lose(rank))
        self.tick()

    def tick(self) -> None:
        """Wait no longer for lost peers of which nothing more can be heard."""
        if not self._lost:
            return
        now = time.monotonic()
        with self._lock:
            silent = [rank for rank, certain in self._lost.items() if certain <= now]
            for group, gate in self._gates.items():
                for rank in silent:
                    self._carry_out(group, gate, gate.barrier.exclude(rank))

    def part(self) -> None:
        """We leave: tell the others which barriers we had passed."""
        with self._lock:
            for group, gate in self._gates.items():
                for rank in range(self._world_size):
                    if rank != self._rank and gate.barrier.passed:
                        self._tell(rank, FrameType.ARRIVED, group, gate.barrier.passed, 0)

    def end(self, error: DistributedError) -> None:
        """This side closes: every barrier that still waits fails with this error."""
        with self._lock:
            finish_all([w for gate in self._gates.values() for w in gate.waiting], error)

    def _gate(self, group: int, named_by: int | None = None) -> _GroupBarriers:
        gate = self._gates.get(group)
        if gate is None:
            if named_by is not None:  # each has its own bound: one cannot use up another's
                self._named[named_by] = self._named.get(named_by, 0) + 1
                if self._named[named_by] > MAX_GROUPS:
                    raise MalformedFrame(f"Rank {named_by} named too many groups")
            gate = self._gates[group] = _GroupBarriers(self._rank, named_by)
            for rank in self._lost:
                gate.barrier.lose(rank)
        return gate

    def _carry_out(self, group: int, gate: _GroupBarriers, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Token):
                self._tell(effect.to, FrameType.TOKEN, group, effect.number, effect.round)
            elif isinstance(effect, Announce):
                kind = FrameType.ARRIVED if effect.lost is None else FrameType.BROKEN
                self._tell(effect.to, kind, group, effect.number, effect.lost or 0)
            elif isinstance(effect, BarrierFailed):
                self._leave(group, gate, self._lost_error(effect.lost))
            else:
                self._leave(group, gate, None)

    def _leave(self, group: int, gate: _GroupBarriers, error: DistributedError | None) -> None:
        if gate.waiting:
            gate.waiting.popleft().finish(error)
        elif error is None:
            gate.unclaimed = True
        if gate.waiting:
            self._carry_out(group, gate, gate.barrier.enter(gate.waiting[0].members))


# --------------------------------------------------------------------------------------------------
# What the frames of one peer mean: a table from kind to action.


def frame_handler(
    sender: SenderState, inbox: Inbox, outbox: Outbox, gates: BarrierManager
) -> FrameHandler:
    """Hands each frame of one peer to whom it concerns.  Only the pump calls this."""
    rank = sender.rank
    actions: dict[FrameType, Callable[[Header], None]] = {
        FrameType.EAGER: partial(inbox.complete_eager, sender),
        FrameType.DATA: partial(inbox.complete_piece, sender),
        FrameType.OFFER: partial(inbox.complete_offer, sender),
        FrameType.WITHDRAW: lambda header: inbox.complete_withdrawal(sender, header.operation),
        FrameType.GRANT: lambda header: outbox.receive_grant(header.operation, wanted=True),
        FrameType.DISCARD: lambda header: outbox.receive_grant(header.operation, wanted=False),
        FrameType.CREDIT: lambda header: outbox.receive_credit(header.operation),
        FrameType.TOKEN: partial(gates.receive, rank),
        FrameType.ARRIVED: partial(gates.receive, rank),
        FrameType.BROKEN: partial(gates.receive, rank),
        FrameType.GOODBYE: _leave,
    }

    def complete(header: Header) -> None:
        action = actions.get(header.kind)
        if action is None:
            raise MalformedFrame(f"Rank {rank} sent a {header.kind.name} frame out of place")
        action(header)

    return FrameHandler(
        partial(inbox.begin, sender), complete, partial(inbox.complete_small, sender)
    )


def _leave(_: Header) -> None:
    raise PeerClosed


# --------------------------------------------------------------------------------------------------

LINGER = 1.0
"""Seconds :meth:`MeshBackend.close` waits for what was sent to reach its peers."""


class MeshBackend(Backend):
    """A rank in a full mesh of links."""

    def __init__(
        self, rank: int, world_size: int, poller: Poller, limits: MessageLimits | None = None
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._poller = poller
        self._limits = limits or MessageLimits()
        self._links: dict[int, PeerConnection] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._senders: dict[int, SenderState] = {}
        self._turns = PumpLock(self._pump, poller.wake)
        self._inbox = Inbox(rank, self._turns, self._limits)
        self._gates = BarrierManager(rank, world_size, self._turns, self._tell, self._loss_of)
        self._spin = Spin()
        self._closed: DistributedError | None = None
        self._ending = threading.Lock()  # whoever gets it ends everything, once
        close_at_exit(self)
        _process.on_fork(self)

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
        seal: tuple[Encryptor, Decryptor] | None = None,
        first: bytes = b"",
    ) -> None:
        """Connect to one more rank; ``first`` is what came in before the stream was ours."""
        link = PeerConnection(rank, stream, self._poller, seal)
        sender = SenderState(rank, link, self._limits.credit)
        outbox = Outbox(self._inbox, link, self._limits)
        link.connect(frame_handler(sender, self._inbox, outbox, self._gates), self._limits.eager)
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
        send = SendOperation(self._inbox, dst, read_view(data), group, tag)
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
        return self._gates.arrive(group, members or range(self._world_size))

    def progress(self, timeout: float | None = 0) -> None:
        """Run the pump once, unless another thread does."""
        self._check_open()
        self._turns.step(timeout)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise copy.copy(self._closed)

    def _no_connection(self, rank: int) -> NoConnection:
        return NoConnection(f"Rank {self._rank} has no connection to rank {rank}", rank=rank)

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

    def _tell(self, rank: int, kind: FrameType, group: int, number: int, piece: int) -> None:
        link = self._links.get(rank)
        if link is not None:
            link.tell(encode(kind, group=group, epoch=link.epoch, operation=number, piece=piece))

    # -- endings -----------------------------------------------------------------------------------

    def _lose(self, link: PeerConnection, reason: Exception) -> None:
        """A link is over: end what depends on it and stop watching it."""
        error = peer_lost(link.rank, self.peer_name(link.rank), reason)
        self._poller.unregister(link.stream)
        self._end_link(link, error)
        self._gates.lose(link.rank, parted=isinstance(reason, PeerClosed))
        link.stream.close()

    def _end_link(self, link: PeerConnection, error: DistributedError) -> None:
        finish_all(self._outboxes[link.rank].lose(error), error)
        finish_all(self._inbox.lose(self._senders[link.rank]), error)

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank is gone, if it is."""
        link = self._links.get(rank)
        return self._closed if link is None else link.lost or self._closed

    def _loss_of(self, rank: int) -> DistributedError:
        return self.loss_of(rank) or peer_lost(rank, self.peer_name(rank), LossReported())

    def close(self) -> None:
        """Tell the peers, let what was sent arrive, and end every operation that still waits."""
        if self._closed is not None:
            return
        self._turns.refuse_nesting()
        self._prepare_to_close()
        deadline = time.monotonic() + LINGER
        self._gates.part()
        for link in self._links.values():
            link.tell(encode(FrameType.GOODBYE, epoch=link.epoch))
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
                link.tell(encode(FrameType.GOODBYE, epoch=link.epoch))
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
