"""Who may open a connection, by the roster: what both sides decide between hello and answer.

The hello carries the hash of the roster that the dialler goes by.  Where both go by the same one
and the dialler is on it, nothing more is said.  Otherwise each tells its roster, takes what the
other tells (:mod:`potluck.core.roster_exchange`), and decides by what it knows then.

An earlier secret opens nothing but this exchange, and only for a member: it serves to bring back
somebody who was away, who gets the new secret at the end.  Whoever is no member under an earlier
secret is not even told the roster.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from potluck.core.handshake import Refused
from potluck.core.roster import Roster
from potluck.core.roster_exchange import Taken, Verdict
from potluck.vocabulary import NodeId

__all__ = [
    "TELL_ME",
    "Exchange",
    "Granted",
    "digest",
    "judge_hello",
    "judge_ourselves",
    "judge_peer",
    "judge_teller",
]

TELL_ME = bytes(32)
"""Stands for no roster: whoever is called tells its own in any case."""

_FOLLOWED = frozenset({Verdict.CURRENT, Verdict.MOVED_ON})


@dataclass(frozen=True, slots=True)
class Granted:
    """The caller belongs here; what it asks for is decided elsewhere."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tell our roster, and hear theirs first."""


def digest(roster: Roster) -> bytes:
    """What stands for a roster in a hello; equal for equal rosters."""
    return hashlib.sha256(b"potluck roster digest v1\0" + roster.to_bytes()).digest()


def judge_hello(
    roster: Roster | None, caller: NodeId, told: bytes, *, is_current: bool
) -> Granted | Exchange | Refused:
    """What the one who is called does with a hello.

    ``roster`` is ours, None where whoever has the secret belongs; ``told`` is the digest the caller
    gave; ``is_current`` says whether it came under the secret that holds now.
    """
    if roster is None:
        return Granted()
    if not roster.is_member(caller) and not (is_current and told):
        return _not_a_member(roster.explain(caller))
    # A caller that keeps no roster has nothing to tell; ours decides.
    if is_current and roster.is_member(caller) and told in {b"", digest(roster)}:
        return Granted()
    return Exchange()


def judge_peer(roster: Roster | None, peer: NodeId) -> Refused | None:
    """Whether a node is somebody to open a connection with, by our own roster."""
    if roster is None or roster.is_member(peer):
        return None
    return _not_a_member(roster.explain(peer))


def judge_teller(taken: Taken, peer: NodeId) -> Refused | None:
    """Whether a node that has told its roster is somebody to go on with."""
    if taken.verdict is Verdict.REFUSED:
        return _not_a_member(taken.reason)
    return judge_peer(taken.roster, peer)


def judge_ourselves(taken: Taken) -> Refused | None:
    """Whether we can follow the one who has told its roster."""
    if taken.verdict in _FOLLOWED:
        return None
    where = " `potluck members` there shows to what." if taken.verdict is Verdict.SIGN else ""
    return Refused(f"the two go by different rosters: {taken.reason}{where}")


def _not_a_member(reason: str) -> Refused:
    advice = "" if "pair" in reason else " Pair it first: `potluck pair`."
    return Refused(f"not a member: {reason}{advice}")
