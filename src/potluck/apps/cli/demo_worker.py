"""One rank of the demo, in a process of its own: reads orders, trains, writes news.

Started by the demo as ``python -m potluck.apps.cli.demo_worker SEED``.  It ends when told to, when
something fails, or when its orders end because the demo itself has gone.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import sys
import threading
import time

import numpy as np

from potluck import Backend, DistributedError, PeerLost, SimulatedBackend, TcpBackend
from potluck.apps.cli.demo_messages import (
    Failed,
    Finished,
    Form,
    Lost,
    Meeting,
    News,
    Order,
    Progress,
    decode_order,
    encode_line,
)
from potluck.apps.cli.demo_model import Array, Model, spirals
from potluck.apps.cli.demo_ring import Ring, Traffic

__all__ = ["main"]

POINTS, UNSEEN_POINTS = 2048, 1000
"""Points to learn from, all ranks together, and points for the accuracy at the end."""

NEWS_EVERY = 0.1
"""Seconds between two lines of progress."""

FORMING, ORDERS = 20.0, 60.0
"""Seconds a group may take to form, and seconds without an order after which a rank leaves."""


class Worker:
    """Keeps the model from one group to the next."""

    def __init__(self, seed: int, orders: queue.SimpleQueue[Order]) -> None:
        self._orders = orders
        self._model = Model(seed)
        self._points, self._labels = spirals(POINTS, seed)
        self._unseen = spirals(UNSEEN_POINTS, seed + 1)
        self._traffic = Traffic()

    def run(self) -> None:
        """Carry out orders until there are no more."""
        order = self._orders.get(timeout=ORDERS)
        while isinstance(order, Form):
            with _form_group(order) as backend:
                try:
                    tell(self._train(order, Ring(backend, self._traffic)))
                except PeerLost as error:
                    now = time.monotonic()
                    if error.rank is None:
                        raise
                    tell(Lost(error.rank, str(error), now, self._model.step))
                # The old group stays open until the next order: by then all survivors have seen
                # the loss with their own eyes, and not one another's leaving.
                order = self._orders.get(timeout=ORDERS)

    def _train(self, order: Form, ring: Ring) -> Finished:
        """Average gradients step by step until the time is up."""
        model = self._model
        ring.share(model.state, order.source)
        model.step = order.step
        mine = slice(order.rank, None, order.world_size)  # every n-th point is this rank's
        points, labels = self._points[mine], self._labels[mine]
        # Behind the gradient: the loss, and how many ranks say that the time is up.
        total = np.empty(model.size + 2, np.float32)
        ends = None if order.seconds is None else time.monotonic() + order.seconds
        reporter = _Reporter(self._traffic)
        while True:
            own_loss = model.gradient(points, labels, total[:-2])
            total[-2:] = own_loss, ends is not None and time.monotonic() >= ends
            ring.add_up(total)
            loss = float(total[-2]) / POINTS
            model.update(total[:-2] / np.float32(POINTS))
            over = bool(total[-1] > 0)
            first = model.step == order.step + 1
            reporter.report(model.step, loss, own_loss / len(points), now=first or over)
            if over:
                return self._finished(loss)

    def _finished(self, loss: float) -> Finished:
        parameters: Array = self._model.state[0]
        fingerprint = hashlib.blake2b(parameters.tobytes(), digest_size=8).hexdigest()
        accuracy = self._model.accuracy(*self._unseen)
        return Finished(self._model.step, loss, accuracy, fingerprint)


class _Reporter:
    """Tells how training goes, not too often."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._last = time.monotonic(), traffic.sent, traffic.messages

    def report(self, step: int, loss: float, own_loss: float, *, now: bool) -> None:
        """Tell if the last news is old enough, or ``now`` anyway."""
        moment, sent, messages = self._last
        elapsed = time.monotonic() - moment
        if elapsed < NEWS_EVERY and not now:
            return
        traffic = self._traffic
        tell(
            Progress(
                step=step,
                loss=loss,
                own_loss=own_loss,
                sent=traffic.sent,
                messages=traffic.messages,
                message_rate=(traffic.messages - messages) / elapsed,
                byte_rate=(traffic.sent - sent) / elapsed,
            )
        )
        self._last = time.monotonic(), traffic.sent, traffic.messages


def _form_group(order: Form) -> Backend:
    if order.world_size == 1:
        return SimulatedBackend.create_group(1)[0]
    master = order.master
    if master is None:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # a port that is free just now
            master = f"127.0.0.1:{listener.getsockname()[1]}"
        tell(Meeting(master))
    return TcpBackend(order.rank, order.world_size, master, timeout=FORMING)


def tell(news: News) -> None:
    """Write a line to the demo."""
    sys.stdout.buffer.write(encode_line(news))
    sys.stdout.buffer.flush()


def _listen(orders: queue.SimpleQueue[Order]) -> None:
    try:
        # No buffer: its lock, held by a thread that reads, would upset an interpreter that ends.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
            for line in stdin:
                orders.put(decode_order(line))
    finally:
        # Without the demo there is no reason to go on, whatever the training does at the moment.
        os._exit(1)


def main() -> int:
    """Be a rank."""
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        Worker(int(sys.argv[1]), orders).run()
    except DistributedError as error:
        tell(Failed(str(error)))
        return 1
    except queue.Empty:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
