"""Many seeds of the simulated cluster: ``python -m potluck.testing.seeds --seeds 200000``.

Every seed is a story of faults (:mod:`potluck.testing.seeds`) through which the invariants must
hold.  One that fails is told again, shortened to what matters, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from random import Random
from signal import SIG_IGN, SIGINT, signal

from rich.console import Console
from rich.progress import Progress

from potluck.membership.core import ClusterCore
from potluck.testing.process import CoreFactory, Violation
from potluck.testing.scenario import Scenario, ScenarioError, play

# --------------------------------------------------------------------------------------------------
# Stories drawn by lot: the same seed always tells the same one.
#
# A story begins with a cluster that forms, continues with faults close upon each other, and ends
# with everything mended: then all who live must end up in one view.  Some stories hit anybody at
# any time. Others aim at the moments where protocols break: the view must change, and just when
# some message about the change leaves, its sender is killed or the network splits; or messages take
# as long as campaigns, so that several members run for the same term.
#
# Clocks leap and drift, but count the time in which a process is stopped: one that did not would
# break what ``docs/internals/membership.md`` assumes.

_FAULTS = {  # verb -> how often, among all
    "cut": 35,
    "heal": 8,
    "kill": 12,
    "unplug": 6,
    "restart": 8,
    "pause": 12,
    "wake": 6,
    "jump": 5,
    "drift": 3,
    "lag": 8,
    "slow": 8,
    "leave": 4,
    "abdicate": 4,
}
_PROVOCATIONS = "kill kill kill unplug pause pause leave abdicate abdicate abdicate cut".split()
_MOMENTS = "Propose Accepted Accepted Commit Commit Vote VoteRequest Lost Departed".split()
_CAMPAIGNS = "PreVote PreVoteReply VoteRequest Vote Vote Propose Accepted Accepted Commit".split()
_MEETINGS = "Found Founded Commit MergeRequest MergeAnswer Propose".split()
_FEWEST = 2  # nodes of a cluster to which something can happen
_LONG = 6  # seconds; views have settled by then, see Bounds.settling
_LEADER = "a"  # ids follow names, and the first id leads unless something happened


def random_story(seed: int) -> Scenario:
    """The story of a seed."""
    return Scenario.parse("\n".join(_Author(seed).lines()))


class _Author:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chance = Random(seed ^ 0x5EED)  # noqa: S311 - not the network's own lots
        count = self._chance.choices((2, 3, 4, 5, 6), (12, 48, 24, 14, 2))[0]
        self._names = list("abcdef"[:count])
        self._deserter = ""  # of two clusters that meet, the only member of one
        self._is_early = False  # and the other one has not begun yet
        self._middle = self._chance.choices(
            (
                self._anything,
                self._succession,
                self._separation,
                self._contest,
                self._meeting,
                self._endurance,
                self._reconnection,
                self._flapping,
                self._power_cut,
                self._rivalry,
                self._strain,
            ),
            (17, 19, 10, 13, 7, 3, 9, 7, 4, 4, 7),
        )[0]

    def lines(self) -> list[str]:
        """The lines of the story."""
        middle = self._middle()
        return [*self._beginning(), *middle, *self._end()]

    def _happens(self, share: float) -> bool:
        return self._chance.random() < share

    def _one(self) -> str:
        return self._chance.choice(self._names)

    # --- how it begins ---

    def _beginning(self) -> list[str]:
        lines = [f"# The story of seed {self._seed}.", f"seed {self._seed}", *self._settings()]
        if self._middle == self._meeting:
            return [*lines, *self._apart()]
        chance, names = self._chance, self._names
        late = names[-1] if len(names) > _FEWEST and self._happens(0.25) else ""
        first = [name for name in names if name != late]
        lines.append("nodes " + " ".join(first))
        if self._happens(0.08):
            lines.append(f"node {first[-1]}{first[-1]} on {first[-1]}")
        if self._happens(0.12):
            lines.append(f"firewall {chance.choice(first)}")
        if self._happens(0.05):
            lines.append("observers o")
        if self._happens(0.04):
            lines.append("messages bytes")
        if late:
            lines.append(f"after {chance.uniform(0.0, 1.2):.3f} nodes {late}")
        if self._happens(0.1):
            lines.append(f"loss {chance.choice((0.02, 0.1, 0.3))}")
        return [*lines, f"wait {chance.choice((0.25, 0.4, 0.6, 1.0))}"]

    def _settings(self) -> list[str]:
        """What holds for the whole story."""
        chance = self._chance
        lines = [f"beat {chance.choice((0.25, 0.3, 0.33))} pausing after 1"]
        if self._happens(0.06):
            lines.append("quorum any")
        if self._happens(0.4 if self._middle == self._rivalry else 0.7):
            lines.append(f"founders {chance.randint(2, len(self._names))}")
        if self._happens(0.1):
            lines.append(f"wants {self._one()} {chance.randint(1, len(self._names))}")
        if self._happens(0.2):
            lines.append("links routed")
        if self._happens(0.25):
            lines.append(f"delay 0.0005 to {chance.choice((0.01, 0.05, 0.15))}")
        if self._middle == self._rivalry or self._deserter:
            lines.append("trainers saving")
        elif self._happens(0.4):
            lines.append(chance.choice(("trainers", "trainers saving")))
        return lines

    def _apart(self) -> list[str]:
        """Two clusters form without knowing of each other."""
        if self._is_early:
            return self._arrival(self._deserter)
        lines = [f"nodes {' '.join(self._names)}", self._split("|"), "founders 1"]
        if name := self._deserter:  # it has trained for longer, and messages take their time
            others = " ".join(other for other in self._names if other != name)
            lines = ["delay 0.05 to 0.2", "founders 1", f"nodes {name}", "wait 2"]
            lines += [f"nodes {others}", self._away(name)]
        return [*lines, f"wait {self._chance.uniform(1.0, 2.0):.3f}", "heal"]

    def _arrival(self, host: str) -> list[str]:
        """One of those who begin meets a cluster, while their founder waits for an answer."""
        chance, others = self._chance, [name for name in self._names if name != host]
        founder, last = others[0], others[-1]
        lines = ["delay 0.001 to 0.01", "founders 1", f"nodes {host}", "wait 2"]
        lines += [f"nodes {' '.join(others)}", self._away(host)]
        if last != founder:
            lines.append(f"when {founder} sends Found lag {last} > {founder} 0.2 to 0.25")
        lines.append(f"wait {chance.uniform(0.0, 0.2):.3f}")
        return [*lines, f"heal {host} | {chance.choice(others[1:] or others)}"]

    # --- what happens ---

    def _reconnection(self) -> list[str]:
        """A side is cut off, is back for a moment in which it learns that, and is cut off again."""
        chance = self._chance
        cut = self._split("|")
        lines = []
        for _ in range(chance.choice((1, 1, 2))):
            lines += [cut, f"wait {chance.uniform(2.0, 4.0):.2f}"]
            lines += ["heal", f"wait {chance.uniform(0.2, 0.9):.2f}"]
        if self._happens(0.3):
            lines.append(self._fault())
        if self._happens(0.2):
            lines.append(cut)
            if self._happens(0.5):  # then perhaps those wait who worked without it
                lines.append(f"unplug {self._one()}")
            lines.append(f"after {chance.uniform(2.0, 3.5):.2f} continue {self._one()}")
        return [*lines, cut, f"wait {chance.uniform(4.0, 8.0):.2f}"]

    def _flapping(self) -> list[str]:
        """A link comes and goes, while something else may happen."""
        chance = self._chance
        sides = self._split("|").removeprefix("cut ").removesuffix(" losing")
        down, up = chance.choice((0.5, 1.2, 2.0, 2.5)), chance.choice((0.3, 0.6, 1.0, 2.0))
        times = chance.choice((2, 3, 4))
        lines = [f"flap {sides} down {down} up {up} times {times}"]
        if self._happens(0.4):
            lines.append(f"after {chance.uniform(0.1, down + up):.2f} {self._fault()}")
        return [*lines, f"wait {times * (down + up) * chance.uniform(0.6, 1.0):.2f}"]

    def _strain(self) -> list[str]:
        """Processors are slow and links uneven or deaf in one direction, all at once, for long."""
        chance = self._chance
        lines = [self._slow(name) for name in chance.sample(self._names, chance.choice((1, 1, 2)))]
        lines += [self._lag() for _ in range(chance.choice((0, 1, 1, 2)))]
        if self._happens(0.5):
            one, other = chance.sample(self._names, 2)
            lines.append(f"cut {one} > {other}{self._losing()}")
        chance.shuffle(lines)
        for _ in range(chance.choice((1, 2, 2, 3))):
            lines.append(f"after {chance.uniform(0.1, 1.5):.2f} {self._fault()}")
        return [*lines, f"wait {chance.uniform(1.0, 4.0):.2f}"]

    def _slow(self, name: str) -> str:
        return f"slow {name} to {self._chance.choice((0.2, 0.05, 0.02))}"

    def _lag(self) -> str:
        one, other = self._chance.sample(self._names, 2)
        return f"lag {one} > {other} 0.01 to {self._chance.choice((0.1, 0.3, 0.6))}"

    def _power_cut(self) -> list[str]:
        """Most or all lose their power or die, and some come back, while others are cut off."""
        chance, names = self._chance, self._names
        gone = chance.sample(names, chance.randint(max(1, len(names) - 2), len(names)))
        lines = [f"{chance.choice(('unplug', 'kill'))} {name}" for name in gone]
        if self._happens(0.5):
            lines.insert(0, f"{self._split()}")
            lines.insert(1, f"wait {chance.choice((0.3, 1.0, 2.5))}")
        lines.append(f"wait {chance.choice((0.3, 1.0, 2.5, 5.0))}")
        back = chance.sample(gone, chance.randint(1, len(gone)))
        lines += [f"after {chance.uniform(0.0, 0.5):.2f} restart {name}" for name in back]
        return [*lines, f"wait {chance.choice((0.5, 1.5, 3.0))}"]

    def _rivalry(self) -> list[str]:
        """Some start again from their checkpoints, or are told to continue, out of sight of others.

        When the two meet, the one that went back has perhaps done more work.
        """
        chance, names = self._chance, self._names
        mixed = chance.sample(names, len(names))
        edge = chance.randint(1, len(mixed) - 1)
        left, right = mixed[:edge], mixed[edge:]
        lines = [f"wait {chance.uniform(0.8, 2.5):.2f}"]
        lines.append(f"cut {' '.join(left)} | {' '.join(right)}")
        if self._happens(0.6):
            lines += [f"{chance.choice(('kill', 'unplug'))} {name}" for name in right]
            lines.append(f"wait {chance.uniform(0.2, 3.0):.2f}")
            lines.append("restart " + " ".join(right))
        else:
            lines += [f"wait {chance.uniform(1.5, 3.0):.2f}", f"continue {chance.choice(right)}"]
        if self._happens(0.6):  # the others get less done
            lines.append(f"after {chance.uniform(0.1, 1.5):.2f} pause {chance.choice(left)}")
        return [*lines, f"wait {chance.uniform(2.0, 5.0):.2f}"]

    def _anything(self) -> list[str]:
        """Faults at any time, some at a message."""
        lines = []
        for _ in range(self._chance.choice((1, 2, 2, 3, 3, 4, 6))):
            if self._happens(0.2):
                lines.append(self._at_message(self._one(), _MOMENTS + _MEETINGS))
            else:
                lines.append(f"after {min(1.5, self._chance.expovariate(2.0)):.3f} {self._fault()}")
        return lines

    def _succession(self) -> list[str]:
        """The view must change, and its leader falls over the change; perhaps the next one too."""
        chance = self._chance
        sender, kind = chance.choice(((self._one(), "Accepted"), (_LEADER, "Commit")))
        lines = [f"when {sender} sends {kind} {self._blow(_LEADER)}"]
        if self._happens(0.2):
            lines = [self._at_message(_LEADER, ["Propose", "Lost", "Commit"])]
        lines += [
            self._at_message(self._one(), _CAMPAIGNS) for _ in range(chance.choice((0, 1, 1, 2, 3)))
        ]
        lines.append(self._provocation())
        lines += [
            f"after {chance.choice((0.1, 0.5, 1.2, 2.5))} {self._fault()}"
            for _ in range(chance.choice((0, 0, 1, 2)))
        ]
        return [*lines, f"wait {chance.choice((0.1, 0.5, 1, 2.9))}"]

    def _separation(self) -> list[str]:
        """Some die while the others are cut apart, for long."""
        chance = self._chance
        lines = [self._split()]
        lines += [
            f"after {chance.choice((0, 0.01, 0.3))} {self._provocation()}"
            for _ in range(chance.choice((1, 1, 2)))
        ]
        if self._happens(0.3):
            lines.reverse()
        return [*lines, f"wait {chance.choice((1.3, 2.6, 3.2))}"]

    def _endurance(self) -> list[str]:
        """What is broken stays so for long: an active process must be able to work."""
        lines = [self._fault() for _ in range(self._chance.choice((1, 2)))]
        return [*lines, f"wait {_LONG}"]

    def _contest(self) -> list[str]:
        """The leader is lost, and several run for the same term.

        Messages take as long as campaigns, or two who would wait for each other do not hear so.
        """
        chance = self._chance
        lines = [f"delay 0.001 to {chance.choice((0.1, 0.2, 0.25))}"]
        if self._happens(0.3):
            lines.append("loss 0.1")
        if len(self._names) > _FEWEST and self._happens(0.5):
            one, other = chance.sample(self._names[1:], 2)
            lines.append(f"cut {one} | {other}{self._losing()}")
        lines.append(f"{chance.choice(['kill', 'kill', 'unplug', 'leave'])} {_LEADER}")
        for _ in range(chance.choice((1, 2, 3, 4))):
            if self._happens(0.6):
                lines.append(self._at_message(self._one(), _CAMPAIGNS))
            else:
                lines.append(f"after {chance.uniform(0.1, 1.2):.3f} {self._fault()}")
        return lines

    def _meeting(self) -> list[str]:
        """Two clusters meet while something happens to them."""
        if self._happens(0.4):
            return self._desertion()
        lines = [
            self._at_message(self._one(), _MEETINGS) for _ in range(self._chance.choice((1, 2, 3)))
        ]
        if self._happens(0.6):
            lines.append(f"after {self._chance.uniform(0.0, 1.0):.3f} {self._fault()}")
        return lines

    def _desertion(self) -> list[str]:
        """The one that wins is cut off before the others have its state; it may die meanwhile."""
        chance, name = self._chance, self._one()
        self._deserter = name
        if self._happens(0.4):
            self._is_early = True
            return [f"wait {chance.uniform(0.5, 3.0):.2f}"]
        lines = [f"wait {chance.uniform(0.8, 2.0):.2f}", self._away(name)]
        if self._happens(0.5):
            lines.append(f"wait {chance.uniform(1.0, 3.5):.2f}")
        lines.append(f"{chance.choice(('kill', 'kill', 'unplug', 'pause'))} {name}")
        if self._happens(0.3):
            lines.append(f"restart {name}")
        return [*lines, f"wait {chance.uniform(0.5, 3.5):.2f}"]

    def _away(self, name: str) -> str:
        others = " ".join(other for other in self._names if other != name)
        return f"cut {name} | {others}{self._losing()}"

    def _at_message(self, sender: str, kinds: list[str]) -> str:
        fault = self._chance.choices(
            (f"kill {sender}", f"unplug {sender}", self._split(), self._fault()), (2, 1, 4, 3)
        )[0]
        return f"when {sender} sends {self._chance.choice(kinds)} {fault}"

    def _blow(self, name: str) -> str:
        """What takes one member from the others, with or without a word."""
        away = self._away(name)
        return self._chance.choice((f"kill {name}", f"unplug {name}", f"pause {name}", away, away))

    def _provocation(self) -> str:
        verb = self._chance.choice(_PROVOCATIONS)
        if verb == "abdicate":
            return f"abdicate {_LEADER}"
        return self._cut() if verb == "cut" else f"{verb} {self._one()}"

    def _fault(self) -> str:
        chance, name = self._chance, self._one()
        verb = chance.choices(list(_FAULTS), list(_FAULTS.values()))[0]
        match verb:
            case "cut":
                return self._cut()
            case "heal":
                return "heal"
            case "jump":
                return f"jump {name} by {chance.uniform(0.3, 4.0):.2f}"
            case "lag":
                return self._lag()
            case "slow":
                return self._slow(name)
            case "drift":
                return f"drift {name} to {chance.uniform(0.955, 1.05):.3f}"
        return f"{verb} {name}"

    def _cut(self) -> str:
        if self._happens(0.5):
            return self._split()
        one, other = self._chance.sample(self._names, 2)
        return f"cut {one} {'>' if self._happens(0.3) else '|'} {other}{self._losing()}"

    def _split(self, way: str = "") -> str:
        """Two sides that do not reach each other."""
        mixed = self._chance.sample(self._names, len(self._names))
        edge = self._chance.randint(1, len(mixed) - 1)
        way = way or (">" if self._happens(0.15) else "|")
        return f"cut {' '.join(mixed[:edge])} {way} {' '.join(mixed[edge:])}{self._losing()}"

    def _losing(self) -> str:
        return " losing" if self._happens(0.5) else ""

    # --- how it ends ---

    def _end(self) -> list[str]:
        lines = [f"after {self._chance.choice((0.1, 0.3, 1.0, 2.3)):g} calm"]
        if self._happens(0.6):
            lines.append("restart " + " ".join(self._names))
        return [*lines, "settle"]


# --------------------------------------------------------------------------------------------------

_FRAME = frozenset({"seed", "beat", "nodes", "calm", "settle"})  # without them it is none
_GARBAGE = 200_000  # objects; stories make many, and most of them end with their story
_TELL_EVERY = 30.0  # seconds between two lines of progress where there is no terminal
BATCH = 50  # seeds that a worker takes at once, at most


@dataclass(frozen=True, slots=True)
class SeedFailure:
    """A seed whose story broke a rule."""

    seed: int
    reason: str

    @property
    def command(self) -> str:
        """What repeats it, with every event."""
        return f"python -m potluck.testing.seeds --seed {self.seed} --trace"


@dataclass(slots=True)
class SeedReport:
    """What came of many seeds."""

    seeds: int = 0
    failures: list[SeedFailure] = field(default_factory=list)
    settled_in: list[float] = field(default_factory=list)
    """Seconds from the last fault until all were in one view, for each seed that got there."""
    exceptions: int = 0
    """Children that were at work beside a lineage of which their founders could not know."""
    taken_back: int = 0
    """Times that a process gave up counted steps, because its lineage had lost a merge."""
    elapsed: float = 0.0
    """Real seconds."""

    def add(self, other: SeedReport) -> None:
        """Count another report in."""
        self.seeds += other.seeds
        self.failures += other.failures
        self.settled_in += other.settled_in
        self.exceptions += other.exceptions
        self.taken_back += other.taken_back

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        times = sorted(self.settled_in)
        return {
            "seeds": self.seeds,
            "failures": [{"seed": f.seed, "reason": f.reason} for f in self.failures],
            "exceptions": self.exceptions,
            "taken_back": self.taken_back,
            "seconds": round(self.elapsed, 1),
            "seeds_per_second": round(self.seeds / self.elapsed, 1) if self.elapsed else None,
            "settled_in_seconds": {
                "median": round(statistics.median(times), 3),
                "p99": round(times[int(0.99 * (len(times) - 1))], 3),
                "max": round(times[-1], 3),
            }
            if times
            else None,
        }


def check_seed(
    seed: int, *, core: CoreFactory = ClusterCore, tell: Callable[[str], None] | None = None
) -> float | None:
    """Play the story of a seed; the seconds it took to settle.  Raises what went wrong."""
    return play(random_story(seed), core=core, tell=tell).settled_in


def check_seeds(seeds: Sequence[int], *, core: CoreFactory = ClusterCore) -> SeedReport:
    """Play the stories of many seeds, one after the other."""
    report = SeedReport()
    for seed in seeds:
        report.seeds += 1
        try:
            cluster = play(random_story(seed), core=core)
        except Exception as error:  # noqa: BLE001 - a core that raises is a finding like any other
            report.failures.append(SeedFailure(seed, f"{type(error).__name__}: {error}"))
        else:
            if cluster.settled_in is not None:
                report.settled_in.append(cluster.settled_in)
            report.exceptions += len(cluster.invariants.families.exceptions)
            report.taken_back += cluster.invariants.step_log.taken_back
    return report


def shorten(
    story: Scenario, *, core: CoreFactory = ClusterCore, attempts: int = 300
) -> tuple[Scenario, str]:
    """Leave out lines of a failing story while it fails in the same way; the rest, and how."""
    reason = _failure(story, core) or ""
    index = len(story.steps)
    while index > 0 and attempts > 0:
        index -= 1
        if story.steps[index].action.verb in _FRAME:
            continue
        attempts -= 1
        shorter = story.without(index)
        still = _failure(shorter, core)
        if still is not None and _kind(still) == _kind(reason):
            story, reason = shorter, still
    return story, reason


def _failure(story: Scenario, core: CoreFactory) -> str | None:
    try:
        play(story, core=core)
    except (ScenarioError, ValueError):
        return None  # it names a process that has been left out
    except Exception as error:  # noqa: BLE001 - a core that raises is a finding like any other
        return f"{type(error).__name__}: {error}"
    return None


def _kind(reason: str) -> str:
    """What a failure has in common with others like it: its words without names and numbers."""
    words = re.sub(r"\{[^}]*\}|\S*\d\S*|\b[a-z]\b", "", reason.partition(";")[0])
    return " ".join(words.split()[:12])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m potluck.testing.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument(
        "--jobs",
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes (default: all cores)",
    )
    parser.add_argument("--minutes", type=float, default=inf, help="stop after this many minutes")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell every event")
    parser.add_argument("--shorten", action="store_true", help="with --seed: leave out what we can")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json)
    if options.seed is not None:
        return _one(options.seed, console, trace=options.trace, short=options.shorten)
    wanted = range(options.first, options.first + options.seeds)
    report = _many(wanted, options.jobs, console, minutes=options.minutes)
    if options.json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    _explain(report, console)
    return 1 if report.failures else 0


def _one(seed: int, console: Console, *, trace: bool, short: bool) -> int:
    story = random_story(seed)
    if short:
        story, _ = shorten(story)
    _tell(str(story))
    tell = _tell if trace else None
    try:
        cluster = play(story, tell=tell)
    except Violation as violation:
        console.print(f"seed {seed}: {violation}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(f"seed {seed}: all rules kept; settled in {cluster.settled_in or 0:.3f} s")
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")  # plain and unwrapped: traces are searched and compared


def _many(seeds: range, workers: int, console: Console, *, minutes: float) -> SeedReport:
    begun = told = time.monotonic()
    report = SeedReport()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        with closing(_parts(seeds, workers)) as parts, suppress(KeyboardInterrupt):
            for part in parts:
                report.add(part)
                for failure in part.failures:
                    _show(failure, progress.console)
                failed = f"seeds ({len(report.failures)} failed)"
                progress.update(task, advance=part.seeds, description=failed)
                if not console.is_terminal and time.monotonic() - told > _TELL_EVERY:
                    told = time.monotonic()
                    rate = report.seeds / (told - begun)
                    console.print(f"{report.seeds} of {len(seeds)} {failed}, {rate:.0f} per second")
                if time.monotonic() - begun > 60 * minutes:
                    break
    report.elapsed = time.monotonic() - begun
    return report


def _begin_worker() -> None:
    signal(SIGINT, SIG_IGN)
    gc.freeze()
    gc.set_threshold(_GARBAGE)


def _parts(seeds: range, workers: int) -> Generator[SeedReport]:
    size = max(1, min(BATCH, len(seeds) // (4 * workers)))
    batches = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    if workers <= 1:
        yield from map(check_seeds, batches)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin_worker)
    try:
        yield from pool.map(check_seeds, batches)
    finally:
        pool.shutdown(cancel_futures=True)


def _show(failure: SeedFailure, console: Console) -> None:
    words = f"seed {failure.seed}: {failure.reason}"
    console.print(words, style="red", markup=False, soft_wrap=True)
    console.print(f"  again: {failure.command}", markup=False, soft_wrap=True)


def _explain(report: SeedReport, console: Console) -> None:
    facts = report.as_dict()
    console.print(
        f"{report.seeds} seeds, {len(report.failures)} failed, in {facts['seconds']} s "
        f"({facts['seeds_per_second']} per second); settled in: {facts['settled_in_seconds']}; "
        f"children beside an unknown view: {report.exceptions}; "
        f"steps taken back by a lost merge: {report.taken_back}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
