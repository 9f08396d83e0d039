"""What is carried from one step to the next, and changes only when a step is committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import numpy as np
import numpy.typing as npt

from potluck.collective.compression.base import Floats

__all__ = ["Ledger", "forget_the_unreal"]


class Ledger(MutableMapping[str, Floats]):
    """Arrays by name.  What is written counts after :meth:`commit`; until then the old is read.

    >>> ledger = Ledger()
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
        msg = f"What was saved for the tensor {name!r} is no array of numbers: {error}"
        raise ValueError(msg) from None
    if array.ndim != dimensions:
        msg = (
            f"What was saved for the tensor {name!r} has {array.ndim} dimensions: {dimensions} due"
        )
        raise ValueError(msg)
    if not np.isfinite(array).all():
        msg = f"What was saved for the tensor {name!r} holds NaN or infinity, which nobody saves"
        raise ValueError(msg)
    return array


def forget_the_unreal(residual: Floats) -> None:
    """Infinite or NaN, it would stay so for ever; call it within ``quiet()``."""
    if not np.isfinite(residual.sum()):  # the quickest way to see that all are finite
        np.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
