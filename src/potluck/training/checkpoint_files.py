"""Files of checkpoints: private, there whole or not at all, and never written through a link.

A file is written beside its place, forced to disk and then renamed.  Everything that is created or
replaced is reached from a folder that is open and was checked, name by name: what another user
plants in the way is refused, not followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import math
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from potluck._decode import Exact, decode_json
from potluck._platform import (
    BINARY,
    FOLDERS_ONLY,
    HAS_FOLDER_HANDLES,
    NO_LINKS,
    is_private_group,
    user_id,
)
from potluck._version import CHECKPOINT_FORMAT, NewerFile, __version__
from potluck.arrays import trees
from potluck.arrays.base import Array, Dtype
from potluck.errors import DistributedError, IoError, MalformedFrame, describe
from potluck.identity.private_files import UnsafeFile
from potluck.logs import get_logger
from potluck.membership.messages import Ancestry, Count
from potluck.training.steps import Position, StepHistory, Trail, ranked

Bytes: TypeAlias = "bytes | bytearray | memoryview"

TEMPORARY = ".writing-"
"""How names begin of files that are not whole yet."""

_AS_FOLDER = os.O_RDONLY | FOLDERS_ONLY | NO_LINKS
_AS_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS | BINARY

_HINTS = {
    errno.ENOSPC: "The disk is full: free some space.",
    errno.EDQUOT: "The quota is used up: free some space.",
    errno.EROFS: "The disk is read-only: choose another folder.",
    errno.EACCES: "This user may not write there: choose another folder, or change its owner.",
    errno.EPERM: "This user may not write there: choose another folder, or change its owner.",
    errno.ENOENT: "A parent folder is missing, or a link is broken: choose another folder.",
    errno.ELOOP: "A symbolic link is in the way: remove it.",
    errno.ENAMETOOLONG: "The name of the folder is too long: choose another folder.",
    errno.EISDIR: "A folder is in the way of a file: remove it, or choose another folder.",
    errno.ENOTDIR: "Part of the path is a file, not a folder: remove it, or choose another folder.",
}


@contextlib.contextmanager
def _as_ours(path: Path) -> Iterator[None]:
    """Errors of the operating system become ours."""
    try:
        yield
    except DistributedError:
        raise
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "Choose another folder.")
        raise IoError(
            f"{path} could not be written",
            cause=describe(error),
            hint=f"{hint} Earlier checkpoints are untouched.",
        ) from error


class Folder:
    """An open folder; names are used within it, whatever becomes of the path that led to it.

    It belongs to this user, and no other user may change what is in it.
    """

    def __init__(self, path: Path, handle: int | None) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open a folder that a user has named, and make it (0700) if it is missing.

        Links on the way to it are the user's own business; a link of another user is refused.
        """
        path = path.absolute()
        with _as_ours(path):
            if not HAS_FOLDER_HANDLES:
                path.mkdir(parents=True, exist_ok=True)
                return cls(path, None)
            missing = []
            there = path
            while not os.path.lexists(there):
                missing.append(there.name)
                there = there.parent
            for each in (there, *there.parents):
                _check_link(each, is_last=each == path)
            folder = cls(there, os.open(there, _AS_FOLDER & ~NO_LINKS))
            for name in reversed(missing):
                with folder:
                    folder = folder.enter(name)
            return folder.checked()

    def checked(self) -> Folder:
        """Itself, unless it is not safe to write there; then it is closed."""
        try:
            self.check()
        except BaseException:
            self.close()
            raise
        return self

    def enter(self, name: str) -> Folder:
        """A folder within this one; made (0700) if it is missing, refused if it is a link."""
        path = self.path / name
        with _as_ours(path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(*self._at(name), mode=0o700, **self._beside())  # noqa: PTH102
                self.sync()
            folder = self.within(name)
            return folder.checked()

    def within(self, name: str) -> Folder:
        """A folder within this one that is there, also if others may change it; a link is refused.

        To remove what is in it.
        """
        path = self.path / name
        if not HAS_FOLDER_HANDLES:
            return Folder(path, None)
        try:
            return Folder(path, os.open(name, _AS_FOLDER, dir_fd=self._handle))
        except OSError as error:
            if path.is_symlink():
                raise _unsafe(path, "is a symbolic link", "Remove it.") from error
            raise

    def check(self) -> None:
        """Raise :class:`UnsafeFile` if another user could change what is in it."""
        if self._handle is not None:
            status = os.fstat(self._handle)
            why, fix = refusal(self.path, status)
            if why:
                raise _unsafe(self.path, why, fix)

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a file (0600): a crash at any instant leaves the old one, or none, or the new."""
        temporary = f"{TEMPORARY}{name}"
        with _as_ours(self.path / name):
            self.remove(temporary)  # of an earlier try
            handle = os.open(*self._at(temporary), _AS_NEW_FILE, 0o600, **self._beside())
            try:
                with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
                self._rename(temporary, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.remove(temporary)
                raise
            self.sync()

    def _rename(self, old: str, new: str) -> None:
        if HAS_FOLDER_HANDLES:
            os.replace(old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        else:
            (self.path / old).replace(self.path / new)

    def touch(self, name: str) -> None:
        """Make an empty file (0600), or make it new again."""
        with _as_ours(self.path / name):
            flags = _AS_NEW_FILE & ~os.O_EXCL
            handle = os.open(*self._at(name), flags, 0o600, **self._beside())
            try:
                os.utime(handle if os.utime in os.supports_fd else self.path / name)
            finally:
                os.close(handle)

    def remove(self, name: str) -> bool:
        """Delete a file, or a link itself; False if it was gone already."""
        with _as_ours(self.path / name):
            try:
                os.unlink(*self._at(name), **self._beside())
            except FileNotFoundError:
                return False
            return True

    def remove_folder(self, name: str) -> None:
        """Delete a folder within this one, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(*self._at(name), **self._beside())

    def sync(self) -> None:
        """Force names to disk; Windows does that by itself and has no call for it."""
        if self._handle is not None:
            with _as_ours(self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        """Let go of it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _at(self, name: str) -> tuple[Any]:
        return (name,) if HAS_FOLDER_HANDLES else (self.path / name,)

    def _beside(self) -> dict[str, Any]:
        return {"dir_fd": self._handle} if HAS_FOLDER_HANDLES else {}


def refusal(path: Path, status: os.stat_result) -> tuple[str, str]:
    """Why nothing is written into a folder, and what to do; two empty texts if something can be.

    It must belong to this user.  Others may look into it, but not change it; a group of which this
    user is the only member does not count as another one.
    """
    user, mode = user_id(), stat.S_IMODE(status.st_mode)
    quoted = shlex.quote(str(path))
    if status.st_uid != user:
        fix = f"Run as that user, choose a folder of your own, or run: sudo chown {user} {quoted}"
        return f"belongs to user {status.st_uid}, but this is user {user}", fix
    if mode & 0o002 and mode & stat.S_ISVTX:
        fix = f"Name a folder within it, such as {quoted}/checkpoints."
        return f"is shared by all users of this machine (mode {mode:04o})", fix
    if mode & 0o002:
        fix = f"Run: chmod go-w {quoted}"
        return f"can be changed by all users of this machine (mode {mode:04o})", fix
    if mode & 0o020 and not is_private_group(status.st_gid):
        fix = f"Run: chmod g-w {quoted}"
        return f"can be changed by group {status.st_gid} (mode {mode:04o})", fix
    return "", ""


def _check_link(path: Path, *, is_last: bool) -> None:
    """A link in a folder that all users share leads wherever the one who made it wants."""
    status = os.lstat(path)
    if not stat.S_ISLNK(status.st_mode) or status.st_uid in {user_id(), 0}:
        return
    folder = path.parent.stat()
    if is_last or (folder.st_mode & stat.S_IWOTH and folder.st_uid != status.st_uid):
        why = f"is a symbolic link that user {status.st_uid} has made"
        raise _unsafe(path, why, "Remove it, or choose another folder.")


def _unsafe(path: Path, why: str, fix: str) -> UnsafeFile:
    return UnsafeFile(f"No checkpoints are written into {path}: it {why}", hint=fix)


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a file that has at most this many bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise IoError(f"{path} is not a file")
        if status.st_size > limit:
            raise IoError(f"{path} has {status.st_size} bytes, more than the limit of {limit}")
        return path.read_bytes()
    except IoError:
        raise
    except OSError as error:
        raise IoError(f"{path} could not be read", cause=describe(error)) from error


# --------------------------------------------------------------------------------------------------
# The safetensors layout: a JSON header that says where each tensor lies, then their bytes.
#
# Anything that reads safetensors can read these files.  Nothing in them can run code.

MAX_HEADER = 100 << 20
"""Bytes of a header; the limit that other readers of the format have."""

_ALIGNMENT = 8
_LENGTH = 8

_NAMES: dict[Dtype, str] = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(np.complex64): "C64",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint64): "U64",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Bytes from the end of the header."""
    stop: int


def name_of(dtype: Dtype) -> str:
    """What the format calls a type.

    >>> name_of(np.dtype("float32"))
    'F32'
    """
    name = _NAMES.get(dtype.newbyteorder("="))
    if name is None:
        known = ", ".join(str(each) for each in _NAMES)
        msg = f"An array of {dtype} cannot be saved as safetensors; these can: {known}"
        raise TypeError(msg)
    return name


def dtype_of(name: str) -> Dtype:
    """The type that has this name in the format."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise IoError(f"The file has a tensor of the unknown type {name[:40]!r}")
    return dtype


def encode_header(entries: Mapping[str, TensorEntry], facts: Mapping[str, str]) -> bytes:
    """The beginning of a file: the header's length, and the header."""
    header: dict[str, object] = {"__metadata__": dict(facts)} if facts else {}
    for name, entry in entries.items():
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [entry.start, entry.stop],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH, "little") + text


# --------------------------------------------------------------------------------------------------
# The manifest of one rank's part of a checkpoint: what is in its file, with checksums.
#
# It is written last, so it is also the mark that this part is complete.  A checkpoint is complete
# when the parts of all ranks are; no message is needed.

BLOCK = 1 << 20
"""Bytes that have one checksum: a part of a file can be read and checked alone."""

MAX_MANIFEST = 256 << 20
_MAGIC = re.compile(rb"potluck-checkpoint ([1-9]\d{0,8}) ([0-9a-f]+)(?: (\S{1,40}))?")
_DIGEST = 16
_LONGEST_LINE = 200
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
    """The tree to which the arrays belong, as :func:`potluck.arrays.trees.written` gives it."""
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
        head = f"potluck-checkpoint {CHECKPOINT_FORMAT} {digest(text)}"
        if CHECKPOINT_FORMAT > 1:  # from then on it says who wrote it
            head += f" {__version__}"
        return head.encode() + b"\n" + text

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """From the content of a file; raises :class:`IoError` if anything is wrong with it."""
        line, _, text = data.partition(b"\n")
        head = _MAGIC.fullmatch(line[:_LONGEST_LINE])
        if head is None:
            raise IoError("This is not a checkpoint manifest")
        _check_line(head, "The manifest of a checkpoint")
        if head[2] != digest(text).encode():
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


def _entries(pieces: tuple[Piece, ...]) -> dict[str, TensorEntry]:
    entries = {}
    for piece, after in itertools.zip_longest(pieces, pieces[1:]):
        count = piece.stop - piece.start
        whole = count == math.prod(piece.shape)
        size = count * dtype_of(piece.dtype).itemsize
        assert after is None or after.offset == piece.offset + size
        shape = piece.shape if whole else (count,)
        entries[piece.name] = TensorEntry(piece.dtype, shape, piece.offset, piece.offset + size)
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


# --------------------------------------------------------------------------------------------------
# Checkpoint: a complete one on disk, from which any number of ranks read what they need.

logger = get_logger(__name__)


class Shard(NamedTuple):
    """One rank's elements of an array."""

    array: Array
    """Flat, unless it is the whole array."""
    start: int
    stop: int
    shape: tuple[int, ...]
    """Of the whole array."""


_EARLIER = "Use an earlier checkpoint: latest(folder, verify=True) finds it."

_LONGEST = 32  # characters of a lineage's id that members accept

SMALLEST_PART = 256
"""Elements for each rank below which an array is not divided: one rank has all of it."""


def part_of(size: int, place: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which elements of an array a rank keeps; ``place`` is the array's among all.

    >>> part_of(1000, 0, 1, 2), part_of(10, 0, 1, 2), part_of(10, 1, 1, 2)
    ((500, 1000), (0, 0), (0, 10))
    """
    if size < SMALLEST_PART * world_size:
        return (0, size) if place % world_size == rank else (0, 0)
    return size * rank // world_size, size * (rank + 1) // world_size


class Checkpoint:
    """A complete checkpoint.  Nothing is read before it is asked for; what is read is checked.

    Raises :class:`~potluck.IoError` if a part is missing or damaged.

    >>> import tempfile, numpy
    >>> from potluck import Checkpointer
    >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
    ...     work = checkpointer.save({"weights": numpy.arange(4)}, step=7, wait=True)
    ...     Checkpoint(work.wait()).tree()["weights"].tolist()
    [0, 1, 2, 3]
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifests = _manifests(folder)
        first = self._manifests[0]
        self.lineage, self.epoch, self.step = first.lineage, first.epoch, first.step
        self.history = _history(first)
        """Which steps and samples the state consists of, and where its lineage comes from."""
        self.world_size = first.world_size
        """How many ranks have written it."""
        self._last: tuple[tuple[int, int], bytes] = (-1, -1), b""
        self._pieces: dict[str, list[tuple[Manifest, Piece]]] = {}
        for manifest in self._manifests:
            for piece in manifest.pieces:
                self._pieces.setdefault(piece.name, []).append((manifest, piece))
        for name in self._pieces:
            self._check_whole(name)

    def __repr__(self) -> str:
        """What it is, for people."""
        return f"<Checkpoint of step {self.step}, written by {self.world_size} ranks>"

    @property
    def written_at(self) -> float:
        """When it was complete, in seconds since 1970."""
        return self.folder.stat().st_mtime

    @property
    def names(self) -> list[str]:
        """The arrays in it that belong to all ranks."""
        return sorted(name for name in self._pieces if not is_own(name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an array."""
        return self._piece(name).shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Elements of an array, flat; only the blocks of the files that hold them are read."""
        piece = self._piece(name)
        end = math.prod(piece.shape) if stop is None else stop
        made = np.empty(max(0, end - start), dtype_of(piece.dtype))
        raw = made.view(np.uint8)
        for manifest, each in self._pieces[name]:
            low, high = max(start, each.start), min(end, each.stop)
            if low >= high:
                continue
            width = made.itemsize
            begin = each.offset + (low - each.start) * width
            place = (low - start) * width
            for data in self._blocks(manifest, begin, begin + (high - low) * width):
                raw[place : place + len(data)] = np.frombuffer(data, np.uint8)
                place += len(data)
        return made

    def arrays(self) -> dict[str, Array]:
        """All arrays, whole."""
        return {name: self.read(name).reshape(self.shape_of(name)) for name in self.names}

    def tree(self) -> Any:
        """What was saved, whole."""
        return self._tree(self._manifests[0].shape, self.arrays())

    def _tree(self, shape: bytes, arrays: dict[str, Array]) -> Any:
        try:
            return trees.read(shape, arrays)
        except MalformedFrame as error:
            raise IoError(f"{self.folder} is damaged", cause=str(error), hint=_EARLIER) from error

    def own(self, rank: int) -> Any:
        """What one of the ranks that wrote this saved as its own, or None."""
        manifest = self._manifests[rank]
        prefix = own_name(rank, "")
        arrays = {
            name.removeprefix(prefix): self.read(name).reshape(self.shape_of(name))
            for name in self._pieces
            if name.startswith(prefix)
        }
        return self._tree(manifest.own, arrays) if manifest.own else None

    def shard(self, rank: int, world_size: int) -> dict[str, Shard]:
        """What a rank of another number of ranks keeps; nothing else is read."""
        shards = {}
        for place, name in enumerate(self.names):
            shape = self.shape_of(name)
            start, stop = part_of(math.prod(shape), place, rank, world_size)
            if stop > start or (place % world_size == rank and not math.prod(shape)):
                array = self.read(name, start, stop)
                whole = stop - start == math.prod(shape)
                shards[name] = Shard(array.reshape(shape) if whole else array, start, stop, shape)
        return shards

    def verify(self) -> None:
        """Read every file once; raises if a byte differs from what was written, or the length.

        That includes the manifests, and the header of each part.
        """
        if _manifests(self.folder) != self._manifests:
            raise IoError(f"{self.folder} has changed since it was opened")
        self._last = (-1, -1), b""
        for manifest in self._manifests:
            self._check_header(manifest)
            for _ in self._blocks(manifest, 0, manifest.size):
                pass

    def _check_header(self, manifest: Manifest) -> None:
        path = self._part(manifest)
        try:
            with path.open("rb") as file:
                header = file.read(manifest.begins)
        except OSError as error:
            raise _unreadable(path, error) from error
        # Earlier versions kept no checksum of it; they made it from what the manifest says.
        expected = manifest.header or digest(header_of(manifest))
        if digest(header) != expected:
            raise IoError(
                f"{path} is damaged",
                cause="the checksum of its header is wrong",
                hint=_EARLIER,
            )

    # -- files ---------------------------------------------------------------------------------

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces:
            raise KeyError(
                f"There is no array {name!r} in this checkpoint; {', '.join(self.names)} are"
            )
        return self._pieces[name][0][1]

    def _blocks(self, manifest: Manifest, start: int, stop: int) -> Iterator[bytes]:
        """Checked bytes of a part's data, block by block."""
        path = self._part(manifest)
        try:
            with path.open("rb") as file:
                for number in range(start // BLOCK, -(-stop // BLOCK)):
                    data = self._block(file, path, manifest, number)
                    low, high = max(start - number * BLOCK, 0), min(stop - number * BLOCK, BLOCK)
                    yield data[low:high]
        except IoError:
            raise
        except OSError as error:
            raise _unreadable(path, error) from error

    def _part(self, manifest: Manifest) -> Path:
        return self.folder / f"{part_name(manifest.rank, manifest.world_size)}.safetensors"

    def _block(self, file: BinaryIO, path: Path, manifest: Manifest, number: int) -> bytes:
        if self._last[0] == (manifest.rank, number):
            return self._last[1]  # many small arrays lie in one block
        file.seek(manifest.begins + number * BLOCK)
        data = file.read(min(BLOCK, manifest.size - number * BLOCK))
        if digest(data) != manifest.checksums[number]:
            raise IoError(
                f"{path} is damaged",
                cause=f"the checksum of block {number} is wrong",
                hint=_EARLIER,
            )
        self._last = (manifest.rank, number), data
        return data

    def _check_whole(self, name: str) -> None:
        covered = 0
        kinds = {(piece.dtype, piece.shape) for _, piece in self._pieces[name]}
        for _, piece in sorted(self._pieces[name], key=lambda pair: pair[1].start):
            covered = piece.stop if piece.start == covered else -1
        if len(kinds) > 1 or covered != math.prod(self._piece(name).shape):
            raise IoError(f"The parts of {name[:100]!r} in {self.folder} do not fit together")


def _history(manifest: Manifest) -> StepHistory:
    lineage = manifest.lineage
    if len(lineage) > _LONGEST:  # other members would refuse it
        lineage = digest(lineage.encode())
    position = Position(lineage, manifest.epoch, manifest.step)
    # Earlier versions wrote no samples; a step has at least one.
    return StepHistory(
        position, manifest.ancestry, manifest.samples or manifest.step, manifest.trail
    )


class Incomplete(IoError):
    """Not all ranks have written their part."""


def _unreadable(path: Path, error: OSError) -> IoError:
    return IoError(f"{path} could not be read", cause=describe(error))


def _manifests(folder: Path) -> list[Manifest]:
    found = [folder / name for name in _names(folder) if fnmatch(name, "part-*-of-*.json")]
    if not found:
        raise Incomplete(f"There is no complete checkpoint in {folder}")
    first = _manifest(found[0])
    manifests = []
    for rank in range(first.world_size):
        name = part_name(rank, first.world_size)
        manifest = _manifest(folder / f"{name}.json")
        if manifest.checkpoint != first.checkpoint or manifest.rank != rank:
            raise IoError(f"The parts in {folder} belong to different checkpoints")
        path = folder / f"{name}.safetensors"
        expected = manifest.begins + manifest.size
        if (size := _size(path)) != expected:
            what = "is missing" if size < 0 else f"has {size} bytes"
            if not (folder / f"{name}.json").exists():  # it is being removed, or written anew
                raise Incomplete(f"{path} {what}")
            raise IoError(f"{path} {what}, and not the {expected} bytes that were written")
        manifests.append(manifest)
    return manifests


def check_format(manifest: Path) -> None:
    """Raise :class:`NewerFile` if a manifest is there that a later version of Potluck has written.

    Nothing is written in its place.
    """
    try:
        with manifest.open("rb") as file:
            line = file.readline(_LONGEST_LINE).rstrip(b"\n")
    except OSError:
        return
    _check_line(_MAGIC.fullmatch(line), manifest)


def _check_line(head: re.Match[bytes] | None, path: object) -> None:
    if head is not None and int(head[1]) > CHECKPOINT_FORMAT:
        by = (head[3] or b"").decode(errors="replace")
        raise NewerFile(path, int(head[1]), CHECKPOINT_FORMAT, by)


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest.decode(read_limited(path, MAX_MANIFEST))
    except NewerFile as error:
        raise NewerFile(path, error.got, error.expected, error.potluck) from None
    except IoError as error:
        if not path.exists():
            raise Incomplete(f"{path} is missing: its rank has not saved its part") from None
        error.message = f"{path.name}: {error.message}"
        raise


def _names(folder: Path) -> list[str]:
    """What is in a folder, which may be missing; one that cannot be read is not an empty one."""
    try:
        return sorted(each.name for each in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # who saves there is told why it cannot be
        return []
    except OSError as error:
        raise IoError(
            f"{folder} could not be read",
            cause=describe(error),
            hint="Run as the user who owns it, or choose another folder.",
        ) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:  # another process removes it right now
        return -1


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that cannot be used.

    >>> str(Damaged(Path("saved/step-7"), "part-0.json has no manifest", resumed=6))
    'The checkpoint saved/step-7 is damaged: part-0.json has no manifest. Step 6 is used instead.'
    """

    folder: Path
    why: str
    resumed: int | None = None
    """The step of the checkpoint that is used instead, if there is one."""

    def __str__(self) -> str:
        """One sentence for people, and what follows from it."""
        then = "There is no other one."
        if self.resumed is not None:
            then = f"Step {self.resumed} is used instead."
        return f"The checkpoint {self.folder} is damaged: {self.why.rstrip('.')}. {then}"


class Search:
    """The complete checkpoints in a folder, the one to continue from first, and damaged ones.

    Lineages come in the order of :func:`potluck.training.steps.best`, and of each the latest step
    first: the work of a side that lost a merge comes after that of the side that won.
    """

    def __init__(self, folder: Path) -> None:
        self._found: list[Checkpoint] = []
        self.damaged: list[Damaged] = []
        """What was passed over so far; not what another rank still writes."""
        self.newer: dict[Path, NewerFile] = {}
        """What a later version of Potluck has written."""
        for path in reversed([folder / name for name in _names(folder) if name[:5] == "step-"]):
            try:
                self._found.append(Checkpoint(path))
            except Incomplete as error:
                logger.info("Not complete: %s", error)
            except NewerFile as error:
                self.newer[path] = error
            except (DistributedError, OSError, ValueError, KeyError) as error:
                self.damaged.append(Damaged(path, str(error)))
        order = ranked(each.history for each in self._found)
        self._found.sort(key=lambda each: _place(each, order))

    def first(self, *, verify: bool) -> Checkpoint | None:
        """The one to continue from, if there is one; ``damaged`` then has those before it."""
        if self.newer:  # what is there may be further than what can be read
            raise next(iter(self.newer.values()))
        unreadable = list(self.damaged)
        found = next(self.all(verify=verify), None)
        if found is not None:
            # Where an unreadable one belongs is not known but by its name, which begins with steps.
            older = [each for each in unreadable if each.folder.name < found.folder.name]
            self.damaged = [each for each in self.damaged if each not in older]
        return found

    def all(self, *, verify: bool) -> Iterator[Checkpoint]:
        """All of them."""
        for checkpoint in self._found:
            try:
                if verify:
                    checkpoint.verify()
            except (DistributedError, OSError) as error:
                self.damaged.append(Damaged(checkpoint.folder, str(error)))
            else:
                yield checkpoint


def checkpoints(folder: Path, *, verify: bool = False) -> Iterator[Checkpoint]:
    """Complete checkpoints in a folder, the one to continue from first; others are passed over."""
    return Search(folder).all(verify=verify)


def _place(checkpoint: Checkpoint, order: list[str]) -> tuple[int, int, int]:
    lineage, epoch, step = checkpoint.history.position
    return order.index(lineage), -epoch, -step
