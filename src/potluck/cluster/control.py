"""The control thread: drives the cluster's core, and never touches a socket.

It sleeps until a message or the nearest deadline.  Connections are opened by a pool of threads and
moved by the I/O thread; the members of a view are connected on threads of their own.  What the core
decides is carried out in the order in which it was decided.  If this thread ends without having
been asked to, operations end for good.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from potluck import _time
from potluck.cluster.connections import ControlConnections, DialPool
from potluck.errors import BackendUnavailable
from potluck.logs import get_logger
from potluck.membership import events as effects
from potluck.membership.events import MembershipChange, MembershipEvent
from potluck.membership.health import HealthEvent, HealthStatus
from potluck.membership.messages import ProcessInfo, ProcessRole, decode, encode

if TYPE_CHECKING:
    from potluck._types import ProcessId, View
    from potluck.cluster.io import ControlConnection
    from potluck.membership.core import ClusterCore


logger = get_logger(__name__)

LONGEST = 5.0
"""Seconds of one sleep at most."""

ANSWER_WITHIN = 5.0
"""Seconds for an answer of the control thread, which needs milliseconds."""

Answer = TypeVar("Answer")

AT_ONCE = 256
"""What has come in is handled in portions: the clock has to be looked at in between."""


class ControlThread:
    """One process's part in its cluster.

    ``core`` and ``links`` belong to the control thread; others use :meth:`post` and :meth:`ask`.
    It calls ``carry_out`` with what the core decided about operations, ``answer`` with requests of
    observers, ``look_around`` every few seconds, and ``failed`` at the end, for good.
    """

    def __init__(
        self,
        core: ClusterCore,
        pool: DialPool,
        *,
        carry_out: Callable[[effects.Effect], None],
        answer: Callable[[ControlConnection, bytes], None],
        look_around: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self.core = core
        self.me = core.me
        self._cards: dict[ProcessId, ProcessInfo] = {core.me.process: core.me}
        self._departed: set[ProcessId] = set()  # members who have left in good order
        self.awaited: dict[ProcessId, tuple[str, float]] = {}
        """Whom the training waits for while the cluster works: names, and since when."""
        self._tell = carry_out
        self._answer = answer
        self._look_around = look_around
        self._failed = failed
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        self._look_at = _time.now() + LONGEST
        self.links = ControlConnections(core.me, self, pool, self.post)
        self._thread = threading.Thread(target=self._run, name="potluck-control", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------

    def post(self, action: Callable[[], None]) -> None:
        """Have something done on the control thread."""
        self._inbox.put(action)

    def ask(self, question: Callable[[], Answer], within: float = ANSWER_WITHIN) -> Answer:
        """The answer to something that only the control thread may look at."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.post(lambda: answers.put(question()))
        try:
            return answers.get(timeout=within)
        except queue.Empty:
            raise BackendUnavailable(
                "The control thread of this node does not respond",
                cause=None if self.is_alive else "it has ended",
            ) from None

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()

    def leave(self, within: float) -> None:
        """Leave and end the thread; the I/O thread sends what is left."""
        self.post(self._leave)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(within)
        self._ended = self.links.is_over = True
        self.clear()

    def clear(self) -> None:
        """Let go of what came in too late to be looked at; when the thread has ended."""
        with contextlib.suppress(queue.Empty):
            while not self.is_alive:
                action = self._inbox.get_nowait()
                with contextlib.suppress(Exception):
                    action()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn()
        except BaseException as error:
            logger.exception("The control thread failed")
            self._failed(f"the control thread failed: {error!r}")
        finally:
            self._ended = self.links.is_over = True

    def _turn(self) -> None:
        now = _time.now()
        moments = [self.core.next_deadline, self.links.next_dial(now)]
        due = min((each for each in moments if each is not None), default=now + LONGEST)
        with contextlib.suppress(queue.Empty):
            wait = min(due - now, LONGEST)
            first = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            self.core.begin_batch()  # all that has come in, and then one decision
            first()
            for _ in range(AT_ONCE):
                if not self._ended:
                    self._inbox.get_nowait()()
        if self._ended:
            return
        now = _time.now()
        deadline = self.core.next_deadline
        if deadline is not None and now >= deadline:
            self._carry_out(self.core.tick(now))
        self._carry_out(self.core.end_batch(now))
        self.links.dial_due(now)
        if now >= self._look_at:
            self._look_at = now + LONGEST
            self._look_around()

    def _leave(self) -> None:
        if not self._ended:
            self._carry_out(self.core.leave(_time.now()))
            self._ended = self.links.is_over = True

    # -- what the links tell -------------------------------------------------------------------

    def met(self, card: ProcessInfo) -> None:
        """There is a connection to a process."""
        if card.role is ProcessRole.MEMBER:
            self._cards[card.process] = card
            self._carry_out(self.core.connected(card, _time.now()))

    def lost(self, process: ProcessId, cause: str) -> None:
        """There is none any more."""
        if self.core.view is None and process in self._cards:  # which the core has no words for
            sentence = f"{self._cards[process]} left while this machine waits: {cause}"
            event = MembershipEvent(MembershipChange.LOST, sentence, process)
            self._tell(effects.Note(event))
        self._carry_out(self.core.disconnected(process, cause, _time.now()))

    def misbehaved(self, process: ProcessId, why: str) -> None:
        """It sent what no correct process sends: it is removed, and all members are told why."""
        self._carry_out(self.core.expel(process, why, _time.now()))

    def probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        """Its slot and its port were tried."""
        tell = self.core.ended if has_ended else self.core.unreachable
        self._carry_out(tell(process, what, _time.now()))

    def said(self, process: ProcessId, payload: bytes) -> None:
        """It sent a message."""
        message = decode(payload)
        self._carry_out(self.core.receive(process, message, _time.now()))

    def asked(self, connection: ControlConnection, payload: bytes) -> None:
        """An observer asks for something."""
        self._answer(connection, payload)

    # -- effects -------------------------------------------------------------------------------

    def step_down(self) -> None:
        """Hand rank 0 to the next member, if it is ours."""
        self._carry_out(self.core.step_down(_time.now()))

    def continue_without_missing(self) -> None:
        """Do not wait for members that are missing."""
        self._carry_out(self.core.continue_without_missing(_time.now()))

    def _carry_out(self, wanted: Sequence[effects.Effect]) -> None:
        for effect in wanted:
            match effect:  # known before what follows from it
                case effects.Note(MembershipEvent(change=MembershipChange.DEPARTED, process=who)):
                    self._departed.update([who] if who is not None else [])
        for effect in wanted:
            match effect:
                case effects.SendMessage(to, message):
                    self.links.send(to, encode(message))
                case effects.ConnectTo(card):
                    self.links.contacts.introduced(card, _time.now())
                case effects.ProbePort(peer):
                    self.links.probe(peer)
                case effects.Disconnect(peer, reason):
                    self.links.ban(peer, reason)
                case _:
                    self._tell(effect)
            match effect:
                case effects.Installed(view):
                    self._keep_only(view)
                case effects.Note(HealthEvent(status=HealthStatus.DEAD) as event):
                    self._given_up(event)

    def _given_up(self, event: HealthEvent) -> None:
        """What waits in a connection that was silent for so long comes late: open a new one.

        TCP itself asks less and less often; after an outage it would stay silent for long.
        """
        self.post(lambda: self.links.drop(event.peer, event.reason))

    def _keep_only(self, view: View) -> None:
        """Forget processes that are neither in this view nor connected."""
        connected = {each.card.process for each in self.links.opened_connections}
        keep = {*view.members, *connected, *self.core.left_out({})[0], self.me.process}
        self._cards = {process: card for process, card in self._cards.items() if process in keep}
        self._departed &= keep
        self.links.forget_except(keep)

    def has_departed(self, process: ProcessId) -> bool:
        """Whether a member has left in good order."""
        return process in self._departed

    def card_of(self, process: ProcessId) -> ProcessInfo:
        """The card of a process, as it said itself."""
        known = self._cards.get(process)
        return known or ProcessInfo(node=process.node, incarnation=process.incarnation)
