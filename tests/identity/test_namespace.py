"""Passphrases: what could be guessed is refused, what could not is stretched."""

from __future__ import annotations

import random
import secrets
import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.identity.namespace import MIN_BITS, WeakPassphrase, estimate_bits, normalise, stretch

WEAK = [
    "",
    "a",
    "hello",
    "password",
    "Pa55w0rd!2024",
    "letmeinletmeinletmeinletmein",
    "correct horse battery staple",
    "correcthorsebatterystaple",
    "to be or not to be that is the question",
    "tobeornottobethatisthequestion",
    "AskNotWhatYourCountryCanDoForYou",
    "itwasthebestoftimesitwastheworstoftimes",
    "vater unser im himmel geheiligt werde dein name",
    "au clair de la lune mon ami pierrot prête moi ta plume",
    "lorem ipsum dolor sit amet consectetur adipiscing elit",
    "en un lugar de la mancha de cuyo nombre no quiero acordarme",
    "nel mezzo del cammin di nostra vita mi ritrovai",
    "we all live in a yellow submarine",
    "potluck potluck potluck home network cluster",
    "Summer2024!Summer2025!Summer2026!",
    "qwertyuiopasdfghjklzxcvbnm1234567890",
    "abcdefghijklmnopqrstuvwxyzzyxwvutsrqponmlkjihgfedcba",
    "3.14159265358979323846264338327950288419716939937510",
    "0123456789" * 20,
    "a" * 1000,
    "ab" * 500,
    "1984 1985 1986 1987 1988 1989",
    "Thomas und Maria 1984 und Peter 2011",
    "+49 170 1234567 hauptstrasse 12",
    "xkqv" * 50,
    "is this the real life is this just fantasy caught in a landslide",
    "it was the best of times it was the worst of times",
    "hello darkness my old friend I've come to talk with you again",
    "I have a dream that one day this nation will rise up",
    "All animals are equal, but some animals are more equal than others!",
    "twinkle twinkle little star how I wonder what you are",
    "purple monkey dishwasher purple monkey dishwasher purple monkey dishwasher",
    "zxcvbnm,./asdfghjkl;'qwertyuiop[]",
    "1qaz2wsx3edc4rfv5tgb6yhn7ujm",
]
STRONG = [
    "unruly copper migrant walnut tracing spoof",
    "Unruly-Copper-Migrant-Walnut-Tracing-Spoof",
    "k9Fw2-xQv7r-Zp4Lm-t8Bc",
    "vexed lumber quaint orchid plasma dwindle tugboat",
    "8f14e45fceea167a5a36dedd4bea2543",
    "Zw!x7)Lq#2pV$9k&Rd~u",
    "the key is k9Fw2-xQv7r-Zp4Lm-t8Bc",
    "unrulycoppermigrantwalnuttracingspoof",
    "qzhwtvkxnpjrbmyfoeuagd",
]


@pytest.mark.parametrize("text", WEAK)
def test_what_people_think_of_is_weak(text: str) -> None:
    """Words, dates, runs, repetitions and famous strings stay under the bar, however long."""
    assert estimate_bits(text) < MIN_BITS


@pytest.mark.parametrize("text", STRONG)
def test_what_was_drawn_by_chance_is_strong(text: str) -> None:
    """Six random words, or what a password manager makes, pass."""
    assert estimate_bits(text) >= MIN_BITS


@pytest.mark.parametrize("words", [1, 2, 3, 4, 5])
def test_few_words_are_too_few(words: int) -> None:
    """Up to five words from a list of 2048 have at most 55 bits."""
    assert estimate_bits(" ".join(STRONG[0].split()[:words])) < MIN_BITS


def test_what_a_password_manager_makes_passes() -> None:
    """Of 300 random strings of 24 letters and digits hardly one is refused."""
    chance = random.Random(7)
    alphabet = string.ascii_letters + string.digits
    drawn = ["".join(chance.choices(alphabet, k=24)) for _ in range(300)]
    assert sum(estimate_bits(text) < MIN_BITS for text in drawn) <= 2


@pytest.mark.parametrize(
    ("alphabet", "length"),
    [(string.digits, 19), (string.ascii_lowercase, 13), ("01", 56), ("abcdef0123456789", 16)],
)
def test_the_estimate_errs_on_the_low_side(alphabet: str, length: int) -> None:
    """Random strings whose true worth is at most 64 bits are not let through, on the whole."""
    chance = random.Random(11)
    drawn = ["".join(chance.choices(alphabet, k=length)) for _ in range(200)]
    passed = sum(estimate_bits(text) >= MIN_BITS for text in drawn)
    assert passed <= 4


@given(st.text(max_size=60))
def test_every_text_has_an_estimate_within_bounds(text: str) -> None:
    """It is never negative and never above what the characters could carry."""
    assert 0 <= estimate_bits(text) <= 21 * len(normalise(text))


@given(st.lists(st.sampled_from(STRONG[3].split()), min_size=1, max_size=4))
def test_saying_it_twice_is_worth_next_to_nothing(words: list[str]) -> None:
    """A repetition adds that it is one."""
    text = " ".join(words)
    assert estimate_bits(f"{text} {text}") <= estimate_bits(text) + 6 * len(words) + 8


def test_the_lists_of_words_are_loaded_only_to_check_a_passphrase() -> None:
    """They take a tenth of a second, which no other command waits for."""
    program = "import sys, potluck.identity.namespace; sys.exit('zxcvbn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@given(st.text(max_size=40))
def test_what_looks_the_same_is_the_same(text: str) -> None:
    """Spaces at the ends, double spaces and line ends do not matter."""
    assert normalise(f"  {text}\n") == normalise(text) == normalise(normalise(text))


def test_composed_and_decomposed_letters_are_the_same() -> None:
    """One keyboard types é as one character, another as two."""
    assert normalise("caf\u00e9  au lait") == normalise("cafe\u0301 au lait")


def test_a_very_long_passphrase_is_estimated_quickly() -> None:
    """Only the beginning is looked at, so nobody can keep us busy."""
    assert estimate_bits(secrets.token_hex(100_000)) >= MIN_BITS


def test_stretching_is_fixed_for_ever() -> None:
    """The result depends on passphrase and salt, and on nothing that may change."""
    secret = stretch("  unruly  copper ", b"salt")
    assert secret.hex() == "83d860e0c64bd45aae8ef01f0430eccf09f7518a31c1aac09e8e5a7a613446be"
    assert stretch("unruly copper", b"other salt") != secret


def test_the_refusal_explains_itself() -> None:
    """It says how much it is worth, how much is needed and why, and what to do."""
    error = WeakPassphrase(31.4)
    assert "about 31 bits" in str(error)
    assert "needs 64" in str(error)
    assert "six or more random words" in str(error)
    assert "potluck pair" in str(error)
    assert isinstance(error, ValueError)
