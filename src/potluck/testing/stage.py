"""Plays a story: turns its lines into what happens to a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast

from potluck.core.cluster import ClusterConfig, ClusterCore
from potluck.core.cluster_cards import Role
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.expectations import condition
from potluck.testing.network import LinkQuality
from potluck.testing.process import CoreFactory
from potluck.testing.scenario import Action, Scenario, ScenarioError, Step, Timing

__all__ = ["play"]

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


def _take(cluster: SimulatedCluster, step: Step) -> None:
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


def _expect(cluster: SimulatedCluster, step: Step) -> None:
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


def _act(cluster: SimulatedCluster, action: Action) -> None:
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
    "observers": lambda cluster, names: cluster.start(*names.split(), role=Role.OBSERVER),
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
