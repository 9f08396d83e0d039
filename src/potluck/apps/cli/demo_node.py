"""One node of the demo, in a process of its own: joins, trains elastically, and tells how it goes.

Started by the demo as ``python -m potluck.apps.cli.demo_node``.  What it does is what a training
script does, with :func:`potluck.join` and :class:`potluck.ElasticTrainer`.  It ends when told to,
when something fails, or when its orders end because the demo itself has gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

import potluck
from potluck import Cluster, ClusterEvent, ViewChange
from potluck._process import Closing
from potluck.apps.cli.demo_messages import (
    Begun,
    Committed,
    Failed,
    Finish,
    Finished,
    Happened,
    Leave,
    LinkLine,
    Listening,
    Meet,
    News,
    Order,
    Progress,
    Setup,
    Unfound,
    decode_order,
    encode_line,
)
from potluck.collective.executor import FAST, QUICKEST
from potluck.identity.namespace import NetworkNamespace, Protection
from potluck.membership.events import MembershipChange, MembershipEvent

# --------------------------------------------------------------------------------------------------
# A node's mail: orders come in by one pipe, news go out by another, neither holds up the training.
#
# News are written by a thread of their own: whoever tells something, the control thread of the node
# included, never waits for the demo to read it.

CLOSING = 5.0
"""Seconds for the last news to be read."""


class Mail(Closing):
    """Orders and news of one node; a context manager."""

    def __init__(self, orders: int, news: int) -> None:
        self._from, self._to = orders, news
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._finish = threading.Event()
        self._writer = threading.Thread(target=self._write, name="demo-news", daemon=True)

    def __enter__(self) -> Self:
        """Begin to listen."""
        threading.Thread(target=self._listen, name="demo-orders", daemon=True).start()
        self._writer.start()
        return self

    def close(self) -> None:
        """Have all news written."""
        self._news.put(None)
        self._writer.join(CLOSING)

    @property
    def may_finish(self) -> bool:
        """Whether the demo has said that nothing more will happen."""
        return self._finish.is_set()

    def next_order(self, timeout: float) -> Order:
        """The next order that is to be waited for; raises ``queue.Empty``."""
        return self._orders.get(timeout=timeout) if timeout else self._orders.get_nowait()

    def tell(self, news: News) -> None:
        """Write a line to the demo; at once, from any thread."""
        self._news.put(news)

    def _listen(self) -> None:
        try:
            # No buffer: its lock, held by a thread that reads, would upset a process that ends.
            with open(self._from, "rb", buffering=0, closefd=False) as pipe:
                for line in pipe:
                    order = decode_order(line)
                    if isinstance(order, Finish):
                        self._finish.set()
                    else:
                        self._orders.put(order)
        finally:
            # Without the demo there is no reason to go on, whatever the training does now.
            os._exit(1)

    def _write(self) -> None:
        with open(self._to, "wb", buffering=0, closefd=False) as pipe:
            while (news := self._news.get()) is not None:
                try:
                    pipe.write(encode_line(news))
                except OSError:
                    return  # the demo has gone, and so do we in a moment


# --------------------------------------------------------------------------------------------------
# What the demo trains: a small network that tells two interleaved spirals apart, in plain numpy.
#
# Everything follows from the seed.  The state of a model is a tree of arrays, changed in place.

Array: TypeAlias = NDArray[np.floating]

HIDDEN = 256
"""Units in each of the two hidden layers: a gradient of 267 KB, a step of a few milliseconds."""

TURNS = 1.25
NOISE = 0.02
"""How far a spiral winds, and how much its points scatter around it."""

SPREAD = 4.0
"""How far the first layer's weights spread, so that some of its units bend within the spirals."""

RATE, FIRST_DECAY, SECOND_DECAY, TINY = 2e-3, 0.9, 0.99, 1e-8
"""The constants of Adam, the rule by which a gradient changes the parameters."""


def spirals(count: int, seed: int, dtype: DTypeLike = np.float32) -> tuple[Array, Array]:
    """Points of two interleaved spirals, and which spiral each belongs to (0 or 1).

    >>> points, labels = spirals(6, seed=1)
    >>> points.shape, labels.ravel().tolist()
    ((6, 2), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    """
    source = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    radius = np.sqrt(source.uniform(0.05, 1.0, count))
    angle = radius * TURNS * 2 * np.pi + labels * np.pi
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    points += source.normal(0.0, NOISE, points.shape)
    return points.astype(dtype), labels.astype(dtype)[:, None]


class Model:
    """Two hidden layers, one output: the probability that a point is on spiral 1."""

    def __init__(self, seed: int, hidden: int = HIDDEN, dtype: DTypeLike = np.float32) -> None:
        shapes = [(2, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden, 1), (1,)]
        self._cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])
        self._shapes = shapes
        self.state: Array = np.zeros((3, self._cuts[-1]), dtype)
        """Parameters, and Adam's two running averages."""
        self._steps = np.zeros(1, np.int64)
        self._parameters = self._views(self.state[0])
        source = np.random.default_rng(seed)
        for weights in self._parameters[::2]:
            scale = SPREAD if weights.shape[0] == 2 else 1 / np.sqrt(weights.shape[0])  # noqa: PLR2004
            weights[...] = source.normal(0.0, scale, weights.shape)

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return int(self.state.shape[1])

    @property
    def tree(self) -> dict[str, Any]:
        """All there is to know, in arrays that stay the same ones."""
        return {"arrays": self.state, "steps": self._steps}

    @property
    def fingerprint(self) -> str:
        """A hash of the parameters: equal only if every bit is."""
        return hashlib.blake2b(self.state[0].tobytes(), digest_size=8).hexdigest()

    def _views(self, flat: Array) -> list[Array]:
        parts = np.split(flat, self._cuts[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _forward(self, points: Array) -> tuple[Array, Array, Array]:
        first, first_bias, second, second_bias, last, last_bias = self._parameters
        low = np.tanh(points @ first + first_bias)
        high = np.tanh(low @ second + second_bias)
        return low, high, high @ last + last_bias

    def gradient(self, points: Array, labels: Array, out: Array) -> float:
        """Write the gradient, summed over the points, to ``out``; return the summed loss."""
        low, high, score = self._forward(points)
        parts = self._views(out)
        error = 1 / (1 + np.exp(-score)) - labels
        for place, (below, weights) in enumerate(((high, 4), (low, 2), (points, 0))):
            np.matmul(below.T, error, out=parts[weights])
            np.sum(error, axis=0, out=parts[weights + 1])
            if place < 2:  # noqa: PLR2004 - the points themselves are not trained
                error = (error @ self._parameters[weights].T) * (1 - below * below)
        return _summed_loss(score, labels)

    def update(self, gradient: Array) -> None:
        """Take one step against the mean gradient."""
        self._steps += 1
        step = int(self._steps[0])
        parameters, first, second = self.state
        first += (1 - FIRST_DECAY) * (gradient - first)
        second += (1 - SECOND_DECAY) * (gradient * gradient - second)
        scale = RATE * np.sqrt(1 - SECOND_DECAY**step) / (1 - FIRST_DECAY**step)
        parameters -= scale * first / (np.sqrt(second) + TINY)

    def loss(self, points: Array, labels: Array) -> float:
        """The mean loss over these points."""
        return _summed_loss(self._forward(points)[2], labels) / len(points)

    def accuracy(self, points: Array, labels: Array) -> float:
        """The share of points put on the right spiral."""
        return float(np.mean((self._forward(points)[2] > 0) == (labels > 0.5)))  # noqa: PLR2004


def _summed_loss(score: Array, labels: Array) -> float:
    # log(1 + e^s) - y s, written so that a large score overflows nothing
    return float(np.sum(np.logaddexp(0, score) - labels * score))


# --------------------------------------------------------------------------------------------------
# A training of the demo as one node runs it: an elastic trainer on numpy arrays.

BATCH = 192
"""Points of all nodes together in one step."""

POINTS, UNSEEN = 12 * BATCH, 1000
"""Points to learn from, and points for the accuracy at the end."""

LAST = 10
"""The last tenth of the steps, and at least so many, show how much the loss wobbles."""

NEWS_EVERY, LINKS_EVERY = 0.1, 0.5
"""Seconds between two lines of progress, and between two looks at the links."""


class Training:
    """One run from the first parameters on; all nodes make the same ones from the seed."""

    def __init__(self, run: str, setup: Setup, cluster: potluck.Cluster, mail: Mail) -> None:
        self._run, self.cluster, self._mail = run, cluster, mail
        self._points, self._labels = spirals(POINTS, setup.seed)
        self._unseen = spirals(UNSEEN, setup.seed + 1)
        self._model = Model(setup.seed)
        self._sums = np.empty(self._model.size, np.float32)
        self._sampler = potluck.ElasticSampler(POINTS, seed=setup.seed)
        self._end = np.zeros(1, np.float32)  # part of the state: whoever gets that knows it, too
        state = potluck.TrainingState(model={**self._model.tree, "end": self._end})
        self.trainer = potluck.ElasticTrainer(
            cluster, state, self._apply, sampler=self._sampler, batch=BATCH
        )
        self._losses: list[float] = []
        self._weight = 0.0
        self._reporter = _Reporter(run, cluster, mail)

    @property
    def step_count(self) -> int:
        """Steps that are committed."""
        return self.trainer.step_count

    def start(self) -> None:
        """Meet the others, and get the state if they have begun."""
        self.trainer.start()

    def run(self, is_done: Callable[[int], bool], *, pace: float) -> None:
        """Train until one of the nodes finds that it is done, and tell the result.

        The wish to end is averaged like the gradients, so all nodes end after the same step.
        """
        began, due = time.monotonic(), time.monotonic()
        has_all = self.step_count == 0  # whether all steps are counted here
        epoch = 0
        while not self._end[0]:
            due = max(time.monotonic(), due + pace) if pace else 0.0
            indices = self.trainer.take()
            wants_to_end = is_done(self.step_count + 1)
            outcome = self.trainer.step(self._gradients(indices, wants_to_end=wants_to_end))
            self._weight += outcome.weight
            has_all = has_all and outcome.counted
            if self.trainer.position.epoch != epoch:
                epoch, now = self.trainer.position.epoch, time.monotonic()
                self._mail.tell(Committed(outcome.step, epoch, outcome.world_size, now))
            if self._losses:
                last = len(indices), self._losses[-1], bool(self._end[0])
                self._reporter.report(self.trainer, last)
            time.sleep(max(0.0, due - time.monotonic()))
        self._mail.tell(self._result(time.monotonic() - began, self._weight if has_all else 0.0))

    def _gradients(self, indices: Any, *, wants_to_end: bool) -> dict[str, Any]:
        count = max(1, len(indices))
        loss = self._model.gradient(self._points[indices], self._labels[indices], self._sums)
        return {
            "gradient": self._sums / np.float32(count),
            "loss": np.array([loss / count], np.float32),
            "end": np.array([wants_to_end], np.float32),
        }

    def _apply(self, mean: Any) -> None:
        """For committed steps alone, on every node with the same bits."""
        self._model.update(mean["gradient"])
        self._end[:] = mean["end"] > 0
        self._losses.append(float(mean["loss"][0]))

    def _result(self, seconds: float, weight: float) -> Finished:
        model, sampler = self._model, self._sampler
        last = self._losses[-max(LAST, self.step_count // LAST) :] or [0.0]
        return Finished(
            run=self._run,
            step=self.step_count,
            loss=model.loss(self._points, self._labels),
            wobble=max(last) - min(last),
            accuracy=model.accuracy(*self._unseen),
            fingerprint=model.fingerprint,
            samples=sampler.epoch * POINTS + POINTS - sampler.remaining,
            weight=weight,
            averaged=self._reporter.averaged,
            seconds=seconds,
        )


class _Reporter:
    """Tells how training goes, not too often."""

    def __init__(self, run: str, cluster: potluck.Cluster, mail: Mail) -> None:
        self._run, self._cluster, self._mail = run, cluster, mail
        self._told = self._looked = time.monotonic()
        self._step: int | None = None
        self._links: list[LinkLine] = []
        self._rates = 0, 0
        self._is_limit = False

    @property
    def averaged(self) -> int:
        """Bytes of the arrays that went through collectives in this process."""
        snapshot = self._cluster.metrics_snapshot()
        return sum(each.bytes_processed for each in snapshot.operations.values()) if snapshot else 0

    @property
    def _rate(self) -> float:
        snapshot = self._cluster.metrics_snapshot()
        return snapshot.all_reduce.bytes_per_second if snapshot else 0.0

    def report(self, trainer: potluck.ElasticTrainer, last: tuple[int, float, bool]) -> None:
        """Tell if the last news is old enough, or if this is the end."""
        now, (share, loss, is_over) = time.monotonic(), last
        elapsed = now - self._told
        if elapsed < NEWS_EVERY and not is_over and self._step is not None:
            return
        if now - self._looked >= LINKS_EVERY or self._step is None:
            self._look()
            self._looked = now
        step, before = trainer.step_count, self._step
        view, me = self._cluster.view, self._cluster.process
        rank = view.rank_of(me) if view is not None else None
        self._mail.tell(
            Progress(
                run=self._run,
                step=step,
                loss=loss,
                epoch=trainer.position.epoch,
                rank=-1 if rank is None else rank,
                share=share,
                averaged=self.averaged,
                rate=self._rate,
                speed=0.0 if before is None else (step - before) / elapsed,
                up=self._rates[0],
                down=self._rates[1],
                is_limit=self._is_limit,
                links=self._links,
            )
        )
        self._told, self._step = now, step

    def _look(self) -> None:
        """How the links are: heartbeats say how long, collectives how much."""
        self._links = [
            LinkLine(str(each.peer), each.status.value, each.reason, each.round_trip)
            for each in self._cluster.health.peers
        ]
        with contextlib.suppress(potluck.DistributedError):  # a view that ends just now
            links, view = self._cluster.group.links, self._cluster.view
            rank = None if view is None else view.rank_of(self._cluster.process)
            if rank is not None and rank < len(links.up):
                self._is_limit = min(links.up[rank], links.down[rank]) < QUICKEST
                self._rates = min(links.up[rank], FAST), min(links.down[rank], FAST)


# --------------------------------------------------------------------------------------------------
# What a node of the demo passes on of its cluster's events, as soon as it can.

INSTALLED = MembershipChange.INSTALLED.value


class Watcher(Closing):
    """Passes on events of membership, each once; a context manager."""

    def __init__(self, cluster: Cluster, mail: Mail) -> None:
        self._cluster = cluster
        self._mail = mail
        self._lock = threading.Lock()
        self._last: ClusterEvent | None = None

    def __enter__(self) -> Self:
        """Begin."""
        self._stop = self._cluster.on_view_change(self._changed)
        self.look()
        return self

    def close(self) -> None:
        """End."""
        self._stop()

    def look(self) -> None:
        """Tell what has happened since the last look."""
        with self._lock:
            events = self._cluster.events()
            news = []
            for event in reversed(events):
                if event is self._last:
                    break
                news.append(event)
            self._last = events[-1] if events else None
            for event in reversed(news):
                self._tell(event)

    def _changed(self, change: ViewChange) -> None:
        """Another view: what led to it, and then itself."""
        now = time.monotonic()
        self.look()
        self._mail.tell(Happened(INSTALLED, str(change), "", change.view.epoch, now))

    def _tell(self, event: ClusterEvent) -> None:
        told = event.event
        if isinstance(told, MembershipEvent) and told.change is not MembershipChange.INSTALLED:
            about = "" if told.process is None else str(told.process)
            epoch = 0 if told.view is None else told.view.epoch
            ago = time.time() - event.time  # the demo's clock is the one that never jumps
            at = time.monotonic() - ago
            self._mail.tell(Happened(told.change.value, str(told), about, epoch, at))


# --------------------------------------------------------------------------------------------------

FINDING, MEETING = 6.0, 30.0
"""Seconds in which nodes find each other by multicast, and in which they are given up for good."""

LOOKING = 0.1
"""Seconds between two looks whether addresses have come."""

ORDERS = 120.0
"""Seconds without an order after which a node leaves: no demo takes longer."""


class Node:
    """One process: a cluster, and the trainings on it."""

    def __init__(self, setup: Setup, mail: Mail) -> None:
        self._setup = setup
        self._mail = mail

    def run(self) -> None:
        """Everything from the first hello to the goodbye."""
        mail, setup = self._mail, self._setup
        with self._meet() as cluster, Watcher(cluster, mail):
            story = Training("story", setup, cluster, mail)
            began = time.monotonic()
            story.start()
            self._tell_begun(story, time.monotonic() - began)
            story.run(lambda step: mail.may_finish and step >= setup.steps, pace=setup.pace)
            # The same once more, with nothing in its way.  A node that has come back takes part
            # from the first step on, so this run has as many nodes as the story began with.
            again = Training("undisturbed", setup, cluster, mail)
            again.start()
            again.run(lambda step: step >= story.step_count, pace=0.0)
            while not isinstance(mail.next_order(ORDERS), Leave):
                pass

    def _tell_begun(self, story: Training, seconds: float) -> None:
        sync, position = story.trainer.last_sync, story.trainer.position
        received = 0 if sync is None else sync.nbytes
        view = story.cluster.view
        epoch = view.epoch if view is not None else position.epoch
        self._mail.tell(Begun(epoch, position.step, received, seconds, time.monotonic()))

    # -- meeting the others --------------------------------------------------------------------

    def _meet(self) -> potluck.Cluster:
        """A cluster with everybody in it: found by multicast, or by addresses given."""
        setup, mail = self._setup, self._mail
        backend = self._open(peers=setup.peers, port=_free_port())
        try:
            mail.tell(Listening(str(backend.process), backend.port))
            limit = FINDING if setup.multicast and not setup.peers else 0.0
            if not setup.peers and not self._has_met(backend, limit):
                mail.tell(Unfound("multicast DNS finds nobody"))
                peers = self._await_addresses(backend)
                if peers:
                    port = backend.port
                    backend.close()
                    backend = self._open(peers=peers, port=port)
                    mail.tell(Listening(str(backend.process), backend.port))
            backend.wait_for_peers(setup.nodes - 1, MEETING)
        except BaseException:
            backend.close()
            raise
        return potluck.Cluster.with_metrics(backend)

    def _has_met(self, backend: potluck.AutoDiscoveryBackend, within: float) -> bool:
        try:
            backend.wait_for_peers(self._setup.nodes - 1, within)
        except potluck.Timeout:
            return False
        return True

    def _await_addresses(self, backend: potluck.AutoDiscoveryBackend) -> list[str]:
        """Those that the demo tells once nobody has found anybody; none if we meet after all."""
        deadline = time.monotonic() + MEETING
        while time.monotonic() < deadline and not self._has_met(backend, LOOKING):
            with contextlib.suppress(queue.Empty):
                order = self._mail.next_order(0.0)
                if isinstance(order, Meet):
                    return order.peers
        return []

    def _open(self, peers: list[str], port: int) -> potluck.AutoDiscoveryBackend:
        setup = self._setup
        namespace = NetworkNamespace(
            "demo", bytes.fromhex(setup.secret), protection=Protection.PASSPHRASE
        )
        config = potluck.AutoDiscoveryConfig(
            job="demo",
            name=setup.name,
            namespace=namespace,
            min_nodes=setup.nodes,
            multicast=setup.multicast,
            neighbours=False,  # every node has a home of its own, like a machine
            known=False,
            peers=peers,
            port=port,
        )
        return potluck.AutoDiscoveryBackend(config)


def _free_port() -> int:
    """Any but the usual ones, which are left to those who are looked for there."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> int:
    """Be a node."""
    with Mail(sys.stdin.fileno(), sys.stdout.fileno()) as mail:
        try:
            setup = mail.next_order(ORDERS)
            if not isinstance(setup, Setup):
                msg = f"The first order says who one is, unlike {setup}"
                raise TypeError(msg)
            Node(setup, mail).run()
        except queue.Empty:
            return 1
        except Exception as error:  # noqa: BLE001 - the demo shows it
            mail.tell(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
