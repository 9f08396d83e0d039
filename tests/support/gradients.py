"""Gradients for tests: every kind of float32, and bytes that no encoder wrote."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck.compression.base import Floats


def vectors(most: int = 700, *, finite: bool = True) -> st.SearchStrategy[Floats]:
    """Vectors of any float32, denormals and the largest included."""
    return hnp.arrays(
        np.float32,
        st.integers(0, most),
        elements=st.floats(width=32, allow_nan=not finite, allow_infinity=not finite),
    )


def normal(count: int, seed: int = 0) -> Floats:
    """Normal data, as gradients roughly are."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def relative_error(found: Floats, wanted: Floats) -> float:
    """The length of the difference, as a part of what was wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
