"""Stories drawn by lot: the same seed always tells the same one.

A story begins with a cluster that forms, goes on with faults close upon each other, and ends with
everything mended: then all who live must end up in one view.  Some stories hit anybody at any time.
Others aim at the moments where protocols break: the view must change, and just when some message
about the change leaves, its sender is killed or the network splits; or messages take as long as
campaigns, so that several members run for the same term.

Clocks leap and drift, but count the time in which a process is stopped: one that did not would
break what ``docs/membership.md`` assumes.
"""

from __future__ import annotations

from random import Random

from potluck.testing.scenario import Scenario

__all__ = ["random_story"]

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
_CAMPAIGNS = "Canvass Leaning VoteRequest Vote Vote Propose Accepted Accepted Commit".split()
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
        lines = [f"nodes {' '.join(self._names)}", self._split("|"), "founders 1"]
        if name := self._deserter:  # it has trained for longer, and messages take their time
            others = " ".join(other for other in self._names if other != name)
            lines = ["delay 0.05 to 0.2", "founders 1", f"nodes {name}", "wait 2"]
            lines += [f"nodes {others}", self._away(name)]
        return [*lines, f"wait {self._chance.uniform(1.0, 2.0):.3f}", "heal"]

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
            lines += [cut, f"after {chance.uniform(2.0, 3.5):.2f} continue {self._one()}"]
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
        """What is broken stays so for long: whoever is active must be able to work."""
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
