"""Reading typed values from JSON and MessagePack: what others wrote, and how far it is trusted.

All readers of bytes from a peer or a file are made here.  Three rules hold for each of them:

* Containers that hash what they hold (dicts, sets) hold text or bytes, whose hashes a peer
  cannot choose, or a bounded number of anything.  A type that breaks the rule is refused when its
  reader is made, so no test of ours can miss it.
* Text has no control characters and none that are invisible or change the direction of writing:
  they are replaced by spaces before the value is used, so it can be shown as it is.
* Whatever is wrong with the bytes, the error is ``msgspec.DecodeError``.

msgspec works out how to read a type when it first meets it, and a second thread that meets the same
type meanwhile crashes the process.  So readers are made one at a time, and kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from potluck._process import ForkSafeLock

T = TypeVar("T")
BytesLike: TypeAlias = bytes | bytearray | memoryview

MOST_KEYS = 4096
"""Entries of a container that hashes anything but text and bytes."""

_AS_LINES = {"text": "lines"}
_AS_IT_IS = {"text": "exact"}

Lines: TypeAlias = Annotated[str, msgspec.Meta(extra=_AS_LINES)]
"""Text of several lines: line ends and tabs stay."""

Exact: TypeAlias = Annotated[str, msgspec.Meta(extra=_AS_IT_IS)]
"""Text that is compared or stored and never shown as it is, such as the name of a tensor."""

Cleaner: TypeAlias = Callable[[Any], Any]


# -- text ------------------------------------------------------------------------------------------


def printable(text: str, keep: str = "") -> str:
    r"""The text without what steers a terminal, adds lines to a log or hides other text.

    Each such character becomes a space; those in ``keep`` stay.

    >>> printable("attic\x1b]52;c;cm0=\x07\nroot logged in")
    'attic ]52;c;cm0=  root logged in'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else " " for letter in text)


def printable_lines(text: str) -> str:
    r"""The same for text of several lines, which stay lines.

    >>> printable_lines("Traceback\n\tx\x1b[2J")
    'Traceback\n\tx [2J'
    """
    return printable(text, keep="\n\t")


def reason_of(error: BaseException) -> str:
    """What a library says is wrong with bytes of a peer, which it may quote: short and clean."""
    return printable(str(error)[:_LONGEST_REASON]) or type(error).__name__


_LONGEST_REASON = 500  # characters


# -- keys ------------------------------------------------------------------------------------------

_FREE_COLLISIONS = 20_000  # comparisons of keys that a message may cost: about a millisecond
_COLLISIONS_PER_KEY = 32
_COST_OF_SET = 1_000  # comparisons: sets that share a hash are compared by their members, and these
_NUMBER, _TEXT = 8192, 256  # bits, and letters, that are compared at the cost of one small number

_FREE_PROBES = 300_000  # looks at taken slots that a message may cost: a few milliseconds
_PROBES_PER_KEY = 100  # which takes as long as reading a key
_FEW_KEYS = 128  # so few cost little wherever they lie
_FEW_BITS = 8
_NEIGHBOURS = 9  # slots behind the first at which a set looks before it jumps
_WORD = (1 << 64) - 1


class KeyCheck:
    """Keeps the keys of the containers in one message from costing more time than its size.

    The hashes of numbers, and of all that is made of numbers, can be chosen: a container of keys
    that share one takes time with the square of their number.  So do keys of different hashes whose
    ways through the slots of the container meet.  Text and bytes have hashes that only this process
    knows.
    """

    def __init__(self) -> None:
        self._allowed = _FREE_COLLISIONS
        self._probes = _FREE_PROBES

    def check(self, keys: Iterable[Hashable], *, is_set: bool = False) -> None:
        """Raise ``ValueError`` if a dict of these keys would take too long to make.

        To be called before it is made; ``TypeError`` for a key that cannot be one.  A set is to be
        made of a dict (``set(dict.fromkeys(keys))``), which reserves its slots at once.
        """
        keys = list(keys)
        chosen = [key for key in keys if type(key) is not str and type(key) is not bytes]
        self._allowed += _COLLISIONS_PER_KEY * len(chosen)
        self._probes += _PROBES_PER_KEY * len(chosen)
        seen, last = 0, None
        for key in sorted(chosen, key=hash):  # a dict of hashes is what they may be made for
            number = hash(key)
            seen = seen + 1 if number == last else 0
            last = number
            if seen:
                self._allowed -= seen * _cost(key)
                if self._allowed < 0:
                    msg = f"Too many keys share a hash, at least {seen + 1} of one container"
                    raise ValueError(msg)
        if len(chosen) > _FEW_KEYS:
            self._check_places(keys, is_set=is_set)

    def _check_places(self, keys: Sequence[Hashable], *, is_set: bool) -> None:
        """Put hashes where Python puts keys: a dict doubles when two thirds of it are taken."""
        hashes = list(map(hash, keys))
        bits = _FEW_BITS
        while True:
            room = (2 << bits) // 3
            self._place(hashes[:room], bits, 0)
            if room >= len(hashes):
                break
            bits += 1
        if is_set:
            self._place(hashes, (2 * len(hashes)).bit_length(), _NEIGHBOURS)

    def _place(self, hashes: Iterable[int], bits: int, neighbours: int) -> None:
        taken = bytearray(1 << bits)
        mask = len(taken) - 1
        for number in hashes:
            at = number & mask
            if taken[at]:
                at = self._free(taken, number, neighbours)
            taken[at] = 1

    def _free(self, taken: bytearray, number: int, neighbours: int) -> int:
        """The slot for a hash whose first one is taken: where Python looks, in that order."""
        mask = len(taken) - 1
        at, rest = number & mask, number & _WORD
        while True:
            near = at + neighbours if at + neighbours <= mask else at
            found = taken.find(0, at, near + 1)
            if found >= 0:
                return found
            self._probes -= 1
            if self._probes < 0:
                msg = f"Too many of {sum(taken)} keys share a hash or a part of one"
                raise ValueError(msg)
            rest >>= 5
            at = (5 * at + rest + 1) & mask


def _cost(key: Hashable) -> int:
    """What it takes to compare a key with one of the same hash, in small numbers."""
    match key:
        case int():
            return 1 + key.bit_length() // _NUMBER
        case str() | bytes():
            return 1 + len(key) // _TEXT
        case tuple():
            return 1 + sum(map(_cost, key))
        case frozenset():
            return _COST_OF_SET + sum(map(_cost, key))
    return 4  # dates, decimal and complex numbers


# -- plain values ----------------------------------------------------------------------------------

MAX_DEPTH = 64
"""Containers within containers, in values whose type is not known beforehand."""

# What MessagePack writes in a fixed number of bytes: small numbers, None and booleans, heads of
# lists, other numbers, short text.  Taken in runs, which a regular expression does in no time.
_FIXED = re.compile(
    rb"(?:[\x00-\x7f\x90-\x9f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1\xdc]..|[\xca\xce\xd2\xdd].{4}"
    rb"|[\xcb\xcf\xd3].{8}|"
    + b"|".join(b"[\\x%02x].{%d}" % (0xA0 + n, n) for n in range(32))
    + b")*+",
    re.DOTALL,
)
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Of bytes and of longer text: how many bytes say the length."""


def decode_plain(data: BytesLike) -> Any:
    """Lists of plain values within lists, from MessagePack; text stays as it is.

    MessagePack's own maps are not among them: their keys would be hashed before anybody could look.
    """
    try:
        _refuse_all_but_plain(memoryview(data))
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise msgspec.DecodeError(reason_of(error)) from None


def _refuse_all_but_plain(data: memoryview) -> None:
    at, end = 0, len(data)
    while True:
        run = _FIXED.match(data, at)
        at = run.end() if run is not None else at
        if at >= end:
            return
        size = _LENGTHS.get(data[at], 0)
        if not size:
            raise msgspec.DecodeError(
                f"A value begins with {data[at]:#x}, which is not a plain value"
            )
        at += 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "big")


# -- readers ---------------------------------------------------------------------------------------


class Reader(Generic[T]):
    """Reads values of one type."""

    def __init__(self, decode: Callable[[Any], T], clean: Cleaner | None) -> None:
        self._decode = decode
        self._clean = clean

    def decode(self, data: BytesLike | str) -> T:
        """The value in ``data``; raises ``msgspec.DecodeError`` whatever is wrong with it."""
        try:
            value = self._decode(data)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            # Text that is no UTF-8, numbers with thousands of digits, nesting without end.
            raise msgspec.DecodeError(reason_of(error)) from None
        if self._clean is not None:
            value = self._clean(value)
        return value


_json: dict[Any, Reader[Any]] = {}
_msgpack: dict[Any, Reader[Any]] = {}
_making = ForkSafeLock()


def decode_json(data: BytesLike | str, kind: type[T]) -> T:
    """The value of this type that a text holds; raises ``msgspec.DecodeError``.

    >>> decode_json('{"desk": "10.0.0.1"}', dict[str, str])
    {'desk': '10.0.0.1'}
    """
    value: T = json_reader(kind).decode(data)
    return value


def decode_msgpack(data: BytesLike, kind: type[T]) -> T:
    """The same of MessagePack."""
    value: T = msgpack_reader(kind).decode(data)
    return value


def json_reader(kind: Any) -> Reader[Any]:
    """What reads this type, or one of several; made when it is first asked for."""
    known = _json.get(kind)
    if known is None:
        with _making:
            decode = msgspec.json.Decoder(kind).decode
            known = _json.setdefault(kind, Reader(decode, _Cleaning(is_json=True).of(kind)))
    return known


def msgpack_reader(kind: Any) -> Reader[Any]:
    """The same for MessagePack."""
    known = _msgpack.get(kind)
    if known is None:
        with _making:
            decode = msgspec.msgpack.Decoder(kind).decode
            known = _msgpack.setdefault(kind, Reader(decode, _Cleaning().of(kind)))
    return known


# -- what a type may hold, and how its text is cleaned ---------------------------------------------


class _Cleaning:
    """Works out for a type which parts of its values are text; None where there is none.

    JSON has numbers of any length too; those that no field of ours can mean are refused.
    """

    def __init__(self, *, is_json: bool = False) -> None:
        self._is_json = is_json
        self._structs: dict[type, _StructCleaner] = {}

    def of(self, kind: Any) -> Cleaner | None:
        return self._of(inspect.type_info(kind))

    def _of(self, info: inspect.Type) -> Cleaner | None:
        match info:
            case inspect.Metadata(type=inner, extra=extra):
                if extra == _AS_IT_IS:
                    return None
                return printable_lines if extra == _AS_LINES else self._of(inner)
            case inspect.StrType(pattern=pattern):
                return printable if pattern is None else _visible
            case inspect.IntType(ge=None, gt=None) | inspect.IntType(le=None, lt=None):
                return _short if self._is_json else None
            case inspect.StructType() | inspect.DataclassType():
                return self._of_struct(info)
            case inspect.AnyType():
                msg = "A value of any type may hold containers that hash anything"
                raise TypeError(msg)
        return self._of_container(info)

    def _of_container(self, info: inspect.Type) -> Cleaner | None:
        match info:
            case inspect.DictType():
                return self._of_dict(info)
            case inspect.SetType() | inspect.FrozenSetType():
                return self._of_set(info)
            case inspect.ListType(item_type=item):
                return _each(list, self._of(item))
            case inspect.VarTupleType(item_type=item):
                return _each(tuple, self._of(item))
            case inspect.TupleType(item_types=items):
                return _in_places(tuple, [self._of(item) for item in items])
            case inspect.NamedTupleType(cls=cls, fields=fields):
                make: Cleaner = cls._make  # type: ignore[attr-defined]
                return _in_places(make, [self._of(field.type) for field in fields])
            case inspect.UnionType(types=kinds):
                return self._of_union(kinds)
        return None

    def _of_set(self, info: inspect.SetType | inspect.FrozenSetType) -> Cleaner | None:
        _check_hashed(info.item_type, info.max_length, info)
        kind = set if isinstance(info, inspect.SetType) else frozenset
        return _each(kind, self._of(info.item_type))

    def _of_dict(self, info: inspect.DictType) -> Cleaner | None:
        _check_hashed(info.key_type, info.max_length, info)
        key, value = self._of(info.key_type), self._of(info.value_type)
        if key is None and value is None:
            return None

        def clean(found: dict[Any, Any]) -> dict[Any, Any]:
            cleaned = {
                key(k) if key is not None else k: value(v) if value is not None else v
                for k, v in found.items()
            }
            if len(cleaned) != len(found):
                raise msgspec.DecodeError("Two names differ only in letters that cannot be shown")
            return cleaned

        return clean

    def _of_union(self, kinds: Iterable[inspect.Type]) -> Cleaner | None:
        by_type: dict[type, Cleaner] = {}
        for kind in kinds:
            cleaner = self._of(kind)
            if cleaner is not None:
                by_type[_python_type(kind)] = cleaner
        if not by_type:
            return None

        def clean(found: Any) -> Any:
            cleaner = by_type.get(type(found))
            return found if cleaner is None else cleaner(found)

        return clean

    def _of_struct(self, info: inspect.StructType | inspect.DataclassType) -> Cleaner | None:
        known = self._structs.get(info.cls)
        if known is None:
            known = self._structs[info.cls] = _StructCleaner()
            for field in info.fields:
                cleaner = self._of(field.type)
                if cleaner is not None:
                    known.fields.append((field.name, cleaner))
            if not known.fields:
                return None
        return known


class _StructCleaner:
    """Cleans the fields of a struct that are text or hold some."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, Cleaner]] = []

    def __call__(self, found: Any) -> Any:
        for name, cleaner in self.fields:
            before = getattr(found, name)
            after = cleaner(before)
            if after is not before:
                _set(found, name, after)
        return found


def _set(found: Any, name: str, value: Any) -> None:
    if isinstance(found, msgspec.Struct):
        msgspec.structs.force_setattr(found, name, value)
    else:
        object.__setattr__(found, name, value)


def _each(kind: type, cleaner: Cleaner | None) -> Cleaner | None:
    if cleaner is None:
        return None

    def clean(found: Any) -> Any:
        cleaned = [cleaner(each) for each in found]
        if all(map(_is, cleaned, found)):
            return found
        return kind(cleaned)

    return clean


def _short(number: int) -> int:
    if not -(1 << 64) < number < 1 << 64:
        raise msgspec.DecodeError("A number has more than 64 bits")
    return number


def _visible(text: str) -> str:
    """Text that has to be as it is, such as an id: a pattern that ends in $ allows a line end."""
    if not text.isprintable():
        raise msgspec.DecodeError("A text has letters that cannot be shown")
    return text


def _is(one: object, other: object) -> bool:
    return one is other


def _in_places(make: Cleaner, cleaners: list[Cleaner | None]) -> Cleaner | None:
    if not any(cleaners):
        return None

    def clean(found: tuple[Any, ...]) -> Any:
        cleaned = [
            each if cleaner is None else cleaner(each)
            for cleaner, each in zip(cleaners, found, strict=True)
        ]
        return found if all(map(_is, cleaned, found)) else make(cleaned)

    return clean


def _python_type(info: inspect.Type) -> type:
    """The type of the values that it describes."""
    match info:
        case inspect.Metadata(type=inner):
            return _python_type(inner)
        case (
            inspect.StructType(cls=cls)
            | inspect.DataclassType(cls=cls)
            | inspect.NamedTupleType(cls=cls)
        ):
            return cls
        case inspect.IntType():
            return int
        case inspect.StrType():
            return str
        case inspect.DictType():
            return dict
        case inspect.ListType():
            return list
        case inspect.SetType():
            return set
        case inspect.FrozenSetType():
            return frozenset
        case inspect.TupleType() | inspect.VarTupleType():
            return tuple
    msg = f"Text in {info} cannot be cleaned"
    raise TypeError(msg)


def _check_hashed(key: inspect.Type, most: int | None, where: inspect.Type) -> None:
    while isinstance(key, inspect.Metadata):
        key = key.type
    safe = (inspect.StrType, inspect.BytesType, inspect.EnumType, inspect.LiteralType)
    if not isinstance(key, safe) and (most is None or most > MOST_KEYS):
        msg = f"{where} hashes keys that a peer can choose, without a bound on their number"
        raise TypeError(msg)
