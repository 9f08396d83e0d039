"""Cards: who is who, and names that are safe to show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.cards import NAME_LIMIT, Card, clean_name
from support.machines import TOY_VERIFIER, machine


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Anna's MacBook", "Anna's MacBook"),
        ("  two\n lines ", "two lines"),
        ("\x1b]0;owned\x07", "]0;owned"),
        ("evil\u202etxt", "eviltxt"),
        ("", "unnamed"),
        ("\x00", "unnamed"),
        ("x" * 100, "x" * 64),
        ("Küche", "Küche"),
    ],
)
def test_names_are_fit_for_a_terminal(text: str, clean: str) -> None:
    """Control, invisible and surplus characters are gone; letters of all languages stay."""
    assert clean_name(text) == clean


@given(st.text())
def test_a_clean_name_stays_as_it_is(text: str) -> None:
    """Cleaning twice changes nothing, so a receiver can check by cleaning."""
    name = clean_name(text)
    assert clean_name(name) == name
    assert 1 <= len(name) <= NAME_LIMIT
    assert name.isprintable()


def test_a_card_belongs_to_whoever_signs_with_its_key() -> None:
    """The id must be that of the key, and the key must have signed the message."""
    anna, eve = machine("anna"), machine("eve")
    assert TOY_VERIFIER.owns(anna.card, anna.sign(b"x"), b"x")
    assert not TOY_VERIFIER.owns(anna.card, anna.sign(b"x"), b"y")
    assert not TOY_VERIFIER.owns(anna.card, eve.sign(b"x"), b"x")
    borrowed = Card(anna.node_id, eve.card.public_key, "anna")
    assert not TOY_VERIFIER.owns(borrowed, eve.sign(b"x"), b"x")


def test_a_signer_shows_no_key() -> None:
    """Its text has the card and nothing else."""
    assert "sign" not in repr(machine("anna")).replace("Signer", "")
