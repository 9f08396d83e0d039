"""The machine that shows a code: drives the host's state machine over the pairing listener.

One thread, the caller's, does everything: it waits for a caller or the nearest deadline, asks the
core, and carries out what it says, in order.  So a new member is on the disk before it hears of it,
and what was said last is out before we hang up.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from potluck.backend.circles import VERIFIER, Circle
from potluck.core.pairing import (
    Effect,
    Ended,
    HangUp,
    Offered,
    Paired,
    PairingCode,
    PairingHost,
    Send,
    TryFailed,
)
from potluck.core.pairing_effects import CODE_SECONDS, MAX_LINKS
from potluck.errors import DistributedError
from potluck.logs import get_logger
from potluck.net.addresses import Address
from potluck.net.pairing_listener import Closed, Connected, Event, PairingListener

__all__ = ["NO_NETWORK", "Invitation", "Notice", "PairingFailed", "Waiting", "open_listener"]

logger = get_logger(__name__)

TICK = 0.25
"""Seconds after which whoever watches hears again how much time is left."""


NO_NETWORK = "This machine is not connected to a network: plug in the cable, or join the Wi-Fi."


class PairingFailed(DistributedError, RuntimeError):
    """Nothing came of the pairing; the text says why.

    ``retry``: the same code may be tried again without asking anybody.
    """

    def __init__(self, message: str, *, retry: bool = False, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry = retry


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nobody has come yet."""

    seconds_left: float
    tries_left: int


Notice: TypeAlias = Waiting | TryFailed


def open_listener(**options: int) -> PairingListener:
    """A listener with as many places as the core has."""
    return PairingListener(places=MAX_LINKS, **options)


class Invitation:
    """One code, shown until somebody who knows it has joined ``circle``.

    ``tell`` hears of failed tries, and a few times a second how much time is left.
    """

    def __init__(
        self,
        circle: Circle,
        listener: PairingListener,
        code: PairingCode,
        *,
        tell: Callable[[Notice], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._circle = circle
        self._listener = listener
        self._tell = tell
        self._clock = clock
        self._end = clock() + CODE_SECONDS
        self._peers: dict[int, Address] = {}  # who is on which link, for the log
        self._outcome: Paired | Ended | None = None
        self._host = PairingHost(
            code,
            circle.me,
            circle.offer(),
            enrol=circle.enrolled,
            verifier=VERIFIER,
            entropy=secrets.token_bytes,
            now=clock(),
        )

    def run(self) -> Paired:
        """Wait until somebody has joined; raises :class:`PairingFailed` if nobody does.

        The listener is closed afterwards, whatever happens.
        """
        try:
            while self._outcome is None:
                self._step()
            self._listener.finish()
        except KeyboardInterrupt:
            self._carry_out(self._host.cancel())  # tell whoever is connected
            self._listener.finish()
            raise
        finally:
            self._listener.close()
        if isinstance(self._outcome, Ended):
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
            self._tell(Waiting(max(0.0, self._end - self._clock()), self._host.tries_left))

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
                case Send():
                    self._listener.send(effect.link, effect.message)
                case HangUp():
                    peer = self._peers.pop(effect.link, "a caller")
                    logger.info("hung up on %s: %s", peer, effect.reason)
                    self._listener.hang_up(effect.link)
                case TryFailed():
                    self._tell(effect)
                case Paired():
                    self._circle.admit(effect.peer)
                    self._outcome = effect
                case Ended():
                    self._outcome = effect
                case Offered():
                    raise AssertionError(effect)  # only a guest is offered something
