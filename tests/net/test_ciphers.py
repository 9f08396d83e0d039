"""Which cipher a pair takes, and how a machine learns its own speeds."""

from __future__ import annotations

import itertools
from typing import NoReturn

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from hypothesis import given
from hypothesis import strategies as st

from potluck.net import ciphers
from potluck.net.ciphers import (
    Cipher,
    CipherSpeeds,
    choose_cipher,
    local_speeds,
    measure_speeds,
    preferred_cipher,
)

speeds = st.builds(CipherSpeeds, *[st.integers(0, 20_000)] * 3)


@given(mine=speeds, theirs=speeds)
def test_both_sides_choose_the_same_cipher(mine: CipherSpeeds, theirs: CipherSpeeds) -> None:
    """The choice does not depend on who evaluates it."""
    assert choose_cipher(mine, theirs) is choose_cipher(theirs, mine)


@given(mine=speeds, theirs=speeds)
def test_the_slower_end_decides(mine: CipherSpeeds, theirs: CipherSpeeds) -> None:
    """With the chosen cipher the slower of the two machines is as fast as it can be."""
    rates = {
        cipher: min(getattr(mine, cipher.name.lower()), getattr(theirs, cipher.name.lower()))
        for cipher in Cipher
    }
    assert rates[choose_cipher(mine, theirs)] == max(rates.values())


def test_equal_figures_mean_aes() -> None:
    """A tie needs a rule, and the rule is AES-256-GCM."""
    even = CipherSpeeds(1000, 1000, 1000)
    assert choose_cipher(even, even) is Cipher.AES_256_GCM


def test_a_board_without_aes_instructions_gets_chacha() -> None:
    """One slow AES on either side is enough to take the other cipher."""
    desktop, board = CipherSpeeds(4000, 2000), CipherSpeeds(80, 250)
    assert choose_cipher(desktop, board) is Cipher.CHACHA20_POLY1305


def test_a_cipher_that_one_side_lacks_is_not_chosen() -> None:
    """A rate of 0 stands for a cipher that this build of the library refuses."""
    strict, other = CipherSpeeds(50, 0), CipherSpeeds(80, 250)
    assert choose_cipher(strict, other) is Cipher.AES_256_GCM


def test_a_missing_cipher_measures_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built without ChaCha20-Poly1305 is no error."""

    def refuse(_key: bytes) -> NoReturn:
        message = "not in this build"
        raise UnsupportedAlgorithm(message)

    monkeypatch.setattr(ciphers, "ChaCha20Poly1305", refuse)
    assert measure_speeds().chacha20_poly1305 == 0
    assert measure_speeds().aes_256_gcm > 0


def test_speeds_are_bytes_over_seconds() -> None:
    """With a clock that advances a millisecond a look, 64 KiB take one: 65 MB/s."""
    ticks = itertools.count()
    assert measure_speeds(lambda: next(ticks) * 1e-3) == CipherSpeeds(65, 65, 65)


def test_a_clock_that_stands_still_gives_a_finite_speed() -> None:
    """A coarse clock may show no time at all between two looks."""
    assert measure_speeds(lambda: 0.0).aes_256_gcm > 0


def test_this_machine_is_measured_once() -> None:
    """The first call measures, the others remember."""
    assert local_speeds() is local_speeds()
    assert preferred_cipher() is choose_cipher(local_speeds(), local_speeds())


@pytest.mark.parametrize("figures", [(-1, 0), (0, -1)])
def test_a_negative_speed_is_refused(figures: tuple[int, int]) -> None:
    """Figures come from the other side and are checked."""
    with pytest.raises(ValueError, match="negative"):
        CipherSpeeds(*figures)
