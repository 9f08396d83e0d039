"""Pairing: two machines and a short code, from the hello to the shared namespace."""

from __future__ import annotations

import pytest

from potluck.core.cards import Card, Verifier
from potluck.core.pairing import (
    Ended,
    Namespace,
    PairingGuest,
    Signer,
    parse_code,
)
from potluck.core.pairing_messages import (
    SEALED_LIMIT,
)
from potluck.net.identity import NodeIdentity, node_id
from support.machines import entropy
from support.pairing_table import (
    CODE,
    DESKTOP,
    HOME,
    LAPTOP,
    Table,
    make_host,
    only,
    reason_of,
)


def test_two_machines_with_the_same_code_end_in_one_namespace() -> None:
    """Both learn the other's name and id; the guest gets the secret and the roster with itself."""
    table = Table().run()
    host, guest = table.outcome("host"), table.outcome("guest")
    assert host is not None
    assert guest is not None
    assert (host.peer, guest.peer) == (LAPTOP.card, DESKTOP.card)
    assert guest.namespace == Namespace("home", HOME.secret, b"the roster with laptop")
    assert host.namespace == guest.namespace
    assert host.reason == '"laptop" joined "home".'
    assert guest.reason == 'This machine joined "home" through "desktop".'
    assert table.host.is_over
    assert table.guest.is_over


def test_it_works_with_real_keys() -> None:
    """The node identity's own functions fit the two doors."""
    ours, theirs = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    verifier = Verifier(node_id, NodeIdentity.verify)
    signers = [
        Signer(Card(who.id, who.public_key, name), who.sign)
        for name, who in (("desktop", ours), ("laptop", theirs))
    ]
    host = make_host(me=signers[0])
    host._verifier = verifier
    guest = PairingGuest(parse_code(CODE), signers[1], verifier=verifier, entropy=entropy(2))
    table = Table(host, guest).run()
    assert table.outcome("host") is not None
    assert table.outcome("guest") is not None


def test_the_host_has_stored_the_guest_before_the_guest_is_told() -> None:
    """Effects are carried out in order, and the outcome comes before the last message."""
    kinds = [type(effect).__name__ for effect in Table().run().host_effects]
    assert kinds == ["Send", "Send", "Send", "Paired", "Send", "HangUp"]


def test_the_guest_may_decline() -> None:
    """Both sides end without a pairing, and the code is not usable again."""
    table = Table(accepts=False).run()
    assert table.outcome("host") is None
    assert table.outcome("guest") is None
    assert reason_of(table.guest_effects) == 'You chose not to join "home".'
    assert only(Ended, table.host_effects).reason == '"laptop" chose not to join.'


def test_secrets_stay_out_of_what_may_be_logged() -> None:
    """Neither effects nor messages nor codes show a secret in their text."""
    table = Table().run()
    text = repr([table.host_effects, table.guest_effects, table.host.code])
    assert repr(HOME.secret)[2:-1] not in text
    assert "harbor" not in text


def test_nothing_secret_crosses_the_cable_in_the_clear() -> None:
    """Neither the secret, nor the words, nor the roster, nor the namespace's name."""
    table = Table().run()
    wire = b"".join(table.said["host"] + table.said["guest"])
    assert not any(
        part in wire for part in (HOME.secret, b"guitar", b"harbor", b"the roster", b"home")
    )


@pytest.mark.parametrize(
    ("name", "secret", "roster", "words"),
    [
        ("\x1b[2J", bytes(32), b"", "cannot be shown"),
        ("home", bytes(31), b"", "32 bytes"),
        ("home", bytes(32), bytes(SEALED_LIMIT), "too large"),
    ],
)
def test_a_namespace_that_cannot_travel_is_refused_at_once(
    name: str, secret: bytes, roster: bytes, words: str
) -> None:
    """The fault is shown where it is made, not at the other end."""
    with pytest.raises(ValueError, match=words):
        Namespace(name, secret, roster)
