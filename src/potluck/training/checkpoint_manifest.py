"""The manifest of one rank's part of a checkpoint: what is in its file, with checksums.

It is written last, so it is also the mark that this part is complete.  A checkpoint is complete
when the parts of all ranks are; nobody has to tell anybody.
"""

from __future__ import annotations

import hashlib
import itertools
import math

import msgspec

from potluck.core.cluster_bounds import Ancestry, Count
from potluck.core.histories import Trail
from potluck.decoding import Exact, decode_json
from potluck.errors import IoError
from potluck.training.checkpoint_format import MAX_HEADER, Entry, dtype_of, encode_header

__all__ = ["BLOCK", "Manifest", "Piece", "digest", "header_of", "is_own", "own_name", "part_name"]

BLOCK = 1 << 20
"""Bytes that have one checksum: a part of a file can be read and checked alone."""

MAX_MANIFEST = 256 << 20
_MAGIC = b"potluck-checkpoint 1 "
_DIGEST = 16
_LARGEST = 1 << 62


class Piece(msgspec.Struct, frozen=True):
    """Some elements of one array, as they lie in a file."""

    name: Exact
    dtype: str
    shape: tuple[int, ...]
    """Of the whole array."""
    start: int
    stop: int
    """Elements of it that are here, in C order."""
    offset: int
    """Bytes from the beginning of the data."""


class Manifest(msgspec.Struct, frozen=True):
    """What one rank has written."""

    checkpoint: str
    """The same for all parts of one checkpoint."""
    lineage: str
    epoch: int
    step: int
    rank: int
    world_size: int
    begins: int
    """Where the data begins in the file."""
    size: int
    """Bytes of data."""
    checksums: tuple[str, ...]
    """One for each block of the data."""
    pieces: tuple[Piece, ...]
    shape: bytes
    """The tree to which the arrays belong, as :func:`potluck.training.trees.written` gives it."""
    own: bytes = b""
    """The same for what this rank alone has."""
    ancestry: Ancestry = ()
    """Of the lineage; empty in checkpoints of earlier versions."""
    samples: Count = 0
    """Committed samples; 0 in checkpoints of earlier versions."""
    trail: Trail = ()
    """The last step of each earlier lineage that is part of the state."""
    header: str = ""
    """The checksum of the file up to where the data begins; empty in earlier versions."""

    def encode(self) -> bytes:
        """As the content of a file."""
        text = msgspec.json.encode(self)
        return _MAGIC + digest(text).encode() + b"\n" + text

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """From the content of a file; raises :class:`IoError` if anything is wrong with it."""
        head, _, text = data.partition(b"\n")
        if not head.startswith(_MAGIC):
            raise IoError("This is no manifest of a checkpoint")
        if head[len(_MAGIC) :] != digest(text).encode():
            raise IoError("The manifest of a checkpoint is damaged", cause="its checksum differs")
        try:
            manifest = decode_json(text, cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also bad UTF-8
            raise IoError("The manifest of a checkpoint is damaged", cause=str(error)) from None
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise unless everything in it can be true."""
        if self.size < 0 or not 0 <= self.begins <= MAX_HEADER:
            raise IoError("The manifest of a checkpoint has an impossible size")
        blocks = -(-self.size // BLOCK)
        if not 0 <= self.rank < self.world_size or len(self.checksums) != blocks:
            raise IoError("The manifest of a checkpoint contradicts itself")
        if not (0 <= self.epoch < _LARGEST and 0 <= self.step < _LARGEST):
            raise IoError("The manifest of a checkpoint has an impossible epoch or step")
        claimed = 0
        for piece in self.pieces:
            whole, width = math.prod(piece.shape), dtype_of(piece.dtype).itemsize
            end = piece.offset + (piece.stop - piece.start) * width
            if not 0 <= piece.start <= piece.stop <= whole or not 0 <= piece.offset <= end:
                raise IoError(f"The manifest is wrong about {piece.name[:100]!r}")
            claimed += (piece.stop - piece.start) * width
            # Pieces do not share bytes: a small file cannot claim to be a huge array.
            if min(piece.shape, default=0) < 0 or end > self.size or claimed > self.size:
                raise IoError(f"The manifest is wrong about {piece.name[:100]!r}")


def header_of(manifest: Manifest) -> bytes:
    """The beginning of the file that a manifest is about."""
    return encode_header(_entries(manifest.pieces), _facts(manifest))


def _entries(pieces: tuple[Piece, ...]) -> dict[str, Entry]:
    entries = {}
    for piece, after in itertools.zip_longest(pieces, pieces[1:]):
        count = piece.stop - piece.start
        whole = count == math.prod(piece.shape)
        size = count * dtype_of(piece.dtype).itemsize
        assert after is None or after.offset == piece.offset + size
        shape = piece.shape if whole else (count,)
        entries[piece.name] = Entry(piece.dtype, shape, piece.offset, piece.offset + size)
    return entries


def _facts(manifest: Manifest) -> dict[str, str]:
    return {
        "format": "potluck",
        "step": str(manifest.step),
        "part": f"{manifest.rank} of {manifest.world_size}",
    }


def digest(data: bytes | bytearray | memoryview) -> str:
    """A checksum that no accident passes."""
    return hashlib.blake2b(data, digest_size=_DIGEST).hexdigest()


def part_name(rank: int, world_size: int) -> str:
    """What a rank calls its file.

    >>> part_name(1, 4)
    'part-00001-of-00004'
    """
    return f"part-{rank:05d}-of-{world_size:05d}"


_OWN = "__own__."


def own_name(rank: int, name: str) -> str:
    """What an array is called that one rank alone has.

    >>> own_name(2, "residuals.gradients")
    '__own__.2.residuals.gradients'
    """
    return f"{_OWN}{rank}.{name}"


def is_own(name: str) -> bool:
    """Whether an array belongs to one rank alone."""
    return name.startswith(_OWN)
