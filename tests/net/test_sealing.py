"""Sealed frames: what was sealed opens once, in order, on the other end, and nothing else does."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import MalformedFrame
from potluck.net.ciphers import Cipher
from potluck.net.frames import MAX_PIECE
from potluck.net.sealing import TAG_SIZE, KeyLifetime, Sealer
from support.sealed_pair import HEADER, MARK, PAYLOAD, assert_refused, connect, seal, unseal

SHORT_LIVES = [KeyLifetime(), KeyLifetime(frames=3), KeyLifetime(octets=40), KeyLifetime(1, 1)]


@pytest.mark.parametrize("cipher", Cipher)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4096, MAX_PIECE])
def test_what_was_sealed_opens_on_the_other_end(cipher: Cipher, size: int) -> None:
    """Both directions carry every size up to the largest piece; an empty one is only its tag."""
    pair = connect(cipher=cipher)
    payload = os.urandom(size)
    for sealer, opener in [(pair.a_seals, pair.b_opens), (pair.b_seals, pair.a_opens)]:
        sealed = seal(sealer, payload)
        assert len(sealed) == size + TAG_SIZE
        assert unseal(opener, sealed) == payload


@pytest.mark.parametrize("cipher", Cipher)
def test_a_frame_can_be_sealed_and_opened_in_place(cipher: Cipher) -> None:
    """Payload and ciphertext may share their first byte."""
    pair = connect(cipher=cipher)
    buffer = memoryview(bytearray(PAYLOAD + bytes(TAG_SIZE)))
    payload = buffer[: len(PAYLOAD)]
    pair.a_seals.seal_into(HEADER, payload, buffer)
    assert bytes(payload) != PAYLOAD
    pair.b_opens.open_into(HEADER, buffer, payload)
    assert bytes(payload) == PAYLOAD


def test_every_flipped_bit_is_noticed() -> None:
    """Every single bit of header, ciphertext and tag counts."""
    whole = HEADER + seal(connect().a_seals)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        header, sealed = bytes(damaged[: len(HEADER)]), bytes(damaged[len(HEADER) :])
        assert_refused(connect().b_opens, sealed, header)


def test_every_other_length_is_noticed() -> None:
    """A frame that lost bytes at either end, or gained one, does not open."""
    sealed = seal(connect().a_seals)
    for length in range(len(sealed)):
        assert_refused(connect().b_opens, sealed[:length])
        assert_refused(connect().b_opens, sealed[len(sealed) - length :])
    assert_refused(connect().b_opens, sealed + b"\0")
    assert_refused(connect().b_opens, sealed, HEADER[:-1])
    assert_refused(connect().b_opens, sealed, HEADER + b"\0")


def test_bytes_cannot_move_between_header_and_payload() -> None:
    """Where the header ends is authenticated too."""
    sealed = seal(connect().a_seals)
    assert_refused(connect().b_opens, sealed[1:], HEADER + sealed[:1])


@pytest.mark.parametrize("cipher", Cipher)
def test_a_refused_frame_leaves_no_plaintext(cipher: Cipher) -> None:
    """The library writes plaintext before it verifies the tag; the opener takes it back."""
    pair = connect(cipher=cipher)
    sealed = bytearray(seal(pair.a_seals, PAYLOAD * 100))
    sealed[-1] ^= 1
    out = bytearray([MARK]) * (len(sealed) + 8)
    with pytest.raises(MalformedFrame):
        pair.b_opens.open_into(HEADER, memoryview(sealed), memoryview(out))
    size = len(sealed) - TAG_SIZE
    assert out == bytes(size) + bytes([MARK]) * (len(out) - size)


OTHERS: dict[str, Callable[[], Sealer]] = {
    "other secrets": lambda: connect(1).a_seals,
    "another connection": lambda: connect(connection=b"c2").a_seals,
    "another epoch": lambda: connect(epoch=2).a_seals,
    "another lane": lambda: connect(lane="messages").a_seals,
    "another cipher": lambda: connect(cipher=Cipher.CHACHA20_POLY1305).a_seals,
    "another key lifetime": lambda: connect(lifetime=KeyLifetime(frames=9)).a_seals,
    "reflected": lambda: connect().b_seals,
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_stranger_frame_is_refused(other: str) -> None:
    """A frame sealed for anything but this connection and direction is no frame here."""
    assert_refused(connect().b_opens, seal(OTHERS[other]()))


arrivals = st.lists(st.tuples(st.sampled_from(["honest", *OTHERS]), st.integers(0, 7)), max_size=12)


@given(
    prefix=st.integers(0, 8),
    arrivals=arrivals,
    lifetime=st.sampled_from(SHORT_LIVES),
)
def test_only_the_sealed_order_is_delivered(
    prefix: int, arrivals: list[tuple[str, int]], lifetime: KeyLifetime
) -> None:
    """Whatever is dropped, doubled, moved, reflected or mixed in: delivery ends right there."""
    pair = connect(lifetime=lifetime)
    payloads = [bytes([n]) * (3 * n) for n in range(8)]
    sent = {"honest": [seal(pair.a_seals, payload) for payload in payloads]}
    sent |= {name: [seal(s, p) for p in payloads] for name in OTHERS for s in [OTHERS[name]()]}
    sent["reflected"] = [seal(pair.b_seals, payload) for payload in payloads]
    story = [("honest", n) for n in range(prefix)] + arrivals
    intact = True
    for place, (source, n) in enumerate(story):
        intact = intact and (source, n) == ("honest", place)
        if intact:
            assert unseal(pair.b_opens, sent[source][n]) == payloads[n]
        else:
            with pytest.raises(MalformedFrame):
                unseal(pair.b_opens, sent[source][n])


@given(sizes=st.lists(st.integers(0, 100), max_size=60), lifetime=st.sampled_from(SHORT_LIVES))
def test_keys_step_in_lock_step(sizes: list[int], lifetime: KeyLifetime) -> None:
    """Sealer and opener change keys before the same frame, whatever the sizes."""
    pair = connect(lifetime=lifetime)
    for size in sizes:
        assert unseal(pair.b_opens, seal(pair.a_seals, bytes(size))) == bytes(size)
        assert pair.a_seals.generation == pair.b_opens.generation
    assert pair.a_seals.frames == pair.b_opens.frames == len(sizes)


def test_a_key_serves_exactly_its_lifetime() -> None:
    """The step comes before the first frame that would exceed the frames or the bytes."""
    by_frames = connect(lifetime=KeyLifetime(frames=3)).a_seals
    by_octets = connect(lifetime=KeyLifetime(octets=40)).a_seals
    generations = [(seal(by_frames), by_frames.generation)[1] for _ in range(7)]
    assert generations == [0, 0, 0, 1, 1, 1, 2]
    sizes = [20, 20, 0, 1, 39, 50, 0]  # 50: larger than a whole lifetime, so it is alone
    generations = [(seal(by_octets, bytes(n)), by_octets.generation)[1] for n in sizes]
    assert generations == [0, 0, 0, 1, 1, 2, 3]
