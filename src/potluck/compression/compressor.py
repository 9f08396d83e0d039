"""GradientCompressor: a strategy at work, with the memory that makes it lose nothing for good.

With error feedback what compression leaves behind is remembered for each tensor and added to the
next gradient of that tensor.  It is changed only when a step is committed: a step that is repeated
after a failure finds what the first try found.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.compression.base import ByteArray, CompressionContext, Floats, flat_floats, take_front
from potluck.compression.choice import METHODS, method_for
from potluck.compression.sparse import seed_for
from potluck.compression.strategy import CompressionStrategy, QuantizationType
from potluck.errors import MalformedFrame
from potluck.schedule.reduce import quiet

# --------------------------------------------------------------------------------------------------
# What is carried from one step to the next, and changes only when a step is committed.


class StagedArrays(MutableMapping[str, Floats]):
    """Arrays by name.  What is written counts after :meth:`commit`; until then the old is read.

    >>> ledger = StagedArrays()
    >>> ledger["weight"] = np.ones(2, np.float32)
    >>> "weight" in ledger
    False
    >>> ledger.commit()
    >>> ledger["weight"].tolist()
    [1.0, 1.0]
    """

    def __init__(self) -> None:
        self._committed: dict[str, Floats] = {}
        self._proposed: dict[str, Floats] = {}
        self._spare: dict[str, Floats] = {}  # fresh memory is slow to touch

    def __getitem__(self, name: str) -> Floats:
        return self._committed[name]

    def __setitem__(self, name: str, array: Floats) -> None:
        self._proposed[name] = array

    def __delitem__(self, name: str) -> None:
        del self._committed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._committed)

    def __len__(self) -> int:
        return len(self._committed)

    def room(self, name: str, size: int) -> Floats:
        """Memory for a vector that is to be written, with any content: not that of the old one."""
        array = self._proposed.get(name)
        if array is None:
            array = self._spare.pop(name, None)
        if array is None or array.shape != (size,):
            array = np.empty(size, np.float32)
        self._proposed[name] = array
        return array

    def commit(self, only: str | None = None) -> None:
        """What was written counts from now on: all of it, or what has this name."""
        for name in list(self._proposed) if only is None else [only]:
            array = self._proposed.pop(name, None)
            if array is not None:
                if name in self._committed:
                    self._spare[name] = self._committed[name]
                self._committed[name] = array

    def discard(self, only: str | None = None) -> None:
        """What was written never was: all of it, or what has this name."""
        for name in list(self._proposed) if only is None else [only]:
            array = self._proposed.pop(name, None)
            if array is not None and name not in self._spare:
                self._spare[name] = array

    def clear(self) -> None:
        """Know nothing."""
        self._committed.clear()
        self._proposed.clear()
        self._spare.clear()

    def load(self, arrays: Mapping[str, npt.ArrayLike], dimensions: int = 1) -> None:
        """Know what was saved, or raise ``ValueError`` and know what was known before."""
        if not isinstance(arrays, Mapping):
            msg = f"Saved are arrays by the names of their tensors, not {type(arrays).__name__}"
            raise ValueError(msg)  # noqa: TRY004 - what is wrong is what a file says
        read = {str(name): _read(name, array, dimensions) for name, array in arrays.items()}
        self.clear()
        self._committed.update(read)


def _read(name: object, saved: npt.ArrayLike, dimensions: int) -> Floats:
    try:
        array = np.array(saved, np.float32)
    except (TypeError, ValueError) as error:
        msg = f"The saved state of the tensor {name!r} is not an array of numbers: {error}"
        raise ValueError(msg) from None
    if array.ndim != dimensions:
        msg = (
            f"What was saved for the tensor {name!r} has {array.ndim} dimensions: {dimensions} due"
        )
        raise ValueError(msg)
    if not np.isfinite(array).all():
        msg = f"The saved state of the tensor {name!r} holds NaN or infinity"
        raise ValueError(msg)
    return array


def forget_the_unreal(residual: Floats) -> None:
    """Infinite or NaN, it would stay so for ever; call it within ``quiet()``."""
    if not np.isfinite(residual.sum()):  # the quickest way to see that all are finite
        np.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


# --------------------------------------------------------------------------------------------------
# A compressed gradient: its bytes, and what they stand for.

MOST_VALUES = 1 << 28
"""Values that a compressed gradient may stand for unless the reader says otherwise: 1 GiB."""

MOST_DIMENSIONS = 64  # as in numpy

_HEAD = struct.Struct("<2sBBB3xd")  # magic, version, method, dimensions, parameter
_MAGIC = b"PG"
_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class CompressedGradient:
    """What :meth:`GradientCompressor.compress` makes.

    >>> import numpy
    >>> from potluck import GradientCompressor
    >>> packed = GradientCompressor("float16").compress(numpy.ones(1000, numpy.float32))
    >>> packed.original_size, packed.compressed_bytes, packed.compression_ratio
    (1000, 2000, 2.0)
    """

    strategy: CompressionStrategy
    shape: tuple[int, ...]
    data: ByteArray

    @property
    def original_size(self) -> int:
        """How many values it stands for."""
        return prod(self.shape)

    @property
    def compressed_bytes(self) -> int:
        """How many bytes the values take."""
        return int(self.data.size)

    @property
    def compression_ratio(self) -> float:
        """Bytes as float32 for each byte here; 1 for nothing at all."""
        before = 4 * self.original_size
        return before / self.compressed_bytes if before and self.data.size else 1.0

    def to_bytes(self) -> bytes:
        """Everything, for a file or a message."""
        number, dimensions = METHODS.index(self.strategy.method), len(self.shape)
        head = _HEAD.pack(_MAGIC, _VERSION, number, dimensions, self.strategy.parameter)
        return head + struct.pack(f"<{dimensions}Q", *self.shape) + self.data.tobytes()

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview, *, most_values: int = MOST_VALUES
    ) -> CompressedGradient:
        """Read what :meth:`to_bytes` wrote; raises ``MalformedFrame`` for anything else."""
        raw = np.frombuffer(data, np.uint8)
        head, rest = take_front(raw, _HEAD.size, "The head of a compressed gradient")
        magic, version, number, dimensions, parameter = _HEAD.unpack(head.tobytes())
        if magic != _MAGIC or version != _VERSION:
            raise MalformedFrame(f"These bytes are no compressed gradient: {magic!r} {version}")
        if number >= len(METHODS) or dimensions > MOST_DIMENSIONS:
            raise MalformedFrame(f"Method {number} with {dimensions} dimensions is not known")
        sides, rest = take_front(rest, 8 * dimensions, "The shape of a compressed gradient")
        shape = struct.unpack(f"<{dimensions}Q", sides.tobytes())
        if prod(side or 1 for side in shape) > most_values:
            raise MalformedFrame(f"The shape {shape} has more than {most_values} values")
        return cls(_strategy(METHODS[number], parameter), shape, rest)


def _strategy(method: str, parameter: float) -> CompressionStrategy:
    try:
        return CompressionStrategy(method, parameter)  # never "auto"
    except ValueError as error:
        raise MalformedFrame(f"No encoder writes {method}:{parameter}", cause=error) from None


# --------------------------------------------------------------------------------------------------

LARGEST = (1 << 53) - 1
"""Of seeds and steps: what every language and file format can hold."""


class GradientCompressor:
    """Compresses the gradients of one model.

    Tensors are told apart by ``name``.  With ``auto_commit`` every compression counts at once;
    without, those since the last :meth:`commit` count when that is called, and never after
    :meth:`discard`; until then a tensor is compressed once.  ``seed`` must be the same on all
    ranks.

    One thread at a time may use it.  Collectives may be under way meanwhile: in one context on any
    tensors, in several on different ones.  What concerns all tensors (``commit``, ``discard``,
    ``state_dict`` and the like) is for the time when none is.

    >>> compressor = GradientCompressor("topk:0.5")
    >>> gradient = np.array([4, 1, -3, 2], np.float32)
    >>> compressor.decompress(compressor.compress(gradient)).tolist()
    [4.0, 0.0, -3.0, 0.0]
    >>> compressor.decompress(compressor.compress(gradient)).tolist()
    [4.0, 0.0, 0.0, 4.0]
    """

    def __init__(
        self,
        strategy: CompressionStrategy | QuantizationType | str = CompressionStrategy.INT8,
        error_feedback: bool = True,  # noqa: FBT001, FBT002 - the order people know
        *,
        seed: int = 0,
        auto_commit: bool = True,
    ) -> None:
        self.strategy = CompressionStrategy.of(strategy)
        self.error_feedback = error_feedback and self.strategy.is_lossy
        self.auto_commit = auto_commit
        self.seed = _whole("seed", seed, -LARGEST, LARGEST)
        self.method = method_for(self.strategy)
        self.residuals = StagedArrays()
        self.kept = StagedArrays()
        self._counts = [0, 0, 0]  # commits, bytes before and after; shared with what `by` makes

    @property
    def step(self) -> int:
        """Commits so far; in a group, those of the rank that has most."""
        return self._counts[0]

    @step.setter
    def step(self, number: int) -> None:
        self._counts[0] = number

    def tensor(self, name: str) -> TensorCompressor:
        """The compression of one tensor, for ``all_reduce(compression=...)``."""
        return TensorCompressor(self, name)

    def by(self, strategy: CompressionStrategy) -> GradientCompressor:
        """The same memory at work for another strategy."""
        other = copy.copy(self)
        other.strategy = strategy
        other.method = method_for(strategy)
        return other

    def __repr__(self) -> str:
        """The expression that makes it."""
        return f"GradientCompressor({self.strategy!r}, error_feedback={self.error_feedback})"

    def compress(self, gradient: Any, name: str = "") -> CompressedGradient:
        """Fewer bytes for a gradient, of any library, and for what earlier ones left behind."""
        shape, given = flat_floats(gradient)
        values = self.compensated(given, name)
        turn = self.turn(shape, name)
        with quiet():
            made = CompressedGradient(
                self.strategy.concrete, shape, self.method.encode(values, turn)
            )
            if self.error_feedback:
                self.leave_behind(values, self.method.decode(made.data, values.size), name)
        self.note(made.original_size * 4, made.compressed_bytes)
        self.keep(turn, name)
        self.succeed(name)
        return made

    def decompress(self, compressed: CompressedGradient) -> Floats:
        """The gradient for which bytes stand; raises ``MalformedFrame`` if they are damaged."""
        method = self.method
        if compressed.strategy != self.strategy.concrete:
            method = method_for(compressed.strategy)
        with quiet():
            values = method.decode(compressed.data, compressed.original_size)
        return values.reshape(compressed.shape)

    @property
    def compression_ratio(self) -> float:
        """Bytes before for each byte after, of everything so far; 1 before the first."""
        _, before, after = self._counts
        return before / after if after else 1.0

    def note(self, before: int, after: int) -> None:
        """Count bytes."""
        self._counts[1] += before
        self._counts[2] += after

    # -- error feedback --------------------------------------------------------------------------

    def has_residual(self, name: str) -> bool:
        """Whether earlier gradients of a tensor left something behind."""
        residual = self.residuals.get(name) if self.error_feedback else None
        return residual is not None and residual.size > 0

    def compensated(self, values: Floats, name: str, out: Floats | None = None) -> Floats:
        """A gradient and what earlier ones left behind, in ``out`` or new memory if there is any.

        Otherwise it is the gradient as it is.
        """
        if not self.has_residual(name):
            return values
        residual = self.residuals[name]
        if residual.size != values.size:
            msg = (
                f"The tensor {name!r} has {values.size} values, but {residual.size} before: "
                "give each tensor a name of its own, or call reset_error_feedback()"
            )
            raise ValueError(msg)
        with quiet():
            return np.add(values, residual, out=out)

    def staged(self, values: Floats, name: str) -> Floats:
        """A gradient and what earlier ones left behind, where what this one leaves will be.

        Without error feedback it is the gradient as it is.
        """
        if not self.error_feedback:
            return values
        room = self.residuals.room(name, values.size)
        if self.compensated(values, name, room) is not room:
            np.copyto(room, values)
        return room

    def leave_behind(self, wanted: Floats, sent: Floats, name: str) -> None:
        """Remember the difference; NaN and infinity are not remembered."""
        residual = self.residuals.room(name, wanted.size)
        np.subtract(wanted, sent, out=residual)
        forget_the_unreal(residual)

    def turn(self, shape: tuple[int, ...], name: str) -> CompressionContext:
        """What the method needs to know about a tensor in this step."""
        seed = seed_for(self.seed, self.step, name)
        return CompressionContext(shape, seed, self.error_feedback, self.kept.get(name))

    def keep(self, turn: CompressionContext, name: str) -> None:
        """Remember what the method wants to keep."""
        if turn.kept is not None:
            self.kept[name] = turn.kept

    def succeed(self, name: str) -> None:
        """A tensor is through."""
        if self.auto_commit:
            self.residuals.commit(name)
            self.kept.commit(name)
            self.step += 1

    def fail(self, name: str) -> None:
        """A tensor is not through: nothing of this try counts."""
        self.residuals.discard(name)
        self.kept.discard(name)

    def commit(self) -> None:
        """The step counts: what it left behind is added to the next."""
        self.residuals.commit()
        self.kept.commit()
        self.step += 1

    def discard(self) -> None:
        """The step never was: the next finds what this one found."""
        self.residuals.discard()
        self.kept.discard()

    def reset_error_feedback(self) -> None:
        """Forget everything that was left behind."""
        self.residuals.clear()
        self.kept.clear()

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is committed, to be saved: numbers, texts and arrays of float32."""
        return {
            "strategy": str(self.strategy),
            "seed": self.seed,
            "step": self.step,
            "residuals": {name: array.copy() for name, array in self.residuals.items()},
            "kept": {name: array.copy() for name, array in self.kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what was saved with the same strategy; arrays may have become lists.

        Raises ``ValueError`` for anything else, and then nothing has changed.
        """
        missing = [each for each in self.state_dict() if each not in state]
        if missing:
            msg = f"This is not the state of a GradientCompressor: {', '.join(missing)} is missing"
            raise ValueError(msg)
        if str(state["strategy"]) != str(self.strategy):
            msg = f"Saved for {state['strategy']}, but this compresses by {self.strategy}"
            raise ValueError(msg)
        seed = _whole("seed", state["seed"], -LARGEST, LARGEST)
        step = _whole("step", state["step"], 0, LARGEST)
        residuals, kept = StagedArrays(), StagedArrays()
        residuals.load(state["residuals"])
        kept.load(state["kept"], dimensions=2)
        self.residuals, self.kept, self.seed, self.step = residuals, kept, seed, step


def _whole(name: str, number: Any, least: int, most: int) -> int:
    try:
        found = int(number)
    except (TypeError, ValueError, OverflowError):
        found = most + 1
    if not (least <= found <= most and found == number):
        msg = f"A {name} is a whole number from {least} to {most}, not {number!r}"
        raise ValueError(msg)
    return found


class TensorCompressor(NamedTuple):
    """A compressor, and which of its tensors is meant."""

    compressor: GradientCompressor
    name: str
