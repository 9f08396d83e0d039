"""One node of the demo, in a process of its own: joins, trains elastically, and tells how it goes.

Started by the demo as ``python -m potluck.apps.cli.demo_node``.  What it does is what a training
script does, with :func:`potluck.join` and :class:`potluck.ElasticTrainer`.  It ends when told to,
when something fails, or when its orders end because the demo itself has gone.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import time
import traceback

import potluck
from potluck.apps.cli.demo_mail import Mail
from potluck.apps.cli.demo_messages import (
    Begun,
    Failed,
    Leave,
    Listening,
    Meet,
    Setup,
    Unfound,
)
from potluck.apps.cli.demo_training import Training
from potluck.apps.cli.demo_watching import Watcher
from potluck.net.namespace import NetworkNamespace, Protection

__all__ = ["main"]

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
