"""Cluster stories as text: who is there, what happens to them, and what is expected to come of it.

::

    # The third of three is killed: the others go on without it.
    nodes a b c
    within 3 expect a b c in one view
    kill c
    within 2 expect a b in one view
    for 1 expect a b in one view

Every line is an action, and may begin with when it takes place:

======================  ==================================================================
``at 2.5``              so many seconds after the beginning
``after 0.5``           so many seconds after the line before
``when a sends Commit`` just before that message leaves, once; the lines below do not wait
``within 3``            for an expectation: it must become true within so many seconds
``for 2``               for an expectation: it must hold for so many seconds from now on
======================  ==================================================================

``docs/testing.md`` lists the actions and expectations.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from potluck.errors import DistributedError

__all__ = ["Action", "Scenario", "ScenarioError", "Step", "Timing", "Verb"]


class ScenarioError(DistributedError, ValueError):
    """A line of a story cannot be understood, or an expectation did not come true."""


class Timing(Enum):
    """When a step takes place."""

    NOW = ""
    AT = "at"
    AFTER = "after"
    WITHIN = "within"
    FOR = "for"
    WHEN = "when"


@dataclass(frozen=True, slots=True)
class Action:
    """What a line does: a verb and the parts of its sentence."""

    verb: str
    parts: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a story."""

    action: Action
    timing: Timing = Timing.NOW
    seconds: float = 0.0
    """Of every timing but NOW and WHEN."""
    sender: str = ""
    message: str = ""
    """The trigger of WHEN: a process and the name of the message it sends."""
    line: int = 0

    def __str__(self) -> str:
        """The line, as it could have been written."""
        if self.timing is Timing.NOW:
            return self.action.text
        if self.timing is Timing.WHEN:
            return f"when {self.sender} sends {self.message} {self.action.text}"
        return f"{self.timing.value} {self.seconds:g} {self.action.text}"


@dataclass(frozen=True, slots=True)
class Verb:
    """How the sentence of one verb is built: a pattern for all that follows it, and an example."""

    pattern: str
    example: str


NAMES = r"\w+(?: \w+)*"
SIDES = rf"({NAMES}) ([|>]) ({NAMES}?)"  # as few as possible: a word may follow
NUMBER = r"[0-9]+(?:\.[0-9]+)?"

VERBS = {
    "seed": Verb(r"(\d+)", "seed 7"),
    "quorum": Verb(r"(majority|any)", "quorum any"),
    "links": Verb(r"(attached|routed)", "links routed"),
    "trainers": Verb(r"(saving)?", "trainers saving"),
    "messages": Verb(r"(objects|bytes)", "messages bytes"),
    "beat": Verb(rf"({NUMBER}) (?:pausing after) ({NUMBER})", "beat 0.2 pausing after 1"),
    "founders": Verb(r"(\d+)", "founders 2"),
    "wants": Verb(r"(\w+) (\d+)", "wants b 3"),
    "nodes": Verb(rf"({NAMES})", "nodes a b c"),
    "node": Verb(r"(\w+) on (\w+)", "node d on a"),
    "observers": Verb(rf"({NAMES})", "observers o"),
    "cut": Verb(rf"{SIDES}( losing)?", "cut a b | c"),
    "heal": Verb(rf"(?:{SIDES})?", "heal a | b"),
    "kill": Verb(rf"({NAMES})", "kill a"),
    "unplug": Verb(rf"({NAMES})", "unplug a"),
    "restart": Verb(rf"({NAMES})", "restart a"),
    "clone": Verb(r"(\w+) as (\w+)", "clone a as x"),
    "pause": Verb(rf"({NAMES})", "pause a"),
    "suspend": Verb(rf"({NAMES})", "suspend a"),
    "wake": Verb(rf"({NAMES})", "wake a"),
    "jump": Verb(rf"(\w+) by ({NUMBER})", "jump a by 5"),
    "drift": Verb(rf"(\w+) to ({NUMBER})", "drift a to 1.1"),
    "loss": Verb(rf"({NUMBER})", "loss 0.1"),
    "delay": Verb(rf"({NUMBER}) to ({NUMBER})", "delay 0.001 to 0.02"),
    "flap": Verb(
        rf"{SIDES} down ({NUMBER}) up ({NUMBER}) times (\d+)", "flap a | b c down 2 up 0.5 times 3"
    ),
    "lag": Verb(rf"(\w+) > (\w+) ({NUMBER}) to ({NUMBER})", "lag a > b 0.05 to 0.3"),
    "slow": Verb(rf"(\w+) to ({NUMBER})", "slow a to 0.1"),
    "firewall": Verb(rf"({NAMES})", "firewall a"),
    "continue": Verb(r"(\w+)", "continue a"),
    "steps": Verb(r"(\w+) (\d+)", "steps a 100"),
    "leave": Verb(rf"({NAMES})", "leave a"),
    "abdicate": Verb(r"(\w+)", "abdicate a"),
    "wait": Verb(rf"({NUMBER})", "wait 2"),
    "calm": Verb("", "calm"),
    "settle": Verb("", "settle"),
    "expect": Verb(r"(.+)", "expect a b in one view"),
}

_PATTERNS = {verb: re.compile(spec.pattern) for verb, spec in VERBS.items()}
_TIMED = re.compile(rf"(at|after|within|for) ({NUMBER}) (.+)")
_TRIGGERED = re.compile(r"when (\w+) sends (\w+) (.+)")


@dataclass(frozen=True, slots=True)
class Scenario:
    r"""A story: steps in the order in which they were written.

    >>> story = Scenario.parse("nodes a b\nat 2 kill b\nwithin 2 expect a in one view")
    >>> [step.action.verb for step in story.steps], str(story.steps[1])
    (['nodes', 'kill', 'expect'], 'at 2 kill b')
    """

    steps: tuple[Step, ...]
    title: str = ""

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """Read a story; raises :class:`ScenarioError` with the line that is not understood."""
        steps, title = [], ""
        for number, raw in enumerate(text.splitlines(), 1):
            line, _, comment = raw.partition("#")
            if not (line := line.strip()):
                title = title or comment.strip()
                continue
            steps.append(_step(line, number))
        return cls(tuple(steps), title)

    @classmethod
    def load(cls, path: Path) -> Scenario:
        """Read a story from a file."""
        return cls.parse(path.read_text(encoding="utf-8"))

    def without(self, index: int) -> Scenario:
        """The same story without one of its steps."""
        return Scenario((*self.steps[:index], *self.steps[index + 1 :]), self.title)

    def __str__(self) -> str:
        """The story as text, which :meth:`parse` reads again."""
        lines: Iterable[str] = map(str, self.steps)
        return "\n".join([f"# {self.title}", *lines] if self.title else lines)


def _step(line: str, number: int) -> Step:
    if match := _TIMED.fullmatch(line):
        timing, seconds, rest = Timing(match[1]), float(match[2]), match[3]
        action = _action(rest, number)
        if (timing in {Timing.WITHIN, Timing.FOR}) and action.verb != "expect":
            raise ScenarioError(
                f"Line {number}: '{timing.value} {match[2]}' goes with an expectation; '{rest}' "
                f"is none.  Write 'at' or 'after' for something that shall happen."
            )
        return Step(action, timing, seconds, line=number)
    if match := _TRIGGERED.fullmatch(line):
        action = _action(match[3], number)
        return Step(action, Timing.WHEN, sender=match[1], message=match[2], line=number)
    return Step(_action(line, number), line=number)


def _action(text: str, number: int) -> Action:
    verb, _, rest = text.partition(" ")
    spec = VERBS.get(verb)
    if spec is None:
        guess = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean '{guess[0]}'?" if guess else f"known are: {', '.join(VERBS)}."
        raise ScenarioError(f"Line {number}: nobody knows how to '{verb}'; {hint}")
    match = _PATTERNS[verb].fullmatch(rest.strip())
    if match is None:
        raise ScenarioError(
            f"Line {number}: '{text}' is not understood; the verb is used like this: {spec.example}"
        )
    return Action(verb, tuple(part or "" for part in match.groups()), text)
