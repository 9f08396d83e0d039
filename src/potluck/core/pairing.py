"""Pairing: two machines that share nothing but a short code become members of one namespace.

``potluck pair`` drives a :class:`PairingHost` and shows its code; ``potluck pair CODE`` drives a
:class:`PairingGuest`.  Both are pure: bytes and the time in, effects out, chance and keys passed
in.  The messages are listed in :mod:`potluck.core.pairing_messages`.

What holds, as long as the code reaches only the right person:

* Someone who listens learns neither the code nor the secret, now or later: SPAKE2 leaves nothing
  to search through.  He does see both ids and display names, which discovery shows as well.
* Someone in the middle has one guess in each exchange.  The host allows three, the guest starts
  one for each time a person types the code; neither side completes on a wrong guess.
* Each side proves knowledge of the code and possession of its node key, in this very exchange:
  what was recorded elsewhere or sent by ourselves fails.  The host offers the namespace only after
  the guest's proof, the guest counts itself in only after the host has written it down.
* A stranger can use up the three tries, so that a new code is needed; he gains nothing by it.
"""

from __future__ import annotations

from potluck.core.cards import Card, Signer, Verifier, clean_name
from potluck.core.pairing_adoption import (
    Adoption,
    AlreadyMember,
    Ask,
    Belonging,
    Replace,
    decide_adoption,
)
from potluck.core.pairing_code import InvalidCode, PairingCode, new_code, parse_code
from potluck.core.pairing_effects import (
    Effect,
    Ended,
    HangUp,
    Namespace,
    Offered,
    Paired,
    Send,
    TryFailed,
)
from potluck.core.pairing_guest import PairingGuest
from potluck.core.pairing_host import PairingHost

__all__ = [
    "Adoption",
    "AlreadyMember",
    "Ask",
    "Belonging",
    "Card",
    "Effect",
    "Ended",
    "HangUp",
    "InvalidCode",
    "Namespace",
    "Offered",
    "Paired",
    "PairingCode",
    "PairingGuest",
    "PairingHost",
    "Replace",
    "Send",
    "Signer",
    "TryFailed",
    "Verifier",
    "clean_name",
    "decide_adoption",
    "new_code",
    "parse_code",
]
