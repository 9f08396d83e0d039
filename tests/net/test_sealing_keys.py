"""Keys and nonces of sealed frames: fresh, never repeated, and gone when something went wrong."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ChannelClosed, MalformedFrame
from potluck.net import sealing
from potluck.net.ciphers import Aead, Cipher, new_aead
from potluck.net.frames import MAX_PIECE
from potluck.net.sealing import (
    SECRET_SIZE,
    TAG_SIZE,
    KeyLifetime,
    derive_keys,
    seal_context,
)
from support.sealed_pair import (
    HEADER,
    PAYLOAD,
    Pair,
    assert_refused,
    connect,
    record_keys,
    seal,
    unseal,
)

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

    monkeypatch.setattr(sealing, "new_aead", new_witness)
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
    life = KeyLifetime(frames=7, octets=200)
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
    assert repr(pair.a_seals) == "<Sealer aes-256-gcm, frame 1, key 0>"
    pair.b_opens.close()
    assert repr(pair.b_opens) == "<Opener aes-256-gcm, frame 0, key 0, ended>"
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
    life=st.sampled_from([KeyLifetime(frames=3), KeyLifetime(octets=40), KeyLifetime(7, 100)]),
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
            assert sum(carried) <= life.octets or len(carried) == 1


def test_a_partly_used_key_of_the_default_lifetime_is_replaced_in_time() -> None:
    """One byte more than is left of its 16 GiB takes the next key, one byte less does not."""
    assert KeyLifetime().octets == 16 << 30
    for more, generation in ((0, 0), (1, 1)):
        sealer = connect().a_seals
        chunk = 1 << 30
        for _ in range(15):
            sealer._spend_number(chunk)
        assert sealer.generation == 0
        sealer._spend_number(chunk + more)
        assert sealer.generation == generation
