"""Pairing codes: easy to read out, easy to type, hard to confuse."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.trust.pairing_code import SLOTS, WORDS, InvalidCode, PairingCode, new_code, parse_code
from support.machines import entropy

codes = st.builds(
    PairingCode, st.integers(1, SLOTS), st.sampled_from(WORDS), st.sampled_from(WORDS)
)


# --- the words ---


def distance(one: str, other: str) -> int:
    """How many letters must be changed, added or left out."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def close_pairs() -> Iterator[tuple[str, str]]:
    """Every pair at a distance of at most two, and some more: both lose two letters and meet."""
    crippled = defaultdict(list)
    for word in WORDS:
        for places in itertools.combinations(range(len(word) + 2), 2):
            rest = "".join(letter for i, letter in enumerate(word) if i not in places)
            crippled[rest].append(word)
    for words in crippled.values():
        yield from itertools.combinations(sorted(set(words)), 2)


def sound(word: str) -> str:
    """A word's consonants with those that are easily misheard made equal."""
    for pattern, letter in (
        ("ph", "f"),
        ("ck|q|c(?![eiyh])", "k"),
        ("c(?=[eiy])|z", "s"),
        ("kn", "n"),
        ("wr", "r"),
        ("gh", ""),
    ):
        word = re.sub(pattern, letter, word)
    word = word[0] + re.sub("[aeiouyhw]", "", word[1:])
    word = word.translate(str.maketrans("dbvgjm", "tpfkkn"))
    return re.sub(r"(.)\1+", r"\1", word)


def test_there_are_512_common_words_in_order() -> None:
    """A power of two, so that random bits pick a word without bias."""
    assert len(WORDS) == 512
    assert list(WORDS) == sorted(set(WORDS))
    assert all(re.fullmatch("[a-z]{4,10}", word) for word in WORDS)


def test_four_letters_tell_every_word_apart() -> None:
    """And no word begins another."""
    assert len({word[:4] for word in WORDS}) == len(WORDS)


def test_no_two_words_look_or_sound_alike() -> None:
    """At least three letters differ, and the consonants are not the same to the ear."""
    assert min(distance(*pair) for pair in close_pairs()) >= 3
    assert len({sound(word) for word in WORDS}) == len(WORDS)


# --- making codes ---


def test_a_code_looks_like_a_number_and_two_words() -> None:
    """It is what a person sees and types."""
    assert str(PairingCode(7, "guitar", "harbor")) == "7-guitar-harbor"
    assert PairingCode(7, "guitar", "harbor").password == b"7-guitar-harbor"


def test_the_words_stay_out_of_logs() -> None:
    """A code is a password while it lives."""
    assert repr(PairingCode(7, "guitar", "harbor")) == "PairingCode(7-…)"


def test_every_word_and_every_slot_is_drawn() -> None:
    """With a fair source the draws are fair: no word is left out of 20,000 draws."""
    draw = entropy(1)
    drawn = [new_code(draw) for _ in range(20_000)]
    assert {code.first for code in drawn} == {code.second for code in drawn} == set(WORDS)
    assert {code.slot for code in drawn} == set(range(1, SLOTS + 1))


def test_slots_of_other_listeners_are_avoided() -> None:
    """Two people who pair at once get different numbers, as long as there are any."""
    taken = set(range(1, SLOTS + 1)) - {42}
    assert new_code(entropy(1), taken).slot == 42
    assert new_code(entropy(1), taken | {42}).slot == SLOTS


# --- reading what somebody typed ---


@given(codes, st.sampled_from(["-", " ", "  ", "_", ". ", ", ", " - "]), st.booleans())
def test_capitals_and_separators_do_not_matter(
    code: PairingCode, separator: str, shout: bool
) -> None:
    """Whatever stands between the parts."""
    typed = separator.join([str(code.slot), code.first, code.second])
    assert parse_code(f"  {typed.upper() if shout else typed}\n") == code


@given(codes)
def test_four_letters_of_a_word_are_enough(code: PairingCode) -> None:
    """A prefix that only one word has stands for it."""
    assert parse_code(f"{code.slot} {code.first[:4]} {code.second[:4]}") == code


def test_nothing_at_all_may_stand_between_number_and_word() -> None:
    """And the number may come last."""
    assert str(parse_code("7guitar harbor")) == str(parse_code("guitar harbor 7"))


@given(codes, st.data())
def test_a_slip_of_one_letter_is_refused_with_the_right_suggestion(
    code: PairingCode, data: st.DataObject
) -> None:
    """The suggestion is the whole code, ready to be typed again.

    Not of a slip that happens to be the beginning of another word, as "harv" for "harp": four
    letters are enough to type.
    """
    place = data.draw(st.integers(0, len(code.first) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz"))
    typed = code.first[:place] + letter + code.first[place + 1 :]
    if any(word.startswith(typed) for word in WORDS):
        return
    with pytest.raises(InvalidCode, match="no code word") as caught:
        parse_code(f"{code.slot}-{typed}-{code.second}")
    assert f"{code}" in str(caught.value)
    assert "Did you mean" in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "a number and two words. It looks like 7-guitar-harbor"),
        ("7-guitar", "a number and two words"),
        ("7-guitar-harbor-tiger", "a number and two words"),
        ("guitar-harbor-tango", "a number and two words"),
        ("7-8-guitar", "a number and two words"),
        ("7-guitar-harbor" + " " * 100, "a number and two words"),
        ("0-guitar-harbor", "from 1 to 99, not 0"),
        ("100-guitar-harbor", "from 1 to 99, not 100"),
        ("²-guitar-harbor", "a number and two words"),
        ("7-guitar-ca", 'no code word "ca"'),
        ("7-can-harbor", "7-candle-harbor or 7-canvas-harbor or 7-canyon-harbor?"),
        ("7-xxxxxx-harbor", 'no code word "xxxxxx". Read the code once more'),
        ("7-guitar-härbor", "Did you mean 7-guitar-harbor"),
    ],
)
def test_what_is_not_a_code_is_explained(typed: str, words: str) -> None:
    """The message says what to do next."""
    with pytest.raises(InvalidCode) as caught:
        parse_code(typed)
    assert words in str(caught.value)


@given(st.text(max_size=150))
def test_any_text_is_a_code_or_an_explained_error(text: str) -> None:
    """Nothing else can happen."""
    with contextlib.suppress(InvalidCode):
        code = parse_code(text)
        assert parse_code(str(code)) == code


def test_a_code_may_be_written_with_room_around_it_but_not_without_end() -> None:
    """A hundred characters are read; of more, nothing."""
    code = f"7-{WORDS[0]}-{WORDS[1]}"
    assert str(parse_code(code.rjust(100))) == code
    with pytest.raises(InvalidCode, match="a number and two words"):
        parse_code(code.rjust(101))
