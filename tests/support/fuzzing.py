"""Feeds every decoder of bytes from the network or from files with damaged and hostile inputs.

A target is a decoder, the error that it documents, and valid inputs.  Inputs are made of these, by
changing bytes, by changing the values that a message holds and writing it again, and by families
that were found to be expensive once.  What counts as a fault: any other error, more CPU time than
the size of the input explains, more memory than that.  All of it follows from a seed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["Fault", "Figures", "Target", "collisions", "fuzz", "hostile_values"]

SECONDS, SECONDS_PER_BYTE = 0.1, 4e-7
"""Of CPU that an input may take; ten times what the slowest valid one takes."""

BYTES, BYTES_PER_BYTE = 4 << 20, 300
"""Of memory: small lists and texts of Python take about a hundred bytes for each one sent."""

MEASURED = 512
"""One input in so many is decoded under a memory profiler, which is slow."""

PRIME = (1 << 61) - 1  # numbers that differ by a multiple of it have the same hash


@dataclass(frozen=True)
class Target:
    """A decoder."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Sequence[bytes]
    form: str = "bytes"
    """``msgpack``, ``json`` or ``bytes``: how the seeds are written."""
    lead: int = 0
    """Bytes before the message that no mutation of values touches."""
    weight: float = 1.0
    """How often it is chosen."""
    repair: Callable[[bytes], bytes] = field(default=lambda data: data)
    """Makes checksums and lengths right again, so that damage gets behind them."""


@dataclass(frozen=True)
class Fault:
    """An input that a decoder did not deal with as it should."""

    target: str
    what: str
    data: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.target}: {self.what}, for {len(self.data)} bytes {self.data[:60]!r}"


@dataclass
class Figures:
    """What was done."""

    inputs: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    slowest: float = 0.0
    largest: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many inputs."""
        return sum(self.inputs.values())


# -- values ----------------------------------------------------------------------------------------


def collisions(count: int, dice: random.Random) -> list[Any]:
    """Keys that share a hash, each in the form in which the codec of objects writes it."""
    start = dice.randrange(1 << 20)
    same = [number * PRIME for number in range(8)]
    floats = [2.0 ** (61 * n) for n in range(-16, 16)]
    families: list[Iterator[Any]] = [
        ([16, (start + PRIME * n).to_bytes(12, "little", signed=True)] for n in itertools.count(9)),
        ([24, (start + PRIME * n).to_bytes(16, "big")] for n in itertools.count(9)),
        ([18, [float(start - 1000003 * n), float(n)]] for n in itertools.count()),
        ([1, *each] for each in itertools.product(same, repeat=6)),
        ([1, *each] for each in itertools.product(floats, repeat=4)),
        ([3, [1, *each]] for each in itertools.product(same, repeat=6)),
        ([1, [1, *each], 7] for each in itertools.product(same, repeat=6)),
    ]
    return list(itertools.islice(dice.choice(families), count))


_ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    255,
    1 << 62,
    (1 << 64) - 1,
    -(1 << 63),
    0.0,
    -0.0,
    1e308,
    5e-324,
    float("inf"),
    float("nan"),
    "",
    "\x1b]52;c;cm0gLXJm\x07",
    "a\nb",
    "\u202eevil",
    "\x00",
    "é" * 300,
    "x" * 5000,
    b"",
    b"\0" * 32,
    b"\xff" * 33,
    bytes(6000),
    [0] * 3000,
    {str(number): number for number in range(500)},
    [19, ["9" * 400, 0]],
    [20, "x"],
    [22, [1 << 60, 0, 0]],
    [23, "1E+99999"],
    [23, "sNaN"],
]


def hostile_values(dice: random.Random) -> Any:
    """One value that somebody may have thought of."""
    kind = dice.randrange(10)
    if kind < 5:
        return dice.choice(_ODD)
    if kind == 5:
        return [dice.randrange(30), *(hostile_values(dice) for _ in range(dice.randrange(4)))]
    if kind == 6:
        deep: Any = 0
        for _ in range(dice.choice([3, 60, 70, 500])):
            deep = [1, deep]
        return deep
    if kind == 7:
        return {dice.choice(["", "a", "type", "\x1b"]): hostile_values(dice)}
    if kind == 8:
        return [dice.choice([2, 3, 4]), *collisions(dice.choice([2, 8, 300]), dice)]
    return dice.randrange(-200, 1 << dice.randrange(1, 63))


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree in which something can be put."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            places: Any = range(len(one))
        elif isinstance(one, dict):
            places = list(one)
        else:
            continue
        for place in places:
            yield one, place
            waiting.append(one[place])


def _change_values(tree: Any, dice: random.Random) -> Any:
    places = list(_nodes(tree))
    if not places:
        return hostile_values(dice)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        with contextlib.suppress(IndexError, KeyError):  # an earlier change took the place away
            _change_one(*dice.choice(places), places, dice)
    return tree


def _change_one(
    holder: Any, place: Any, places: Sequence[tuple[Any, Any]], dice: random.Random
) -> None:
    kind = dice.randrange(5)
    if kind == 0 and isinstance(holder, dict):
        holder[dice.choice(["", "type", "\x1b[2J", f"{place}x"])] = holder.pop(place)
    elif kind == 1:
        other, there = dice.choice(places)
        holder[place] = copy.deepcopy(other[there])  # of itself, this would not end
    elif kind == 2 and isinstance(holder, list):
        del holder[place]
    else:
        holder[place] = copy.copy(hostile_values(dice))


# -- bytes -----------------------------------------------------------------------------------------

_NUMBERS = [b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\0" * 4, b"\xdd\xff\xff\xff\xff"]


def _change_bytes(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 3, 8])):
        at = dice.randrange(len(changed) + 1)
        kind = dice.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = dice.randrange(256)
        elif kind == 2:
            changed[at:at] = dice.randbytes(dice.randrange(1, 9))
        elif kind == 3:
            del changed[at : at + dice.randrange(1, 9)]
        elif kind == 4:
            word = dice.choice(_NUMBERS)
            changed[at : at + len(word)] = word
        else:
            del changed[at:]
    return bytes(changed)


class Mutator:
    """Makes inputs for one target."""

    def __init__(self, target: Target, dice: random.Random) -> None:
        self._target = target
        self._dice = dice

    def next(self) -> bytes:
        """One input."""
        target, dice = self._target, self._dice
        seed = dice.choice(target.seeds)
        if target.form == "bytes" or dice.random() < 0.6:
            return target.repair(_change_bytes(seed, dice))
        lead, body = seed[: target.lead], seed[target.lead :]
        try:
            if target.form == "json":
                made = msgspec.json.encode(_change_values(msgspec.json.decode(body), dice))
            else:
                made = msgspec.msgpack.encode(_change_values(msgspec.msgpack.decode(body), dice))
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, TypeError):
            made = _change_bytes(body, dice)
        return target.repair(lead + made)


def expensive(target: Target, dice: random.Random, size: int = 20_000) -> Iterator[bytes]:
    """Inputs that once took seconds: keys of one hash, nesting, long numbers."""
    lead = next(iter(target.seeds))[: target.lead]
    if target.form == "json":
        yield b"[" * size
        yield b'{"a":' * size
        yield b"9" * size
        yield b"[" + b"9" * 4000 + b",1" * size + b"]"
        return
    for code in (2, 3, 4):
        keys = collisions(size, dice)
        items = [each for key in keys for each in (key, 0)] if code == 4 else keys
        yield target.repair(lead + msgspec.msgpack.encode([code, *items]))
    same = [number * PRIME for number in range(8)]
    pairs = itertools.islice(itertools.product(same, repeat=6), size)
    written = b"".join(msgspec.msgpack.encode(list(each)) + b"\0" for each in pairs)
    yield target.repair(lead + b"\xdf" + size.to_bytes(4, "big") + written)
    yield target.repair(lead + b"\x91" * size)
    yield target.repair(lead + msgspec.msgpack.encode([16, bytes(size)]))


# -- running ---------------------------------------------------------------------------------------


def try_one(target: Target, data: bytes, figures: Figures, *, measured: bool = False) -> None:
    """Decode one input, and write down what is wrong with how that went."""
    figures.inputs[target.name] += 1
    if measured:
        tracemalloc.start()
    begin = time.thread_time()
    try:
        target.decode(data)
    except target.errors:
        figures.refused += 1
    except BaseException as error:  # noqa: BLE001 - any other is what we look for
        figures.faults.append(Fault(target.name, f"{type(error).__name__}: {error}"[:200], data))
    taken = time.thread_time() - begin
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        figures.largest = max(figures.largest, peak)
        if peak > BYTES + BYTES_PER_BYTE * len(data):
            figures.faults.append(Fault(target.name, f"{peak} bytes of memory", data))
        return
    for _ in range(2):  # a busy machine, or a collection of garbage, is slow once
        if taken <= SECONDS + SECONDS_PER_BYTE * len(data):
            break
        begin = time.thread_time()
        with contextlib.suppress(Exception):
            target.decode(data)
        taken = min(taken, time.thread_time() - begin)
    figures.slowest = max(figures.slowest, taken)
    if taken > SECONDS + SECONDS_PER_BYTE * len(data):
        figures.faults.append(Fault(target.name, f"{taken:.2f} s of CPU", data))


def fuzz(targets: Sequence[Target], *, seed: int, inputs: int, seconds: float = 3600.0) -> Figures:
    """Try so many inputs, or for so long."""
    dice = random.Random(seed)
    figures = Figures()
    makers = [Mutator(target, dice) for target in targets]
    weights = list(itertools.accumulate(target.weight for target in targets))
    deadline = time.monotonic() + seconds
    for target in targets:
        for data in expensive(target, dice):
            try_one(target, data, figures)
        for data in target.seeds:
            target.decode(data)  # what is valid is read
    for number in itertools.count():
        if figures.total >= inputs or (number % 256 == 0 and time.monotonic() > deadline):
            return figures
        (index,) = dice.choices(range(len(targets)), cum_weights=weights)
        measured = number % MEASURED == 0
        try_one(targets[index], makers[index].next(), figures, measured=measured)
    return figures
