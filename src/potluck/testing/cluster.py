"""A whole cluster in one thread: real cluster cores, a virtual clock, and a network with faults.

Everything that happens follows from the seed, so that whatever goes wrong goes wrong again.  The
invariants of :mod:`potluck.testing.invariants` are checked all along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast

from potluck.core import cluster_effects as effects
from potluck.core.cluster import ClusterCore
from potluck.core.cluster_events import ClusterState
from potluck.testing.network import LinkQuality
from potluck.testing.violation import Violation
from potluck.testing.world import SimulatedWorld
from potluck.vocabulary import View

__all__ = ["SimulatedCluster"]

STAYING = 0.5  # seconds for which a view must hold that everything was settled into


class _MayContinue(Protocol):
    def continue_without_missing(self, now: float) -> list[effects.Effect]: ...


class SimulatedCluster(SimulatedWorld):
    """Processes that find each other, agree on who is in, and suffer what a test does to them.

    >>> cluster = SimulatedCluster(seed=7)
    >>> cluster.start("a", "b", "c")
    >>> cluster.run_until(lambda: cluster.in_one_view("a", "b", "c"), within=5)
    True
    >>> cluster.kill("c")
    >>> cluster.run_until(lambda: cluster.in_one_view("a", "b"), within=5)
    True
    """

    # --- who does what ---

    def train(self, *, saving: bool = False) -> None:
        """Let processes that start from now on train; ``saving``: and write checkpoints."""
        self.has_trainers, self.saves_checkpoints = True, saving

    # --- faults ---

    def kill(self, *names: str) -> None:
        """End processes at once; their machines close the connections and refuse new ones."""
        for place in self.named(names):
            if place.core is not None:
                self.disturbed(f"{place.name} is killed", place)
                place.end("the connection was closed")

    def unplug(self, *names: str) -> None:
        """Take the power from machines: everything on them is gone, and nobody says so."""
        for place in self.named(names):
            self.disturbed(f"the machine of {place.name} loses its power", place)
            self._boots[place.host] = self._boots.get(place.host, 0) + 1
            for other in self.on_machine(place.host):
                other.end("", silently=True)

    def pause(self, *names: str) -> None:
        """Stop processes as SIGSTOP does; connections stay."""
        for place in self.named(names):
            if place.is_running:
                self.disturbed(f"{place.name} is stopped", place)
                place.stop()

    def suspend(self, *names: str) -> None:
        """Stop processes and their clocks, as a closed laptop does."""
        for place in self.named(names):
            if place.is_running:
                self.disturbed(f"{place.name} is suspended", place)
                place.stop(clock_too=True)

    def wake(self, *names: str) -> None:
        """Let stopped or suspended processes go on."""
        for place in self.named(names):
            if place.is_alive and place.is_stopped:
                self.disturbed(f"{place.name} goes on", place)
                self.invariants.ran_late()
                place.wake()
                self.invariants.woke(place)

    def cut(
        self, left: Iterable[str], right: Iterable[str], *, one_way: bool = False, keep: bool = True
    ) -> None:
        """Let nothing pass between machines; ``keep``: what is sent arrives after all, later."""
        others = [place.host for place in self.named(right)]
        for place in self.named(left):
            for host in others:
                if host != place.host:
                    self.network.cut(place.host, host, keep=keep)
                    if not one_way:
                        self.network.cut(host, place.host, keep=keep)
        self.disturbed("a cut")

    def heal(self, left: Iterable[str] = (), right: Iterable[str] = ()) -> None:
        """Mend the cuts between these machines, or all."""
        others = [place.host for place in self.named(right)]
        for place in self.named(left):
            for host in others:
                self.network.heal(place.host, host)
                self.network.heal(host, place.host)
        if not others:
            self.network.heal_all()
        self.disturbed("a cut is mended")

    def jump(self, name: str, seconds: float) -> None:
        """Let the clock of a process leap ahead."""
        self.disturbed(f"the clock of {name} leaps ahead by {seconds:g} s", self.place(name))
        self.invariants.ran_late()
        self.place(name).jump(seconds)

    def drift(self, name: str, rate: float) -> None:
        """Let the clock of a process run faster or slower from now on."""
        self.disturbed(f"the clock of {name} runs at {rate:g} times the speed", self.place(name))
        self.place(name).drift(rate)

    def flap(
        self, left: Iterable[str], right: Iterable[str], *, down: float, up: float, times: int
    ) -> None:
        """Cut links, mend them and so on, from now on, until ``calm`` or the last mending."""
        sides = tuple(left), tuple(right)
        for count in range(times):
            begin = count * (down + up)
            self._flaps.append(self.clock.after(begin, self.cut, *sides))
            self._flaps.append(self.clock.after(begin + down, self.heal, *sides))

    def lag(self, source: str, target: str, shortest: float, longest: float) -> None:
        """Let what one machine sends to another take this long, in this direction only."""
        quality = LinkQuality(shortest, longest, self.network.quality.loss)
        self.disturbed(f"from {source} to {target}: {quality}")
        self.network.shape(self.place(source).host, self.place(target).host, quality)

    def slow(self, name: str, share: float) -> None:
        """Give a process this share of a processor."""
        self.disturbed(f"{name} has {share:g} of a processor", self.place(name))
        self.invariants.ran_late()
        self.place(name).slow_down(share)

    def firewall(self, *names: str) -> None:
        """Let machines drop connections to ports of the dead instead of refusing them."""
        for place in self.named(names):
            self.dialling.firewalls.add(place.host)

    def continue_without_missing(self, name: str) -> None:
        """Let a person tell a process to continue without those it misses."""
        self.disturbed(f"{name} shall continue without the missing", self.place(name))
        self.invariants.families.told_to_continue(self.place(name).process)
        self.place(name).ask(
            lambda core, now: cast("_MayContinue", core).continue_without_missing(now)
        )

    def shape(self, quality: LinkQuality) -> None:
        """Give all links this quality from now on."""
        self.disturbed(f"links: {quality}")
        self.network.quality = quality

    def leave(self, *names: str) -> None:
        """Let processes say goodbye and end."""
        for place in self.named(names):
            if place.is_running:
                self.disturbed(f"{place.name} leaves", place)
                place.ask(ClusterCore.leave)
                place.end("the process has left")

    def step_down(self, name: str) -> None:
        """Let a process hand over rank 0, if it has it."""
        self.disturbed(f"{name} shall step down", self.place(name))
        # Not within whatever it is doing just now: this may happen as it sends a message.
        self.clock.after(0.0, self.place(name).ask, ClusterCore.step_down)

    def set_steps(self, name: str, steps: int) -> None:
        """Let a process have committed so many training steps."""
        core = self.place(name).core
        if core is not None:
            core.samples = steps

    def when_sends(self, name: str, message: str, action: Callable[[], None]) -> None:
        """Do something, once, just before a process sends a message of this kind."""
        self.triggers.append((name, message, action))

    def calm(self) -> None:
        """End all faults: mend, wake, forget what was to happen; the dead stay dead."""
        self.triggers.clear()
        for flap in self._flaps:
            flap.cancel()
        self._flaps.clear()
        self.network.heal_all()
        self.network.shape_alike()
        self.shape(LinkQuality())
        for place in self.places.values():
            place.drift(1.0)
            if place.share < 1:
                self.invariants.ran_late()
            place.slow_down(1.0)
            self.wake(place.name)

    def settle(self) -> None:
        """Demand that all who live find together, and stay so; raises a Violation otherwise.

        Where some are dead, the others may also wait, if they say for whom, in a view or without
        one; then the dead are started again, and all must find together.
        """
        patience = self.invariants.patience
        if self._settles(self.invariants.bounds.settling + patience):
            self._settle_training()
            return
        may_wait = any(not place.is_alive for place in self.places.values())
        if not (may_wait and self.invariants.why_not_waiting(self.dialling) is None):
            bounds = self.invariants.bounds
            if self._settles(bounds.converging - bounds.settling):
                self._settle_training()
                return
            why = self.invariants.why_not_waiting(self.dialling) if may_wait else ""
            if why is not None:
                raise Violation(
                    f"{bounds.converging:g} s after the last fault "
                    f"{self.invariants.why_not_converged()}; {why}; {self.summary()}"
                )
        self._restart_the_dead()

    def _settle_training(self) -> None:
        """Demand that all in the view train, if need be after the dead are started again."""
        if not self._check_training():
            self._restart_the_dead()

    def _restart_the_dead(self) -> None:
        self.needed_the_dead = True
        self.restart(*self.places)
        self.settle()

    def _settles(self, within: float) -> bool:
        begun = self.clock.now
        end = begun + within
        while self.run_until(self._is_converged, within=end - self.clock.now):
            self.settled_in = self.clock.now - begun
            if not self.run_until(lambda: not self._is_converged(), within=STAYING):
                return True
        return False

    def _check_training(self) -> bool:
        """Demand that all who are in the view make a step, unless the state of one is lost.

        False if they rightly wait for processes that are dead, and of which nobody can know that.
        """
        names = [name for name, place in self.places.items() if place.is_alive]
        trainers = [each for name in names if (each := self.trainer_of(name)) is not None]
        if any(trainer.is_lost for trainer in trainers):
            return True
        begun = [(trainer, trainer.value) for trainer in trainers]
        end = self.clock.now + self.invariants.bounds.settling
        while idle := [trainer for trainer, value in begun if trainer.value is value]:
            if self.clock.now >= end:
                unknown = self.invariants.unknown_deaths(self.dialling)
                if all(each.awaited and unknown.issuperset(each.awaited) for each in idle):
                    return False
                who = ", ".join(trainer.process.name for trainer in idle)
                raise Violation(
                    f"{who} made no step within {self.invariants.bounds.settling:g} s in one view "
                    f"with all others; {self.summary()}"
                )
            self.run(STAYING / 2)
        return True

    def _is_converged(self) -> bool:
        return self.invariants.why_not_converged() is None

    # --- time ---

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)

    def run_until(self, condition: Callable[[], bool], *, within: float) -> bool:
        """Let time pass until something is so; False if it is not within so many seconds."""
        end = self.clock.now + within
        while not condition():
            seen = self.changes
            while self.changes == seen:  # nothing that a condition could ask about is new
                if not self.clock.step(end):
                    self.clock.advance_to(end)
                    return condition()
        return True

    # --- questions ---

    def state_of(self, name: str) -> ClusterState:
        """Where a process stands; one that is dead counts as LEFT."""
        core = self.place(name).core
        return ClusterState.LEFT if core is None else core.state

    def view_of(self, name: str) -> View | None:
        """The view of a process; None if it is in none."""
        core = self.place(name).core
        return None if core is None else core.view

    def in_one_view(self, *names: str) -> bool:
        """Whether exactly these are at work in one view."""
        places = self.named(names)
        view = self.view_of(names[0])
        return (
            view is not None
            and set(view.members) == {place.process for place in places}
            and all(self.view_of(name) == view for name in names)
            and all(self.state_of(name) is ClusterState.ACTIVE for name in names)
        )

    def summary(self) -> str:
        """Where everybody stands, in one line."""
        words = []
        for place in self.places.values():
            view = self.view_of(place.name)
            where = f" in {self.invariants.names.view(view)}" if view else ""
            stopped = ", stopped" if place.is_alive and place.is_stopped else ""
            words.append(f"{place.name} {self.state_of(place.name).value}{where}{stopped}")
        return "; ".join(words)
