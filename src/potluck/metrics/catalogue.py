"""The catalogue: every metric that is shown to the outside, with its name, unit and meaning.

One table from which the exposition reads and ``docs/metrics.md`` is checked.  Names, units and
kinds are as Prometheus wants them.
"""

from __future__ import annotations

from potluck.metrics.catalogue_cluster import MEMBERSHIP, PEERS
from potluck.metrics.catalogue_work import COLLECTIVES, RPC, TRAINING
from potluck.metrics.families import Family, one

__all__ = ["CATALOGUE", "SECTIONS"]

PROCESS = (
    Family(
        "potluck_uptime_seconds",
        "gauge",
        "Seconds since this process began to count.",
        one(lambda snapshot: snapshot.uptime),
    ),
)

SECTIONS = {
    "Collectives": COLLECTIVES,
    "Peers": PEERS,
    "Membership and discovery": MEMBERSHIP,
    "Remote calls": RPC,
    "Training": TRAINING,
    "The process": PROCESS,
}
"""By what they are about."""

CATALOGUE = tuple(family for section in SECTIONS.values() for family in section)
"""Everything that there is, in the order in which it is shown."""
