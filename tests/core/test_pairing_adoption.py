"""Adoption: when joining another namespace needs a question, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.core.pairing_adoption import (
    AlreadyMember,
    Ask,
    Belonging,
    Replace,
    decide_adoption,
)

PRIVATE = Belonging("private", b"mine", b"secret 0", unused=True)
HOME = Belonging("home", b"circle", b"secret 1", others=2)


def test_a_private_namespace_that_is_unused_gives_way_silently() -> None:
    """It was made without asking, and goes without asking."""
    assert decide_adoption(PRIVATE, HOME) == Replace(
        'The private namespace gives way to "home"; it was unused.'
    )
    assert isinstance(decide_adoption(None, HOME), Replace)


@pytest.mark.parametrize(
    ("current", "company"),
    [
        (replace(PRIVATE, unused=False, others=2), "with 2 other machines"),
        (replace(PRIVATE, unused=False, others=1), "with one other machine"),
        (replace(PRIVATE, unused=False), "alone"),
    ],
)
def test_leaving_company_or_something_made_on_purpose_is_asked(
    current: Belonging, company: str
) -> None:
    """The question names both."""
    assert decide_adoption(current, HOME) == Ask(
        f'This machine is in "private" {company}. Join "home" instead?'
    )


def test_a_member_stays_a_member() -> None:
    """Nothing is replaced when circle and secret are the same."""
    assert isinstance(decide_adoption(HOME, HOME), AlreadyMember)


def test_pairing_again_after_a_rotation_brings_the_new_secret() -> None:
    """The circle is the same, so nobody is asked."""
    newer = replace(HOME, commitment=b"secret 2")
    assert decide_adoption(HOME, newer) == Replace('"home" has a new secret; this machine gets it.')
