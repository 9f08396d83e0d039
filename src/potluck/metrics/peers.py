"""Peers in metrics: who they are in a bounded number of labels, how they are, who is waited for.

A label is the name of a machine, not an id: those who restart keep theirs.  Only so many peers
have one; the others, and those who are gone, are counted together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from potluck.metrics.cells import OTHER, hold
from potluck.metrics.snapshot import PeerSnapshot

__all__ = ["MAX_PEERS", "PeerBook"]

MAX_PEERS = 64
"""Peers that have a label of their own."""

MAX_LABEL = 63
"""Characters of a label, as many as a part of a host name has."""

MAX_WATCHES = 64
"""Groups that count whom they wait for at once; of more, the oldest ones do it in vain."""


class PeerBook:
    """The peers of one process."""

    def __init__(self) -> None:
        self._labels: dict[Hashable, str] = {}
        self._health: dict[str, PeerSnapshot] = {}
        self._watches: list[tuple[Mapping[int, str], dict[int, float]]] = []
        self._settled: dict[str, float] = {}

    # -- labels ----------------------------------------------------------------------------------

    def label(self, peer: Hashable, name: str) -> str:
        """Under which label a peer is counted: its name, or a number behind it to tell two apart.

        >>> book = PeerBook()
        >>> book.label(1, "attic"), book.label(2, "attic"), book.label(1, "attic")
        ('attic', 'attic (2)', 'attic')
        """
        with hold():
            known = self._labels.get(peer)
            if known is not None:
                return known
            if len(self._labels) >= MAX_PEERS:
                return OTHER
            plain = "".join(each if each.isprintable() else "?" for each in name[:MAX_LABEL])
            label, taken, count = plain or "?", {*self._labels.values(), OTHER}, 1
            while label in taken:
                count += 1
                label = f"{plain} ({count})"
            self._labels[peer] = label
            return label

    def keep(self, peers: Iterable[Hashable]) -> None:
        """Forget all others: their labels are free, and what was counted for them is of others."""
        wanted = set(peers)
        with hold():
            gone = {label for peer, label in self._labels.items() if peer not in wanted}
            self._labels = {peer: each for peer, each in self._labels.items() if peer in wanted}
            for label in gone:
                self._health.pop(label, None)
                self._add(OTHER, self._settled.pop(label, 0.0))
            self._watches = [
                ({rank: OTHER if each in gone else each for rank, each in labels.items()}, waited)
                for labels, waited in self._watches
            ]

    # -- waiting ---------------------------------------------------------------------------------

    def watch(self, labels: Mapping[int, str], waited: dict[int, float]) -> dict[int, float]:
        """A group with these labels writes there how many seconds it has waited for each rank."""
        with hold():
            self._watches.append((dict(labels), waited))
            while len(self._watches) > MAX_WATCHES:
                self._settle(*self._watches.pop(0))
        return waited

    def release(self, waited: dict[int, float]) -> None:
        """A group is over."""
        with hold():
            for watch in [each for each in self._watches if each[1] is waited]:
                self._watches.remove(watch)
                self._settle(*watch)

    def _settle(self, labels: Mapping[int, str], waited: dict[int, float]) -> None:
        for rank, seconds in list(waited.items()):
            self._add(labels.get(rank, OTHER), seconds)

    def _add(self, label: str, seconds: float) -> None:
        if seconds:
            self._settled[label] = self._settled.get(label, 0.0) + seconds

    # -- how they are ----------------------------------------------------------------------------

    def see(self, peers: Iterable[PeerSnapshot]) -> None:
        """These are there now, and nobody else."""
        seen: dict[str, PeerSnapshot] = {}
        for each in peers:
            seen.setdefault(each.peer, each)
        with hold():
            self._health = seen

    def snapshot(self) -> list[PeerSnapshot]:
        """All of them, by rank and label, the others together at the end."""
        with hold():
            waited = dict(self._settled)
            for labels, seconds in self._watches:
                for rank, amount in list(seconds.items()):
                    label = labels.get(rank, OTHER)
                    waited[label] = waited.get(label, 0.0) + amount
            ranks = {label: rank for labels, _ in self._watches for rank, label in labels.items()}
            seen = dict(self._health)
        lines = [
            PeerSnapshot(
                peer=label,
                rank=-1 if label == OTHER else each.rank if each else ranks.get(label, -1),
                status=each.status if each else "",
                round_trip=each.round_trip if each else None,
                jitter=each.jitter if each else None,
                loss=each.loss if each else 0.0,
                waiting=waited.get(label, 0.0),
            )
            for label in {**waited, **seen}
            for each in (seen.get(label) if label != OTHER else None,)
        ]
        return sorted(lines, key=lambda one: (one.peer == OTHER, one.rank < 0, one.rank, one.peer))
