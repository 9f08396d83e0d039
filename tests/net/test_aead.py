"""Which cipher a pair takes, and how a machine learns its own speeds."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ChannelClosed, MalformedFrame
from potluck.net import aead
from potluck.net.aead import (
    SECRET_SIZE,
    TAG_SIZE,
    Aead,
    Cipher,
    CipherSpeeds,
    Encryptor,
    KeyLifetime,
    choose_cipher,
    derive_keys,
    local_speeds,
    measure_speeds,
    new_aead,
    preferred_cipher,
    seal_context,
)
from potluck.net.frames import MAX_PIECE
from support.sealed_pair import (
    HEADER,
    MARK,
    PAYLOAD,
    Pair,
    assert_refused,
    connect,
    record_keys,
    seal,
    unseal,
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

    monkeypatch.setattr(aead, "ChaCha20Poly1305", refuse)
    assert measure_speeds().chacha20_poly1305 == 0
    assert measure_speeds().aes_256_gcm > 0


def test_speeds_are_bytes_over_seconds() -> None:
    """With a clock that advances a millisecond a look, 64 KiB take one: 65 MB/s."""
    ticks = itertools.count()
    assert measure_speeds(lambda: next(ticks) * 1e-3) == CipherSpeeds(65, 65, 65)


def test_a_clock_that_stands_still_gives_a_finite_speed() -> None:
    """A coarse clock may show no time at all between two looks."""
    assert measure_speeds(lambda: 0.0).aes_256_gcm > 0


def test_a_cipher_that_runs_slowly_runs() -> None:
    """A rate of 0 would mean that the machine lacks it."""
    ticks = itertools.count()
    assert measure_speeds(lambda: float(next(ticks))) == CipherSpeeds(1, 1, 1)


def test_this_machine_is_measured_once() -> None:
    """The first call measures, the others remember."""
    assert local_speeds() is local_speeds()
    assert preferred_cipher() is choose_cipher(local_speeds(), local_speeds())


@pytest.mark.parametrize("figures", [(-1, 0), (0, -1)])
def test_a_negative_speed_is_refused(figures: tuple[int, int]) -> None:
    """Figures come from the other side and are checked."""
    with pytest.raises(ValueError, match="negative"):
        CipherSpeeds(*figures)


# --------------------------------------------------------------------------------------------------
# Sealed frames: what was sealed opens once, in order, on the other end, and nothing else does.

SHORT_LIVES = [KeyLifetime(), KeyLifetime(frames=3), KeyLifetime(max_bytes=40), KeyLifetime(1, 1)]


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


def test_sealing_writes_to_the_front_of_a_larger_buffer() -> None:
    """And leaves the rest of it alone."""
    pair = connect()
    out = bytearray([MARK]) * 100
    size = pair.a_seals.seal_into(HEADER, memoryview(PAYLOAD), memoryview(out))
    assert size == len(PAYLOAD) + TAG_SIZE
    assert set(out[size:]) == {MARK}
    assert unseal(pair.b_opens, bytes(out[:size])) == PAYLOAD


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


OTHERS: dict[str, Callable[[], Encryptor]] = {
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
    by_bytes = connect(lifetime=KeyLifetime(max_bytes=40)).a_seals
    generations = [(seal(by_frames), by_frames.generation)[1] for _ in range(7)]
    assert generations == [0, 0, 0, 1, 1, 1, 2]
    sizes = [20, 20, 0, 1, 39, 50, 0]  # 50: larger than a whole lifetime, so it is alone
    generations = [(seal(by_bytes, bytes(n)), by_bytes.generation)[1] for n in sizes]
    assert generations == [0, 0, 0, 1, 1, 2, 3]


# --------------------------------------------------------------------------------------------------
# Keys and nonces of sealed frames: fresh, never repeated, and gone when something went wrong.

CONTEXT = seal_context(connection=b"c1", epoch=1, initiator="ada", responder="bob", lane="data")


class Witness:
    """A cipher that writes down under which key and nonce it sealed."""

    def __init__(self, cipher: Cipher, key: bytes, seen: list[tuple[bytes, bytes]]) -> None:
        self._real = new_aead(cipher, key)
        self._key = key
        self._seen = seen
        self.decrypt_into = self._real.decrypt_into

    def encrypt_into(self, nonce: bytes, data: memoryview, header: bytes, out: memoryview) -> int:
        """Seal, after noting the nonce."""
        self._seen.append((self._key, nonce))
        return self._real.encrypt_into(nonce, data, header, out)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """Every (key, nonce) under which anything is sealed from now on."""
    seen: list[tuple[bytes, bytes]] = []

    def new_witness(cipher: Cipher, key: bytes) -> Witness:
        return Witness(cipher, key, seen)

    monkeypatch.setattr(aead, "new_aead", new_witness)
    return seen


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every key that is made from now on."""
    return record_keys(monkeypatch)


@pytest.mark.parametrize(
    ("cipher", "one_shot"),
    [(Cipher.AES_256_GCM, AESGCM), (Cipher.CHACHA20_POLY1305, ChaCha20Poly1305)],
)
def test_the_frames_are_those_of_the_plain_cipher(
    seen: list[tuple[bytes, bytes]], cipher: Cipher, one_shot: Callable[[bytes], Aead]
) -> None:
    """A sealed frame is what the library's one-shot call makes of key, nonce and header."""
    sealer = connect(cipher=cipher).a_seals
    for _ in range(3):
        sealed = seal(sealer)
        key, nonce = seen[-1]
        assert sealed == one_shot(key).encrypt(nonce, PAYLOAD, HEADER)


def test_a_nonce_is_a_prefix_and_the_frame_number(seen: list[tuple[bytes, bytes]]) -> None:
    """Numbers start at zero and go up by one, also across a change of keys."""
    sealer = connect(lifetime=KeyLifetime(frames=2)).a_seals
    for _ in range(5):
        seal(sealer)
    assert [int.from_bytes(nonce[4:], "big") for _, nonce in seen] == [0, 1, 2, 3, 4]
    assert len({nonce[:4] for _, nonce in seen}) == len({key for key, _ in seen}) == 3


def test_nonces_never_repeat(seen: list[tuple[bytes, bytes]]) -> None:
    """Not across frames, keys, directions, connections or epochs."""
    life = KeyLifetime(frames=7, max_bytes=200)
    pairs = [connect(seed, epoch=epoch, lifetime=life) for seed in range(3) for epoch in range(3)]
    for pair, _ in itertools.product(pairs, range(40)):
        seal(pair.a_seals)
        seal(pair.b_seals)
    assert len(set(seen)) == len(seen) == 9 * 40 * 2


def test_an_aborted_send_spends_its_number(seen: list[tuple[bytes, bytes]]) -> None:
    """A frame that was sealed and then not sent leaves a gap, which the other side notices."""
    pair = connect()
    unseal(pair.b_opens, seal(pair.a_seals))
    seal(pair.a_seals)  # the send is aborted here
    later = seal(pair.a_seals)
    assert len(set(seen)) == 3
    assert_refused(pair.b_opens, later)


def test_a_failed_seal_ends_the_sealer(seen: list[tuple[bytes, bytes]]) -> None:
    """An error in the middle spends the number, so the sealer stops instead of losing step."""
    sealer = connect().a_seals
    with pytest.raises(TypeError):
        sealer.seal_into(HEADER, memoryview(PAYLOAD), memoryview(bytes(100)))  # read-only
    assert sealer.frames == 1
    with pytest.raises(ChannelClosed, match="could not be sealed"):
        seal(sealer)
    assert len(seen) == 1


def test_a_piece_that_cannot_be_sealed_costs_nothing() -> None:
    """Sizes are checked before a number is spent; the stream goes on."""
    pair = connect()
    with pytest.raises(ValueError, match="may have"):
        seal(pair.a_seals, bytes(MAX_PIECE + 1))
    with pytest.raises(ValueError, match="needs room for 41, not 40"):
        pair.a_seals.seal_into(HEADER, memoryview(PAYLOAD), memoryview(bytearray(40)))
    assert pair.a_seals.frames == 0
    assert unseal(pair.b_opens, seal(pair.a_seals)) == PAYLOAD


def test_a_frame_too_large_for_its_buffer_is_refused() -> None:
    """Neither the destination nor the limit of a piece may be exceeded."""
    pair = connect()
    sealed = seal(pair.a_seals)
    with pytest.raises(MalformedFrame, match="payload may have 24"):
        pair.b_opens.open_into(HEADER, memoryview(sealed), memoryview(bytearray(24)))
    assert_refused(pair.b_opens, sealed)
    with pytest.raises(MalformedFrame, match=f"payload may have {MAX_PIECE}"):
        unseal(connect().b_opens, bytes(MAX_PIECE + TAG_SIZE + 1))


def test_the_first_reason_stands() -> None:
    """Closing a connection after a forgery does not hide the forgery."""
    opener = connect().b_opens
    with pytest.raises(MalformedFrame):
        unseal(opener, bytes(TAG_SIZE))
    opener.close()
    with pytest.raises(MalformedFrame, match="came twice or out of order"):
        unseal(opener, bytes(TAG_SIZE))


def test_a_view_that_cannot_take_the_payload_ends_the_opener() -> None:
    """A mistake of this side is an error of its own, and the opener stops as well."""
    read_only, floats = memoryview(bytes(25)), memoryview(bytearray(100)).cast("f")
    views: list[Any] = [read_only, floats]
    for out in views:
        pair = connect()
        with pytest.raises(TypeError):
            pair.b_opens.open_into(HEADER, memoryview(seal(pair.a_seals)), out)
        with pytest.raises(ChannelClosed, match="could not be opened"):
            unseal(pair.b_opens, seal(pair.a_seals))


def test_every_direction_and_connection_has_its_own_key(keys: list[bytes]) -> None:
    """Both ends of a direction agree on a key; nothing else shares one."""
    connect()
    a_seals, a_opens, b_seals, b_opens = keys
    assert (a_seals, a_opens) == (b_opens, b_seals)
    for pair in (connect(1), connect(epoch=2), connect(connection=b"c2"), connect(lane="x")):
        assert isinstance(pair, Pair)
    connect(cipher=Cipher.CHACHA20_POLY1305)
    assert len(set(keys)) == 6 * 2


def test_each_secret_alone_changes_every_key(keys: list[bytes]) -> None:
    """One side's randomness is enough for fresh keys; swapped secrets are other secrets."""
    one, two, three = (bytes([n]) * SECRET_SIZE for n in (1, 2, 3))
    for first, second in [(one, two), (one, three), (three, two), (two, one)]:
        derive_keys(first, second, context=CONTEXT, initiator=True)
    assert len(set(keys)) == 4 * 2


def test_no_two_contexts_look_alike() -> None:
    """Fields cannot flow into one another."""
    facts = [
        {"initiator": "ab", "responder": "c"},
        {"initiator": "a", "responder": "bc"},
        {"initiator": "", "responder": "abc"},
    ]
    contexts = {seal_context(connection=b"x", epoch=1, lane="d", **fact) for fact in facts}
    contexts |= {seal_context(connection=b"x1", epoch=e, lane="d", **facts[0]) for e in (1, 11)}
    assert len(contexts) == 5


@pytest.mark.parametrize("sizes", [(31, 32), (32, 33), (0, 64)])
def test_a_secret_of_another_size_is_refused(sizes: tuple[int, int]) -> None:
    """Each side contributes exactly 32 bytes, so the two cannot flow into one another."""
    with pytest.raises(ValueError, match="32 bytes"):
        derive_keys(bytes(sizes[0]), bytes(sizes[1]), context=CONTEXT, initiator=True)


@pytest.mark.parametrize("lifetime", [(0, 1), (1, 0)])
def test_a_key_lives_for_at_least_one_frame(lifetime: tuple[int, int]) -> None:
    """A lifetime of nothing would step for ever."""
    with pytest.raises(ValueError, match="at least one"):
        KeyLifetime(*lifetime)


def test_the_numbers_end_before_they_wrap() -> None:
    """After number 2**64 - 1 the sealer stops; zero does not come again."""
    sealer = connect().a_seals
    sealer._numbers = itertools.count(2**64 - 1)
    seal(sealer)
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="used up"):
            seal(sealer)


def test_a_closed_end_has_no_key() -> None:
    """Closing is final, for frames that would fit and at the end of a key's life alike."""
    pair = connect(lifetime=KeyLifetime(frames=1))
    sealed = seal(pair.a_seals)
    pair.a_seals.close()
    pair.b_opens.close()
    with pytest.raises(ChannelClosed, match="closed"):
        seal(pair.a_seals)
    with pytest.raises(ChannelClosed, match="closed"):
        unseal(pair.b_opens, sealed)
    assert pair.a_seals._aead is None
    assert not pair.a_seals._chain


def test_an_end_cannot_be_copied() -> None:
    """Two copies of a sealer would use every nonce twice."""
    sealer = connect().a_seals
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="same nonces"):
            duplicate(sealer)


def test_its_text_shows_state_but_no_key() -> None:
    """A sealer may appear in a log."""
    pair = connect()
    seal(pair.a_seals)
    assert repr(pair.a_seals) == "<Encryptor aes-256-gcm, frame 1, key 0>"
    pair.b_opens.close()
    assert repr(pair.b_opens) == "<Decryptor aes-256-gcm, frame 0, key 0, ended>"
    assert pair.b_opens.cipher is Cipher.AES_256_GCM


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_cannot_seal() -> None:
    """The child inherits the key and the counter, so it must not use either."""
    sealer = connect().a_seals
    child = os.fork()
    if child == 0:
        try:
            seal(sealer)
        except ChannelClosed as error:
            os._exit(0 if "forked child" in str(error) else 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    seal(sealer)


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=80),
    life=st.sampled_from([KeyLifetime(frames=3), KeyLifetime(max_bytes=40), KeyLifetime(7, 100)]),
)
def test_no_key_serves_beyond_its_lifetime(sizes: list[int], life: KeyLifetime) -> None:
    """Whatever a key has carried before: all its frames count, not only the next one."""
    pair = connect(lifetime=life)
    for side in (pair.a_seals, pair.b_opens):
        spent: dict[int, list[int]] = {}
        for size in sizes:
            side._spend_number(size)
            spent.setdefault(side.generation, []).append(size)
        for carried in spent.values():
            assert len(carried) <= life.frames
            assert sum(carried) <= life.max_bytes or len(carried) == 1


def test_a_partly_used_key_of_the_default_lifetime_is_replaced_in_time() -> None:
    """One byte more than is left of its 16 GiB takes the next key, one byte less does not."""
    assert KeyLifetime().max_bytes == 16 << 30
    for more, generation in ((0, 0), (1, 1)):
        sealer = connect().a_seals
        chunk = 1 << 30
        for _ in range(15):
            sealer._spend_number(chunk)
        assert sealer.generation == 0
        sealer._spend_number(chunk + more)
        assert sealer.generation == generation
