"""Handshakes of callers that have proved nothing yet: on threads of their own, within a budget.

Cryptography for a caller runs on a few worker threads, never on the thread that accepts, so one
expensive caller delays no other.  The CPU time that a caller costs is measured and charged to its
address until it has proved that it belongs; then its address is given back what it paid.  An
address that has used up its allowance waits, and its next callers are turned away before they cost
anything.  All unknown addresses together have an allowance too; of these the one that has cost
least is served first, so a newcomer does not stand behind a crowd.  Addresses of members, and of
this machine, come before all others and do not share their allowance.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from potluck.net.addresses import unmapped

__all__ = ["Allowance", "Finished", "Handshakes", "source_of"]

THREADS = 3
"""Workers at most; strangers leave one of them free for members."""

IDLE = 10.0
"""Seconds after which a worker without work ends."""

SOURCES = 1024
"""Addresses that are remembered; of those that wait for nothing, the one unseen longest goes."""


class Allowance(NamedTuple):
    """How much CPU time callers may cost before they have proved anything."""

    share: float
    """Seconds of CPU per second, in the long run."""
    burst: float
    """Seconds of CPU at once."""


ADDRESS = Allowance(share=0.05, burst=0.5)
"""For one unknown address; a handshake costs about 0.5 ms on a computer of 2020."""

STRANGERS = Allowance(share=0.25, burst=1.0)
"""For all unknown addresses together."""

NEWCOMER = 0.02
"""Seconds of CPU that an unknown address may cost also when strangers have used up theirs."""

MEMBERS = Allowance(share=0.5, burst=2.0)
"""For one address from which a member has come."""

Work = Callable[[], None]


class Finished(NamedTuple):
    """A step of a handshake that was made."""

    owner: object
    error: BaseException | None
    cpu: float
    """Seconds that it took; they are charged already."""


@dataclass(slots=True)
class _Account:
    """CPU time that was used and is not earned again yet."""

    debt: float = 0.0
    at: float = 0.0

    def settle(self, allowance: Allowance, now: float) -> float:
        self.debt = max(0.0, self.debt - (now - self.at) * allowance.share)
        self.at = now
        return self.debt

    def wait(self, allowance: Allowance, now: float) -> float:
        """Seconds until there is something left to spend; 0 if there is."""
        return max(0.0, self.settle(allowance, now) - allowance.burst) / allowance.share


@dataclass(slots=True)
class _Source:
    """One address, or one network of IPv6."""

    is_local: bool = False
    is_member: bool = False
    account: _Account = field(default_factory=_Account)
    waiting: deque[tuple[object, Work]] = field(default_factory=deque)
    running: int = 0

    @property
    def is_known(self) -> bool:
        return self.is_local or self.is_member

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running


class Handshakes:
    """Runs steps of handshakes, in turn by address; ``wake`` is called when one is finished."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._queue: dict[str, _Source] = {}  # those of them for which something waits
        self._strangers = _Account()
        self._strangers_running = 0
        self._finished: deque[Finished] = deque()
        self._threads: set[threading.Thread] = set()
        self._resting = 0  # workers that wait for work
        self._is_closed = False

    def admit(self, source: str, *, is_local: bool = False) -> bool:
        """Whether a new caller from this address may cost anything now."""
        now = time.monotonic()
        with self._changed:
            one = self._source(source)
            one.is_local = one.is_local or is_local
            if one.is_known:
                return True
            if one.account.wait(ADDRESS, now):
                return False
            is_new = one.account.debt <= NEWCOMER
            return is_new or not self._strangers.wait(STRANGERS, now)

    def is_known(self, source: str) -> bool:
        """Whether a member has come from there, or it is this machine."""
        with self._changed:
            one = self._sources.get(source)
            return one is not None and one.is_known

    def submit(self, source: str, owner: object, work: Work) -> None:
        """Have ``work`` done; :meth:`finished` then returns it with its ``owner``."""
        with self._changed:
            one = self._queue[source] = self._source(source)
            one.waiting.append((owner, work))
            if not self._resting and len(self._threads) < THREADS:
                self._start()
            self._changed.notify()
            is_alone = not self._threads
        if is_alone:  # the machine has no thread to spare
            self._step(source)

    def finished(self) -> list[Finished]:
        """The steps that were made since the last call."""
        done = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    def forget(self, source: str, owner: object) -> None:
        """Nobody waits for this any more."""
        with self._changed:
            one = self._sources.get(source)
            if one is not None:
                one.waiting = deque(each for each in one.waiting if each[0] is not owner)
                if not one.waiting:
                    self._queue.pop(source, None)

    def charge(self, source: str, cpu: float) -> None:
        """Its callers have cost this many seconds of CPU; negative gives them back."""
        now = time.monotonic()
        with self._changed:
            self._charge(self._source(source), cpu, now)

    def proved(self, source: str, cpu: float) -> None:
        """A member has come from there, and has cost this much before it proved to be one."""
        with self._changed:
            one = self._source(source)
            self._charge(one, -cpu, time.monotonic())
            one.is_member = True

    def close(self) -> None:
        """Drop what waits, and end the workers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    # -- workers -------------------------------------------------------------------------------

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="potluck-handshake", daemon=True)
        with contextlib.suppress(RuntimeError):  # those that run already do it, or whoever asks
            thread.start()
            self._threads.add(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                source = self._await_turn()
                if source is None:
                    self._threads.discard(threading.current_thread())
                    return
            self._step(source)

    def _step(self, source: str) -> None:
        """Do what waits longest for an address, if nobody else has done it meanwhile."""
        with self._changed:
            if source not in self._queue:
                return
            owner, work, is_stranger = self._begin(source)
        begin = time.thread_time()
        error: BaseException | None = None
        try:
            work()
        except Exception as raised:  # noqa: BLE001 - whoever attends to the caller judges it
            error = raised
        spent = time.thread_time() - begin
        with self._changed:
            self._strangers_running -= is_stranger
            one = self._sources[source]  # is not forgotten while it is at work
            one.running -= 1
            self._charge(one, spent, time.monotonic())
            self._changed.notify()
        self._finished.append(Finished(owner, error, spent))
        self._wake()

    def _begin(self, source: str) -> tuple[object, Work, bool]:
        one = self._queue[source]
        owner, work = one.waiting.popleft()
        if not one.waiting:
            del self._queue[source]
        is_stranger = not one.is_known
        one.running += 1
        self._strangers_running += is_stranger
        return owner, work, is_stranger

    def _await_turn(self) -> str | None:
        """Whose turn it is; None when there is no more work for this thread."""
        idle_since = time.monotonic()
        while not self._is_closed:
            now = time.monotonic()
            source, wait = self._next(now)
            if source is not None:
                return source
            if wait is None and now - idle_since >= IDLE:
                return None
            self._resting += 1
            self._changed.wait(IDLE if wait is None else min(wait, IDLE))
            self._resting -= 1
        return None

    def _next(self, now: float) -> tuple[str | None, float | None]:
        """Whose turn it is; else in how many seconds it is anybody's, None if nothing waits."""
        best: tuple[tuple[bool, int, float], str] | None = None
        soonest: float | None = None
        for name, one in self._queue.items():
            wait = self._wait(one, now)
            if wait:
                soonest = wait if soonest is None else min(soonest, wait)
            elif best is None or _rank(one) < best[0]:
                best = _rank(one), name
        return best and best[1], soonest

    def _wait(self, one: _Source, now: float) -> float:
        if one.is_local:
            return 0.0
        if one.is_member:
            return one.account.wait(MEMBERS, now)
        if one.running or self._strangers_running >= THREADS - 1:
            return IDLE  # whoever finishes gives notice
        return max(one.account.wait(ADDRESS, now), self._strangers.wait(STRANGERS, now))

    # -- accounts ------------------------------------------------------------------------------

    def _source(self, name: str) -> _Source:
        one = self._sources.get(name)
        if one is None:
            self._make_room()
            one = self._sources[name] = _Source()
        self._sources.move_to_end(name)
        return one

    def _make_room(self) -> None:
        """Forget an address: a stranger's rather than a member's, and none that is at work."""
        if len(self._sources) < SOURCES:
            return
        for is_known in (False, True):
            for name, one in self._sources.items():
                if one.is_idle and one.is_known == is_known:
                    del self._sources[name]
                    return

    def _charge(self, one: _Source, cpu: float, now: float) -> None:
        allowance = MEMBERS if one.is_known else ADDRESS
        one.account.settle(allowance, now)
        one.account.debt = max(0.0, one.account.debt + cpu)
        if not one.is_known:
            self._strangers.settle(STRANGERS, now)
            self._strangers.debt = max(0.0, self._strangers.debt + cpu)


def _rank(one: _Source) -> tuple[bool, int, float]:
    """Members first, then who has least at work, then who has cost least."""
    return not one.is_known, one.running, one.account.debt


def source_of(host: str, called: str = "") -> str:
    """What counts as one address: an IPv4 address, or the network of an IPv6 one.

    ``called`` is the address that it calls.  This machine is not one with its neighbours.

    >>> source_of("::ffff:10.0.0.5"), source_of("fe80::1%eth0"), source_of("2001:db8::7")
    ('10.0.0.5', 'fe80::1', '2001:db8::/64')
    >>> source_of("2001:db8::7", called="2001:db8::7")
    '2001:db8::7'
    """
    if host == called:
        return host
    host = unmapped(host).partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4 or address.is_link_local or address.is_loopback:  # noqa: PLR2004
        return str(address)  # a network of our own cable has one machine behind each address
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
