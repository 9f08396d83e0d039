"""Decoding: typed values out of bytes, from any thread and whatever it is the first to meet."""

from __future__ import annotations

import decimal
import subprocess
import sys
import uuid
from collections.abc import Hashable, Iterable
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest

from potluck import _values
from potluck._decode import (
    KeyCheck,
    Lines,
    decode_json,
    decode_msgpack,
    json_reader,
    msgpack_reader,
)
from potluck.errors import MalformedFrame

SAME = [number * ((1 << 61) - 1) for number in range(8)]

# With what the library offers itself, this crashes within a few of its rounds.
_CROWD = """
import sys, threading, types, msgspec
from potluck._decode import decode_msgpack
sys.setswitchinterval(1e-6)
SOURCE = '''
from __future__ import annotations

import decimal
import uuid
from collections.abc import Hashable, Iterable
from typing import Annotated, Any
import msgspec
class Inner(msgspec.Struct):
    a: int
    b: str | None = None
class Outer(msgspec.Struct):
    a: int
    b: dict[str, str] | None = None
    c: tuple[Inner, ...] = ()
    d: Inner | None = None
'''
data = msgspec.msgpack.encode({"a": 1, "b": {"x": "y"}, "c": [{"a": 1}], "d": {"a": 2}})
for number in range(300):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(SOURCE, module.__dict__)
    together, read = threading.Barrier(3), []
    def run():
        together.wait()
        read.append(decode_msgpack(data, module.Outer).d.a)
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [2, 2, 2], read
"""


class Point(msgspec.Struct):
    """Something to read."""

    x: int


def test_values_are_read_as_they_were_written() -> None:
    """From both formats, and by one reader for each type."""
    point = Point(3)
    assert decode_json(msgspec.json.encode(point), Point) == point
    assert decode_msgpack(msgspec.msgpack.encode(point), Point) == point
    assert json_reader(Point) is json_reader(Point)
    assert msgpack_reader(Point | None).decode(b"\xc0") is None


@pytest.mark.parametrize("data", [b"{}", b'{"x": "three"}', b"[", b""])
def test_what_is_something_else_is_refused(data: bytes) -> None:
    """With the errors of the library."""
    with pytest.raises(msgspec.DecodeError):
        decode_json(data, Point)
    with pytest.raises(msgspec.DecodeError):
        decode_msgpack(data, Point)


def test_threads_that_meet_a_new_type_together_all_read_it() -> None:
    """The library below crashes there."""
    subprocess.run([sys.executable, "-c", _CROWD], check=True, timeout=50)


# -- what a reader refuses to be made for ----------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        dict[int, str],
        dict[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], int],
        set[tuple[int, int]],
        frozenset[float],
        dict[tuple[str, int], int],
        list[Any],
        Any,
    ],
)
def test_a_type_that_hashes_what_a_peer_can_choose_has_no_reader(kind: Any) -> None:
    """Without a bound on the number of its keys; found when the reader is made, not by chance."""
    for make in (json_reader, msgpack_reader):
        with pytest.raises(TypeError, match="hash"):
            make(kind)


@pytest.mark.parametrize(
    "kind",
    [
        dict[str, int],
        set[bytes],
        Annotated[set[float], msgspec.Meta(max_length=16)],
    ],
)
def test_keys_with_a_bound_or_with_secret_hashes_are_read(kind: Any) -> None:
    """Text, bytes, and few of anything."""
    assert msgpack_reader(kind) is msgpack_reader(kind)


@pytest.mark.parametrize(
    "keys",
    [
        [(n + 9) * ((1 << 61) - 1) for n in range(3000)],
        [(a, b, c, d) for a in SAME for b in SAME for c in SAME for d in SAME],
        [frozenset({(a, b, c)}) for a in SAME for b in SAME for c in SAME],
        [uuid.UUID(int=(n + 9) * ((1 << 61) - 1)) for n in range(3000)],
        [complex(-1000003.0 * n, n) for n in range(3000)],
        [decimal.Decimal((n + 9) * ((1 << 61) - 1)) for n in range(3000)],
    ],
    ids=["numbers", "tuples", "sets", "uuids", "complex", "decimals"],
)
def test_keys_that_share_a_hash_are_refused(keys: list[Hashable]) -> None:
    """In any form in which a hash can be chosen."""
    assert len({hash(key) for key in keys}) == 1
    with pytest.raises(ValueError, match="share a hash"):
        KeyCheck().check(keys)


def _in_the_way(bits: int) -> list[int]:
    """Numbers with different hashes: the first fill slots, the others look at most of these."""
    size = 1 << bits
    first = size // 3
    chain = [0]
    while len(chain) < first:
        chain.append((5 * chain[-1] + 1) % size)
    taken = np.zeros(size, bool)
    taken[chain] = True
    others: list[int] = []
    random = np.random.default_rng(7)
    while len(others) < first // 2:
        tried = random.integers(size, 1 << 20, 1 << 18)
        tried = tried[taken[tried % size]]
        at, rest = tried % size, tried
        for _ in range(4):  # after these the rest is 0
            rest = rest >> 5
            at = (5 * at + rest + 1) % size
            kept = taken[at]
            tried, at, rest = tried[kept], at[kept], rest[kept]
        others += sorted(set(tried.tolist()) - set(others))
    return chain + others[: first // 2]


def test_keys_that_stand_in_each_others_way_are_refused() -> None:
    """Each has a hash of its own; Python looks at thousands of slots for every second one."""
    keys = _in_the_way(15)
    assert len({hash(key) for key in keys}) == len(keys)
    with pytest.raises(ValueError, match="a part of one"):
        KeyCheck().check(keys)
    with pytest.raises(MalformedFrame, match="a part of one"):
        _values.decode(_values.encode(set(keys)))


def test_the_bound_is_for_a_whole_message() -> None:
    """Many containers that each stay below it are as expensive as one."""
    keys = [(n + 9) * ((1 << 61) - 1) for n in range(100)]
    check = KeyCheck()
    with pytest.raises(ValueError, match="share a hash"):  # noqa: PT012 - which one is up to it
        for _ in range(1000):
            check.check(keys)


@pytest.mark.parametrize(
    "keys",
    [
        range(100_000),
        [float(n) for n in range(10_000)],
        [(x, y) for x in range(-60, 60) for y in range(-60, 60)],
        [2**n for n in range(4000)],
        [n << 32 for n in range(10_000)],
        [n / 1024 for n in range(10_000)],
        [str(n) for n in range(1000)],
        [frozenset({n}) for n in range(-5, 2000)],
        [None, True, "", b"", 0.5],
    ],
)
def test_what_people_use_as_keys_passes(keys: Iterable[Hashable]) -> None:
    """Also where Python gives a few of them the same hash, as to -1 and -2."""
    KeyCheck().check(keys)


# -- text ------------------------------------------------------------------------------------------

EVIL = [
    "\x1b]52;c;cm0gLXJm\x07",
    "one\nINFO forged",
    "\r\x1b[2K",
    "\u202egpj.exe",
    "zero\u200bwidth",
    "\x00\x7f\x9b31m",
    "\u2028line",
    "\ue000",
]


class Choice(msgspec.Struct, tag="a"):
    """One of several kinds."""

    x: int


class Told(msgspec.Struct, frozen=True):
    """Text in all places where it can be."""

    name: str
    lines: list[str] = []
    pair: tuple[str, int] = ("", 0)
    facts: dict[str, str] = {}
    inner: Told | None = None
    either: int | str = 0
    trace: Lines = ""


@pytest.mark.parametrize("evil", EVIL)
def test_text_is_clean_before_anybody_sees_it(evil: str) -> None:
    """Whatever holds it; only a traceback keeps its lines."""
    told = Told(evil, [evil], (evil, 1), {evil: evil}, Told(evil), evil, f"{evil}\n\tx")
    for data, read in (
        (msgspec.json.encode(told), decode_json),
        (msgspec.msgpack.encode(told), decode_msgpack),
    ):
        found = read(data, Told)
        assert found.inner is not None
        texts = [found.name, *found.lines, found.pair[0], *found.facts, *found.facts.values()]
        for text in (*texts, found.inner.name, str(found.either)):
            assert text.isprintable()
            assert len(text) == len(evil)
        assert found.trace.endswith("\n\tx")
        assert found.trace.replace("\n", "").replace("\t", "").isprintable()


def test_clean_text_is_handed_on_as_it_is() -> None:
    """Letters of all languages, and emoji."""
    told = Told("Küche 厨房 مطبخ 🍲")
    assert decode_msgpack(msgspec.msgpack.encode(told), Told) == told


def test_an_id_with_a_line_end_behind_it_is_refused() -> None:
    """A pattern that ends in $ allows one."""
    kind: Any = Annotated[str, msgspec.Meta(pattern="^[a-z]{4}$")]
    assert decode_json(b'"abcd"', kind) == "abcd"
    for read, data in ((decode_json, b'"abcd\\n"'), (decode_msgpack, b"\xa5abcd\n")):
        with pytest.raises(msgspec.DecodeError):
            read(data, kind)


def test_names_that_differ_only_in_hidden_letters_are_refused() -> None:
    """One of them would be lost."""
    with pytest.raises(msgspec.DecodeError, match="cannot be shown"):
        decode_json(b'{"a\\u200b": "1", "a\\u200c": "2"}', dict[str, str])


@pytest.mark.parametrize(
    "data", [b'"\\ud800"', b"\xff", b"[" * 100_000, b"9" * 10_000, b"9" * 3000, b"", b'"\\u12']
)
def test_whatever_is_wrong_the_error_is_one(data: bytes) -> None:
    """Lone surrogates, no UTF-8, nesting, numbers without end."""
    for kind in (int, str, list[int], dict[str, str]):
        with pytest.raises(msgspec.DecodeError) as caught:
            decode_json(data, kind)
        assert len(str(caught.value)) < 600


def test_an_error_does_not_repeat_what_a_peer_wrote_as_it_is() -> None:
    """A reader that quotes is cut short and cleaned."""
    with pytest.raises(msgspec.DecodeError) as caught:
        decode_json(msgspec.json.encode({"type": "\x1b" + "b" * 5000}), Choice)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
