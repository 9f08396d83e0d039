"""The machine that shows a code: drives the host's state machine over the pairing listener.

One thread, the caller's, does everything: it waits for a caller or the nearest deadline, asks the
core, and carries out what it says, in order.  So a new member is on the disk before it is told, and
the last message is sent before we hang up.
"""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from potluck.errors import Disconnected, DistributedError, MalformedFrame
from potluck.identity.namespace import (
    NamespaceExists,
    NamespaceFiles,
    NetworkNamespace,
    UnknownNamespace,
    checked_name,
    stored_names,
    usual_name,
)
from potluck.logs import get_logger
from potluck.net.addresses import NO_NETWORK, Address, usable_hosts
from potluck.trust.membership_store import (
    VERIFIER,
    NamespaceMembership,
    lock,
    read_roster,
    write_roster,
)
from potluck.trust.pairing_code import PairingCode
from potluck.trust.pairing_net import (
    Closed,
    Connected,
    Event,
    PairingDiscovery,
    PairingLine,
    PairingListener,
    dial,
)
from potluck.trust.pairing_protocol import (
    CODE_SECONDS,
    MAX_LINKS,
    AskUser,
    Belonging,
    CallerDiffers,
    Effect,
    HangUp,
    Namespace,
    Offered,
    Paired,
    PairingEnded,
    PairingGuest,
    PairingHost,
    SendBytes,
    TryFailed,
    decide_adoption,
)
from potluck.trust.roster import Roster, take
from potluck.trust.roster_records import Card, Signer, commitment_to

logger = get_logger(__name__)

TICK = 0.25
"""Seconds between reports of how much time is left."""


class PairingFailed(DistributedError, RuntimeError):
    """The pairing failed; the text says why.

    ``retry``: the same code may be tried again without asking the user.
    """

    def __init__(self, message: str, *, retry: bool = False, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry = retry


@dataclass(frozen=True, slots=True)
class WaitingForGuest:
    """No machine has joined yet."""

    seconds_left: float
    tries_left: int


Notice: TypeAlias = WaitingForGuest | TryFailed | CallerDiffers


def open_listener(**options: int) -> PairingListener:
    """A listener with as many places as the core has."""
    return PairingListener(places=MAX_LINKS, **options)


class PairingInvitation:
    """One code, shown until a machine that knows it has joined the group.

    ``tell`` gets failed tries, and a few times a second how much time is left.
    """

    def __init__(
        self,
        membership: NamespaceMembership,
        listener: PairingListener,
        code: PairingCode,
        *,
        tell: Callable[[Notice], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._listener = listener
        self._tell = tell
        self._clock = clock
        self._end = clock() + CODE_SECONDS
        self._peers: dict[int, Address] = {}  # who is on which link, for the log
        self._outcome: Paired | PairingEnded | None = None
        self._host = PairingHost(
            code,
            membership.me,
            membership.offer(),
            enrol=membership.enrolled,
            verifier=VERIFIER,
            entropy=secrets.token_bytes,
            now=clock(),
        )

    def run(self) -> Paired:
        """Wait until a machine has joined; raises :class:`PairingFailed` if none does.

        The listener is closed afterwards, whatever happens.
        """
        try:
            while self._outcome is None:
                self._step()
            self._listener.finish()
        except KeyboardInterrupt:
            self._carry_out(self._host.cancel())  # tells those who are connected
            self._listener.finish()
            raise
        finally:
            self._listener.close()
        if isinstance(self._outcome, PairingEnded):
            raise PairingFailed(
                self._outcome.reason, hint="Run `potluck pair` again for a new code."
            )
        return self._outcome

    def _step(self) -> None:
        deadline = self._host.deadline
        assert deadline is not None  # it has none only when it is over
        timeout = min(TICK, deadline - self._clock())
        for event in self._listener.wait(timeout, self._host.limit):
            self._carry_out(self._handle(event))
        self._carry_out(self._host.tick(self._clock()))
        if self._outcome is None:
            self._tell(WaitingForGuest(max(0.0, self._end - self._clock()), self._host.tries_left))

    def _handle(self, event: Event) -> list[Effect]:
        now = self._clock()
        if isinstance(event, Connected):
            self._peers[event.link] = event.peer
            return self._host.connected(event.link, now)
        if isinstance(event, Closed):
            logger.info("%s is gone: %s", self._peers.pop(event.link, "a caller"), event.reason)
            return self._host.closed(event.link, now)
        return self._host.receive(event.link, event.message, now)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendBytes():
                    self._listener.send(effect.link, effect.message)
                case HangUp():
                    peer = self._peers.pop(effect.link, "a caller")
                    logger.info("hung up on %s: %s", peer, effect.reason)
                    self._listener.hang_up(effect.link)
                case TryFailed() | CallerDiffers():
                    self._tell(effect)
                case Paired():
                    self._membership.admit(effect.peer)
                    self._outcome = effect
                case PairingEnded():
                    self._outcome = effect
                case Offered():
                    raise AssertionError(effect)  # only a guest is offered something


# --------------------------------------------------------------------------------------------------
# The machine on which a code is typed: finds the other one and drives the guest's state machine.
#
# A machine that answers a search may be a stranger.  An exchange gives nothing away until the other
# side has sent its share; from then on it has given that side one guess at the code.  So an answer
# that fails before costs nothing and may be tried again, and of those that fail later only a few
# are tried before a person decides: each has a chance of 1 in 262,144.

GUESSES = 3
"""Machines that may each have one guess at the code; as many as the host allows."""

SEARCH_SECONDS = 10.0
"""Until a machine answers; a lost multicast query is repeated after one, two and four."""

OTHERS_SECONDS = 2.0
"""For other machines to answer, once one has answered and failed."""

MAX_TRIED = 8
"""Answers that are tried at all, also of those that cost nothing."""

DIAL_SECONDS = 6.0
"""For all addresses of one machine together, but each has time for a packet to be lost."""

DIAL_AT_LEAST = 1.5
LINGER_SECONDS = 1.0
PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts at a machine that is busy with another one."""


class PairingRequest:
    """Joins the machine that shows ``code``.

    ``decide`` is asked whether to accept an offer; what it raises declines the offer, and is raised
    at the end.  ``tell`` gets sentences about the progress.
    """

    def __init__(
        self,
        code: PairingCode,
        me: Signer,
        decide: Callable[[Offered], bool],
        *,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._code = code
        self._me = me
        self._decide = decide
        self._tell = tell
        self._clock = clock
        self._pause = pause
        self._is_proved = False  # a machine has proved that it knows the code

    def search(self, discovery: PairingDiscovery) -> Paired:
        """Join the machine that answers for the code's number and knows the code."""
        if not usable_hosts():
            self._tell(f"{NO_NETWORK} Until then only this machine itself is searched.")
        self._tell(f"Looking for the machine that shows the number {self._code.slot} …")
        failures: list[DistributedError] = []
        guesses = 0
        while guesses < GUESSES and len(failures) < MAX_TRIED:
            patience = OTHERS_SECONDS if failures else SEARCH_SECONDS
            found = discovery.find(self._code.slot, patience)
            if found is None:
                break
            if failures:
                self._tell(f"{failures[-1]} Another machine answered; trying that one.")
            try:
                return self.at(found.addresses)
            except DistributedError as failure:
                if self._is_proved:
                    raise  # the right machine, and still it failed: there is no other
                failures.append(failure)
                guesses += isinstance(failure, PairingFailed) and not failure.retry
        raise self._not_found(failures)

    def at(self, addresses: Sequence[Address]) -> Paired:
        """Join the machine at the first of these addresses that answers."""
        for pause in (*PAUSES, None):
            try:
                return self._meet(addresses)
            except PairingFailed as failure:
                if not failure.retry or pause is None:
                    raise
                self._tell(f"{failure} Trying again.")
                self._pause(pause)
        raise AssertionError(addresses)  # the last pause is None

    def _not_found(self, failures: list[DistributedError]) -> DistributedError:
        slot = self._code.slot
        if not failures and not usable_hosts():
            return PairingFailed(
                f"No machine that shows the number {slot} answered: "
                "this machine is not connected to a network",
                hint="Plug in the cable, or join the Wi-Fi, and type the code again.",
            )
        if not failures:
            return PairingFailed(
                f"No machine that shows the number {slot} answered",
                hint="Is `potluck pair` still waiting there? Some networks, above all for guests, "
                "keep machines apart; then give the address that it shows: "
                "potluck pair CODE --host ADDRESS",
            )
        if len(failures) == 1:
            return failures[0]
        return PairingFailed(
            f"{len(failures)} machines answered for the number {slot}, but pairing failed with "
            f"all of them. The last error: {failures[-1].message}",
            hint="Another machine may be posing as the right one. "
            "Give the address that the other machine shows: potluck pair CODE --host ADDRESS",
        )

    # --- one exchange ---

    def _meet(self, addresses: Sequence[Address]) -> Paired:
        line = self._dial(addresses)
        try:
            return self._talk(line)
        finally:
            _let_go(line)

    def _dial(self, addresses: Sequence[Address]) -> PairingLine:
        failure: DistributedError | None = None
        for address in addresses:
            seconds = max(DIAL_AT_LEAST, DIAL_SECONDS / len(addresses))
            try:
                line = dial(address, time.monotonic() + seconds)
            except DistributedError as error:
                failure = error
            else:
                self._tell(f"Talking to {address} …")
                return line
        raise failure or PairingFailed("The machine that answered gave no address")

    def _talk(self, line: PairingLine) -> Paired:
        guest = PairingGuest(self._code, self._me, verifier=VERIFIER, entropy=secrets.token_bytes)
        effects = guest.start(self._clock())
        while True:
            more: list[Effect] = []
            for effect in effects:
                match effect:
                    case SendBytes():
                        line.send(effect.message)
                    case Offered():
                        self._is_proved = True
                        more = self._answer(line, guest, effect)
                    case Paired():
                        return effect
                    case PairingEnded():
                        raise PairingFailed(effect.reason, retry=effect.retry)
                    case _:
                        pass  # we hang up when this returns
            effects = more or self._listen(line, guest)

    def _answer(self, line: PairingLine, guest: PairingGuest, offered: Offered) -> list[Effect]:
        try:
            accepted = self._decide(offered)
        except BaseException:  # Ctrl-C too: the other side shall not wait for its own timeout
            for effect in guest.decline(self._clock()):
                if isinstance(effect, SendBytes):
                    line.send(effect.message)
            raise
        return guest.accept(self._clock()) if accepted else guest.decline(self._clock())

    def _listen(self, line: PairingLine, guest: PairingGuest) -> list[Effect]:
        """What follows from the next message, or from the lack of one."""
        assert guest.deadline is not None  # it has none only when it is over
        _wait(line, min(TICK, guest.deadline - self._clock()))
        try:
            message = line.receive(guest.limit)
        except (Disconnected, MalformedFrame) as error:
            logger.info("%s is gone: %s", line.peer, error)
            return guest.closed(self._clock())
        if message is None:
            return guest.tick(self._clock())
        return guest.receive(message, self._clock())


def _wait(line: PairingLine, timeout: float) -> None:
    """Until something has arrived, or more can be sent."""
    with selectors.DefaultSelector() as selector:
        write = selectors.EVENT_WRITE if line.has_output else 0
        selector.register(line, selectors.EVENT_READ | write)
        selector.select(max(0.0, timeout))
    line.flush()


def _let_go(line: PairingLine) -> None:
    """Close, once the other side has our last message or a moment has passed."""
    deadline = time.monotonic() + LINGER_SECONDS
    while line.has_output and time.monotonic() < deadline:
        _wait(line, deadline - time.monotonic())
    line.end()
    while not line.drain() and (left := deadline - time.monotonic()) > 0:
        _wait(line, left)
    line.close()


# --------------------------------------------------------------------------------------------------
# What becomes of an offered namespace on this machine: checked, placed among the others, stored.
#
# A plan is made when the offer arrives, so that every obstacle is known, and a person asked, before
# we accept; it is carried out when the other side has written us down.  The namespace that gives
# way is removed last: a crash in between leaves two, never none.


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """How an offer will be stored."""

    name: str
    """What the namespace is called here."""
    question: str | None
    """What the user has to agree to first; None if nothing is lost."""
    reason: str
    """What the user is told when it is done; may be empty."""
    gives_way: str | None = None
    """The namespace that is removed afterwards, unless it is kept."""
    was_unused: bool = False
    """Whether that one is removed only if no machine has joined it meanwhile."""
    known: NamespaceMembership | None = None
    """The same group, if this machine is in it already."""


class NamespaceImporter:
    """Decides where an offered namespace is stored on this machine, and stores it.

    ``name`` is what the namespace shall be called here; without it, it keeps its own.
    """

    def __init__(self, home: Path, me: Signer, name: str | None = None) -> None:
        self._home = home
        self._me = me
        self._name = checked_name(name) if name else None

    @property
    def current(self) -> NamespaceMembership | None:
        """The group that this machine uses now, if that is clear."""
        try:
            return self._membership(self._name or usual_name(self._home))
        except UnknownNamespace:
            return None

    @property
    def may_ask(self) -> bool:
        """Whether joining something new would need an answer from a person.

        Raises if a file here is damaged: better now than when a code is used up.
        """
        memberships = self._memberships()
        current = self.current
        if current is not None:
            return not current.namespace.is_unused
        return any(not membership.namespace.is_unused for membership in memberships)

    def plan(self, offered: Offered, *, keep: bool = False) -> StoragePlan:
        """Where the offer goes; with ``keep`` beside what is here.  Raises if it cannot be."""
        roster = _checked(offered.namespace, offered.peer)
        memberships = self._memberships()
        for known in memberships:
            if known.roster.group_id == roster.group_id:
                return _plan_for_member(known, roster, offered)
        current = self.current
        decision = decide_adoption(
            current.belonging if current else None, _belonging(offered.namespace, roster)
        )
        question, leaving = None, current.namespace.name if current else None
        used = [each.namespace.name for each in memberships if not each.namespace.is_unused]
        if isinstance(decision, AskUser):
            question = decision.reason
        elif current is None and used:
            question = f'This machine is in {_listed(used)}. Join "{offered.namespace.name}" too?'
        if keep and question is not None:
            question = leaving = None
        staying = [each for each in used if each != leaving]
        name = self._free_name(offered.namespace.name, staying)
        NetworkNamespace(name, offered.namespace.secret, home=self._home)  # refuses bad names
        reason = decision.reason if not used else _farewell(leaving, staying)
        return StoragePlan(name, question, reason, leaving, was_unused=question is None)

    def _memberships(self) -> list[NamespaceMembership]:
        return [self._membership(name) for name in stored_names(self._home)]

    def _membership(self, name: str) -> NamespaceMembership:
        return NamespaceMembership.as_it_is(NetworkNamespace.load(name, home=self._home), self._me)

    def _free_name(self, offered: str, taken: list[str]) -> str:
        """What the newcomer is called: the wanted name, or with a number if that is taken."""
        wanted = self._name or checked_name(offered)
        if wanted not in taken:
            return wanted
        if self._name:
            raise NamespaceExists(
                f"This machine is already in another group named {wanted!r}",
                got=wanted,
                hint="Choose another name for the new one with --namespace.",
            )
        numbers = range(2, len(taken) + 3)
        return next(name for number in numbers if (name := f"{wanted}-{number}") not in taken)

    def store(self, plan: StoragePlan, paired: Paired) -> NamespaceMembership:
        """Carry out the plan with what the other side has handed over."""
        roster = _checked(paired.namespace, paired.peer)
        me, secret = self._me.node_id, paired.namespace.secret
        if not roster.is_member(me):
            raise PairingFailed(f'"{paired.peer.name}" sent a member list without this machine')
        with lock(self._home):
            if plan.known:
                namespace = plan.known.namespace
                roster = _merged(read_roster(namespace), roster, paired.peer, self._me)
                if not namespace.has_secret(secret):
                    namespace = namespace.rotated(secret)
            else:
                namespace = NetworkNamespace(plan.name, secret, home=self._home)
                roster = roster.adopted()
            namespace.save(replace=plan.gives_way == plan.name and not plan.was_unused)
            write_roster(namespace, roster)
            self._clear(plan)
        return NamespaceMembership(namespace, roster, self._me)

    def _clear(self, plan: StoragePlan) -> None:
        if plan.gives_way is None or plan.gives_way == plan.name:
            return
        files = NamespaceFiles(self._home, plan.gives_way)
        if not (plan.was_unused and files.is_used):  # a machine may have joined it meanwhile
            files.delete()


def _farewell(leaving: str | None, staying: list[str]) -> str:
    """What becomes of the namespaces this machine was in."""
    if not staying:
        return f'It has left "{leaving}".'
    return f"It is still in {_listed(staying)}; choose between them with --namespace."


def _plan_for_member(known: NamespaceMembership, roster: Roster, offered: Offered) -> StoragePlan:
    """For a group that this machine is or was in already."""
    ours, theirs = known.roster.history.chain, roster.history.chain
    name = known.namespace.name
    if len(theirs) < len(ours) and ours[: len(theirs)] == theirs:
        raise PairingFailed(
            f'"{offered.peer.name}" has an older secret of "{name}" than this machine',
            hint="Run `potluck pair` here and type the code there.",
        )
    question = None
    if theirs[: len(ours)] != ours:
        question = (
            f'"{offered.peer.name}" accepted another change of the secret of "{name}". Join it?'
        )
    decision = decide_adoption(known.belonging, _belonging(offered.namespace, roster))
    return StoragePlan(name, question, decision.reason, known=known)


def _checked(namespace: Namespace, peer: Card) -> Roster:
    """The roster that came with an offer, if it fits the secret and the sender."""
    try:
        roster = Roster.from_bytes(namespace.roster, VERIFIER)
    except MalformedFrame as error:
        raise PairingFailed(f'"{peer.name}" sent an invalid member list: {error}') from error
    if not roster.is_secret(namespace.secret) or not roster.is_member(peer.node_id):
        raise PairingFailed(f'"{peer.name}" sent a member list that does not match its offer')
    return roster


def _belonging(namespace: Namespace, roster: Roster) -> Belonging:
    return Belonging(namespace.name, roster.group_id, commitment_to(namespace.secret))


def _merged(mine: Roster | None, offered: Roster, peer: Card, me: Signer) -> Roster:
    """The roster of a group we know already, with what both sides know of it."""
    if mine is None or mine.group_id != offered.group_id:
        return offered.adopted()
    if mine.generation.name == offered.generation.name:
        # We keep our own judgement of the others; only whom we paired with counts at once.
        roster = take(mine, offered, peer.node_id, me.node_id).roster
        return replace(roster, counted=roster.counted | {peer.node_id})
    # A person vouched for the other side's history; what we alone know is added to it.
    return take(offered.adopted(), mine, me.node_id, me.node_id).roster


def _listed(names: list[str]) -> str:
    return " and ".join(f'"{name}"' for name in names)
