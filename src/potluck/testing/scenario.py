"""Cluster stories as text: who is there, what happens to them, and what is expected to come of it.

::

    # The third of three is killed: the others continue without it.
    nodes a b c
    within 3 expect a b c in one view
    kill c
    within 2 expect a b in one view
    for 1 expect a b in one view

Every line is an action, and may begin with when it takes place:

======================  ==================================================================
``at 2.5``              2.5 seconds after the beginning
``after 0.5``           0.5 seconds after the line before
``when a sends Commit`` just before that message leaves, once; the lines below do not wait
``within 3``            for an expectation: it must become true within 3 seconds
``for 2``               for an expectation: it must hold for 2 seconds from now on
======================  ==================================================================

``docs/internals/testing.md`` lists the actions and expectations.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal, cast

from potluck.errors import DistributedError
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig, ClusterState, Note, Removed
from potluck.membership.messages import ProcessRole
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.network import LinkQuality
from potluck.testing.process import CoreFactory


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
class ScenarioAction:
    """What a line does: a verb and the parts of its sentence."""

    verb: str
    parts: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class ScenarioStep:
    """One line of a story."""

    action: ScenarioAction
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

    steps: tuple[ScenarioStep, ...]
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


def _step(line: str, number: int) -> ScenarioStep:
    if match := _TIMED.fullmatch(line):
        timing, seconds, rest = Timing(match[1]), float(match[2]), match[3]
        action = _action(rest, number)
        if (timing in {Timing.WITHIN, Timing.FOR}) and action.verb != "expect":
            raise ScenarioError(
                f"Line {number}: '{timing.value} {match[2]}' goes with an expectation; '{rest}' "
                f"is none.  Write 'at' or 'after' for something that shall happen."
            )
        return ScenarioStep(action, timing, seconds, line=number)
    if match := _TRIGGERED.fullmatch(line):
        action = _action(match[3], number)
        return ScenarioStep(action, Timing.WHEN, sender=match[1], message=match[2], line=number)
    return ScenarioStep(_action(line, number), line=number)


def _action(text: str, number: int) -> ScenarioAction:
    verb, _, rest = text.partition(" ")
    spec = VERBS.get(verb)
    if spec is None:
        guess = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean '{guess[0]}'?" if guess else f"known are: {', '.join(VERBS)}."
        raise ScenarioError(f"Line {number}: unknown action '{verb}'; {hint}")
    match = _PATTERNS[verb].fullmatch(rest.strip())
    if match is None:
        raise ScenarioError(f"Line {number}: '{text}' cannot be parsed; example: {spec.example}")
    return ScenarioAction(verb, tuple(part or "" for part in match.groups()), text)


# --------------------------------------------------------------------------------------------------
# What a story can expect of its cluster: conditions as short sentences.
#
# ========================  =======================================================================
# ``a b c in one view``     exactly these are at work in one view
# ``all in one view``       all living processes but observers are at work in one view
# ``a b together``          these are at work in one view, perhaps with others
# ``a paused``              also ``active``, ``joining`` and ``gone`` (dead or left); several names
# ``a leads b``             rank 0 of the view of b is a
# ``a was removed``         it learned that it was excluded, since its last start
# ``a says "no quorum"``    these words are in its present reason, or in a note since its last start
# ``a trained at least 20`` this many steps are in its state
# ``a b await c``           their training waits for c, which may have its state
# ``a b lost the state``    they said that all who had the state of the training are gone
# ``a gave up steps``       it counted some that it lost in a merge, since its last start
# ``not …``                 the opposite of any of these
# ========================  =======================================================================

Condition = Callable[[], bool]

_STATES = {
    "active": ClusterState.ACTIVE,
    "paused": ClusterState.PAUSED,
    "joining": ClusterState.JOINING,
    "gone": ClusterState.LEFT,
}


def _one_view(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return cluster.in_one_view(*match[1].split())


def _all(cluster: SimulatedCluster, _: re.Match[str]) -> bool:
    return cluster.invariants.why_not_converged() is None


def _together(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    names = match[1].split()
    views = {cluster.view_of(name) for name in names}
    return (
        len(views) == 1
        and None not in views
        and all(cluster.state_of(name) is ClusterState.ACTIVE for name in names)
    )


def _in_state(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return all(cluster.state_of(name) is _STATES[match[2]] for name in match[1].split())


def _leads(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    view = cluster.view_of(match[2])
    return view is not None and view.leader == cluster.place(match[1]).process


def _was_removed(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return any(isinstance(effect, Removed) for effect in cluster.place(match[1]).told)


def _says(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    place = cluster.place(match[1])
    reason = place.core.reason if place.core is not None else ""
    notes = (str(effect.event) for effect in place.told if isinstance(effect, Note))
    return match[2] in reason or any(match[2] in note for note in notes)


def _trained(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    trainer = cluster.trainer_of(match[1])
    return trainer is not None and trainer.value.depth >= int(match[2])


def _await(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    trainers = map(cluster.trainer_of, match[1].split())
    past = cluster.place(match[2]).past
    return all(each is not None and not past.isdisjoint(each.awaited) for each in trainers)


def _lost(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    trainers = map(cluster.trainer_of, match[1].split())
    return all(each is not None and each.is_lost for each in trainers)


def _gave_up(cluster: SimulatedCluster, match: re.Match[str]) -> bool:
    return cluster.place(match[1]).process in cluster.invariants.step_log.losers


_CONDITIONS: tuple[
    tuple[re.Pattern[str], Callable[[SimulatedCluster, re.Match[str]], bool]], ...
] = (
    (re.compile(r"all in one view"), _all),
    (re.compile(rf"({NAMES}) in one view"), _one_view),
    (re.compile(rf"({NAMES}) together"), _together),
    (re.compile(r"(\w+) leads (\w+)"), _leads),
    (re.compile(r"(\w+) was removed"), _was_removed),
    (re.compile(r'(\w+) says "([^"]+)"'), _says),
    (re.compile(r"(\w+) trained at least (\d+)"), _trained),
    (re.compile(r"(\w+) gave up steps"), _gave_up),
    (re.compile(rf"({NAMES}) awaits? (\w+)"), _await),
    (re.compile(rf"({NAMES}) lost the state"), _lost),
    (re.compile(rf"({NAMES}) (active|paused|joining|gone)"), _in_state),
)


def condition(cluster: SimulatedCluster, text: str) -> Condition:
    """A question to the cluster that is true when the sentence is."""
    if text.startswith("not "):
        positive = condition(cluster, text.removeprefix("not "))
        return lambda: not positive()
    for pattern, holds in _CONDITIONS:
        if match := pattern.fullmatch(text):
            found = match
            return lambda: holds(cluster, found)
    raise ScenarioError(
        f"Unknown expectation '{text}'.  Try one of: a b in one view; a b together; a paused; "
        f"a leads b; a was removed; a says \"words\"; or one of them after 'not'."
    )


# --------------------------------------------------------------------------------------------------
# Plays a story: turns its lines into what happens to a simulated cluster.

_SETTINGS = frozenset({"seed", "quorum", "beat", "founders"})


def play(
    scenario: Scenario,
    *,
    core: CoreFactory = ClusterCore,
    tell: Callable[[str], None] | None = None,
) -> SimulatedCluster:
    """Play a story to its end and hand back the cluster as it is then.

    Raises :class:`~potluck.testing.invariants.Violation` where an invariant is broken, and
    :class:`ScenarioError` where an expectation does not come true.  ``tell`` receives the trace,
    line by line.
    """
    seed, config = _settings(scenario)
    cluster = SimulatedCluster(seed, config=config, core=core, tell=tell)
    for step in scenario.steps:
        if step.action.verb not in _SETTINGS:
            _take(cluster, step)
    return cluster


def _settings(scenario: Scenario) -> tuple[int, ClusterConfig]:
    """What is said about the cluster as a whole, wherever in the story."""
    seed, config = 0, ClusterConfig()
    for action in (step.action for step in scenario.steps):
        match action.verb:
            case "seed":
                seed = int(action.parts[0])
            case "quorum":
                quorum = cast("Literal['majority', 'any']", action.parts[0])
                config = replace(config, quorum=quorum)
            case "founders":
                config = replace(config, min_nodes=int(action.parts[0]))
            case "beat":
                beat, pause = map(float, action.parts)
                patience = min(pause, max(2 * beat, 0.6 * pause))
                health = replace(
                    config.health, interval=beat, least_patience=patience, pause_after=pause
                )
                config = replace(config, health=health)
    return seed, config


def _take(cluster: SimulatedCluster, step: ScenarioStep) -> None:
    match step.timing:
        case Timing.AT:
            cluster.clock.advance_to(step.seconds)
        case Timing.AFTER:
            cluster.run(step.seconds)
        case Timing.WHEN:
            cluster.when_sends(step.sender, step.message, lambda: _act(cluster, step.action))
            return
        case Timing.WITHIN | Timing.FOR:
            _expect(cluster, step)
            return
    if step.action.verb == "expect":
        _expect(cluster, step)
    else:
        _act(cluster, step.action)


def _expect(cluster: SimulatedCluster, step: ScenarioStep) -> None:
    holds = condition(cluster, step.action.parts[0])
    if step.timing is Timing.FOR:
        is_met = not cluster.run_until(lambda: not holds(), within=step.seconds)
    else:
        is_met = cluster.run_until(holds, within=step.seconds * (step.timing is Timing.WITHIN))
    cluster.tell("", f"{step}: {'yes' if is_met else 'NO'}")
    if not is_met:
        raise ScenarioError(
            f"Line {step.line}: '{step}' is not so {cluster.clock.now:.3f} s after the beginning; "
            f"instead: {cluster.summary()}"
        )


def _act(cluster: SimulatedCluster, action: ScenarioAction) -> None:
    do = _ACTIONS.get(action.verb)
    if do is None:
        raise ScenarioError(f"'{action.text}' cannot happen at a message")
    do(cluster, *action.parts)


def _cut(cluster: SimulatedCluster, left: str, how: str, right: str, losing: str) -> None:
    cluster.cut(left.split(), right.split(), one_way=how == ">", keep=not losing)


def _flap(cluster: SimulatedCluster, left: str, _: str, right: str, *rhythm: str) -> None:
    sides = left.split(), right.split()
    down, up, times = rhythm
    cluster.flap(*sides, down=float(down), up=float(up), times=int(times))


def _lag(cluster: SimulatedCluster, source: str, target: str, shortest: str, longest: str) -> None:
    cluster.lag(source, target, float(shortest), float(longest))


def _write_bytes(cluster: SimulatedCluster, what: str) -> None:
    for place in cluster.places.values():
        place.writes_bytes = what == "bytes"


def _route(cluster: SimulatedCluster, how: str) -> None:
    cluster.dialling.is_routed = how == "routed"


def _lose(cluster: SimulatedCluster, share: str) -> None:
    cluster.shape(replace(cluster.network.quality, loss=float(share)))


def _delay(cluster: SimulatedCluster, shortest: str, longest: str) -> None:
    loss = cluster.network.quality.loss
    cluster.shape(LinkQuality(float(shortest), float(longest), loss))


_ACTIONS: dict[str, Callable[..., None]] = {
    "nodes": lambda cluster, names: cluster.start(*names.split()),
    "observers": lambda cluster, names: cluster.start(*names.split(), role=ProcessRole.OBSERVER),
    "node": lambda cluster, name, on: cluster.start_on(name, cluster.place(on).host),
    "clone": lambda cluster, of, name: cluster.start_on(name, name, node=cluster.place(of).host),
    "kill": lambda cluster, names: cluster.kill(*names.split()),
    "unplug": lambda cluster, names: cluster.unplug(*names.split()),
    "restart": lambda cluster, names: cluster.restart(*names.split()),
    "pause": lambda cluster, names: cluster.pause(*names.split()),
    "suspend": lambda cluster, names: cluster.suspend(*names.split()),
    "wake": lambda cluster, names: cluster.wake(*names.split()),
    "leave": lambda cluster, names: cluster.leave(*names.split()),
    "abdicate": lambda cluster, name: cluster.step_down(name),
    "cut": _cut,
    "heal": lambda cluster, left, _, right: cluster.heal(left.split(), right.split()),
    "jump": lambda cluster, name, seconds: cluster.jump(name, float(seconds)),
    "drift": lambda cluster, name, rate: cluster.drift(name, float(rate)),
    "flap": _flap,
    "lag": _lag,
    "slow": lambda cluster, name, share: cluster.slow(name, float(share)),
    "firewall": lambda cluster, names: cluster.firewall(*names.split()),
    "continue": lambda cluster, name: cluster.continue_without_missing(name),
    "wants": lambda cluster, name, count: cluster.set_wanted(name, int(count)),
    "steps": lambda cluster, name, count: cluster.set_steps(name, int(count)),
    "loss": _lose,
    "delay": _delay,
    "links": _route,
    "trainers": lambda cluster, saving: cluster.train(saving=bool(saving)),
    "messages": _write_bytes,
    "wait": lambda cluster, seconds: cluster.run(float(seconds)),
    "calm": lambda cluster: cluster.calm(),
    "settle": lambda cluster: cluster.settle(),
}
