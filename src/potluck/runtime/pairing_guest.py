"""The machine on which a code is typed: finds the other one and drives the guest's state machine.

Whoever answers a search may be a stranger.  An exchange gives nothing away until the other side has
sent its share; from then on it has given that side one guess at the code.  So an answer that fails
before costs nothing and may be tried again, and of those that fail later only a few are tried
before a person decides: each has a chance of 1 in 262,144.
"""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Callable, Sequence

from potluck.backend.circles import VERIFIER
from potluck.core.cards import Signer
from potluck.core.pairing import (
    Effect,
    Ended,
    Offered,
    Paired,
    PairingCode,
    PairingGuest,
    Send,
)
from potluck.errors import Disconnected, DistributedError, MalformedFrame
from potluck.logs import get_logger
from potluck.net.addresses import Address, usable_hosts
from potluck.net.pairing import PairingLine, dial
from potluck.net.pairing_discovery import PairingDiscovery
from potluck.runtime.pairing import NO_NETWORK, TICK, PairingFailed

__all__ = ["GUESSES", "Application"]

logger = get_logger(__name__)

GUESSES = 3
"""Machines that may each have one guess at the code; as many as the host allows."""

SEARCH_SECONDS = 10.0
"""Until somebody answers; a lost multicast packet is asked for again after one, two and four."""

OTHERS_SECONDS = 2.0
"""For others to answer, once one was there and failed."""

MAX_TRIED = 8
"""Answers that are tried at all, also of those that cost nothing."""

DIAL_SECONDS = 6.0
"""For all addresses of one machine together, but each has time for a packet to be lost."""

DIAL_AT_LEAST = 1.5
LINGER_SECONDS = 1.0
PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between knocks at a machine that is busy with somebody else."""


class Application:
    """Joins the machine that shows ``code``.

    ``decide`` is asked whether to accept an offer; what it raises declines the offer, and comes
    out at the end.  ``tell`` hears in sentences how it goes.
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
        self._is_proved = False  # somebody has shown that he knows the code

    def search(self, discovery: PairingDiscovery) -> Paired:
        """Join whoever answers for the code's number and knows the code."""
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
        raise self._nobody(failures)

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

    def _nobody(self, failures: list[DistributedError]) -> DistributedError:
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
            f"{len(failures)} machines answered for the number {slot}, and none of them led to a "
            f"pairing. The last one: {failures[-1].message}",
            hint="Somebody may be answering in another's place. "
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
        raise failure or PairingFailed("The machine that answered named no address")

    def _talk(self, line: PairingLine) -> Paired:
        guest = PairingGuest(self._code, self._me, verifier=VERIFIER, entropy=secrets.token_bytes)
        effects = guest.start(self._clock())
        while True:
            more: list[Effect] = []
            for effect in effects:
                match effect:
                    case Send():
                        line.send(effect.message)
                    case Offered():
                        self._is_proved = True
                        more = self._answer(line, guest, effect)
                    case Paired():
                        return effect
                    case Ended():
                        raise PairingFailed(effect.reason, retry=effect.retry)
                    case _:
                        pass  # we hang up when this returns
            effects = more or self._listen(line, guest)

    def _answer(self, line: PairingLine, guest: PairingGuest, offered: Offered) -> list[Effect]:
        try:
            accepted = self._decide(offered)
        except BaseException:  # Ctrl-C too: the other side shall not wait for its own timeout
            for effect in guest.decline(self._clock()):
                if isinstance(effect, Send):
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
    """Close, once the other side has our last words or a moment has passed."""
    deadline = time.monotonic() + LINGER_SECONDS
    while line.has_output and time.monotonic() < deadline:
        _wait(line, deadline - time.monotonic())
    line.end()
    while not line.drain() and (left := deadline - time.monotonic()) > 0:
        _wait(line, left)
    line.close()
