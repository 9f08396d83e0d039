"""Costs: what moving bytes takes, in whole nanoseconds, so that every rank computes the same.

The model is alpha-beta: a piece takes a latency that depends on the pair, and time for its bytes
that depends on the slower of the sender's up link and the receiver's down link.  To that comes
what the machines themselves need for each piece (a system call and some Python on either side) and
for adding it.  Links that nobody has measured yet count like the median of those that somebody
has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from potluck.vocabulary import LinkMatrix

__all__ = ["DEFAULT_LATENCY", "DEFAULT_RATE", "Costs", "Host", "Network", "completed"]

DEFAULT_RATE = 125_000_000
"""Bytes per second to assume when nothing at all is known: Ethernet with 1 Gbit/s."""

DEFAULT_LATENCY = 100_000
"""Nanoseconds to assume when nothing at all is known: a switch, and two kernels."""

SECOND = 1_000_000_000

Table: TypeAlias = npt.NDArray[np.int64]
"""A number for each pair, from row to column."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the machines need; the same numbers on all ranks."""

    piece: int = 12_000
    """Nanoseconds to send or to receive one piece, however short."""
    reduce_rate: int = 4_000_000_000
    """Bytes per second that are added to others."""


def completed(links: LinkMatrix) -> LinkMatrix:
    """The same links, with the median of the known in place of what is not known.

    >>> links = completed(LinkMatrix((8, 0), (0, 0), ((0, 5), (0, 0))))
    >>> links.up, links.latency
    ((8, 8), ((0, 5), (5, 0)))
    """
    size = range(links.size)
    if all(links.up) and all(links.down) and not any(row.count(0) > 1 for row in links.latency):
        return links
    rate = _median((*links.up, *links.down), DEFAULT_RATE)
    ups, downs = _median(links.up, rate), _median(links.down, rate)
    pairs = (links.latency[a][b] for a in size for b in size if a != b)
    usual = _median(pairs, DEFAULT_LATENCY)
    return LinkMatrix(
        tuple(up or ups for up in links.up),
        tuple(down or downs for down in links.down),
        tuple(
            tuple(
                0 if a == b else links.latency[a][b] or links.latency[b][a] or usual for b in size
            )
            for a in size
        ),
    )


def _median(numbers: Iterable[int], otherwise: int) -> int:
    known = sorted(number for number in numbers if number)
    return known[len(known) // 2] if known else otherwise


class Network:
    """The links of a group, complete and ready for arithmetic; made once for many plans."""

    def __init__(self, links: LinkMatrix) -> None:
        links = completed(links)
        self.size = links.size
        self.up, self.down, self.latency = links.up, links.down, links.latency
        self._slower = np.minimum.outer(
            np.array(links.up, np.int64), np.array(links.down, np.int64)
        )
        self._latency = np.array(links.latency, np.int64)

    @property
    def rates(self) -> list[int]:
        """Of each rank the slower direction."""
        return [min(both) for both in zip(self.up, self.down, strict=True)]

    def times(self, size: int) -> Table:
        """Nanoseconds for so many bytes from each to each; only nonsense on the diagonal."""
        table: Table = self._latency + size * SECOND // self._slower
        return table


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices for one group and one type of element."""

    network: Network
    itemsize: int = 4
    wide: int = 4
    """Bytes of an element of a partial sum."""
    piece: int = 1 << 18
    """Bytes that are moved and reduced at a time."""
    host: Host = Host()

    def pieces(self, size: int) -> int:
        """How many pieces so many bytes make."""
        return -(-size // self.piece)

    def up(self, rank: int, size: int) -> int:
        """Time for bytes on a rank's way out."""
        return size * SECOND // self.network.up[rank]

    def down(self, rank: int, size: int) -> int:
        """Time for bytes on a rank's way in."""
        return size * SECOND // self.network.down[rank]

    def flow(self, source: int, target: int, size: int) -> int:
        """Time for bytes between two ranks that have nothing else to do."""
        return size * SECOND // min(self.network.up[source], self.network.down[target])

    def hop(self, source: int, target: int, size: int) -> int:
        """Time until the first piece of so many bytes has come from one rank to another."""
        fill = self.flow(source, target, min(size, self.piece))
        return self.network.latency[source][target] + fill + 2 * self.host.piece

    def hops(self, size: int) -> Table:
        """What :meth:`hop` says for every pair, row by row; the diagonal is zero."""
        table: Table = self.network.times(min(size, self.piece)) + 2 * self.host.piece
        np.fill_diagonal(table, 0)
        return table

    def adding(self, size: int) -> int:
        """Time to add so many bytes to others."""
        return size * SECOND // self.host.reduce_rate
