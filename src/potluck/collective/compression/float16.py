"""float16: eleven significant bits, from 6e-8 to 65504."""

from __future__ import annotations

import numpy as np

from potluck.collective.compression.sixteen import Sixteen

__all__ = ["Float16"]


class Float16(Sixteen):
    """Two bytes for each value; exact to 1 part in 2048 within its small range."""

    name = "float16"
    number = 2
    dtype = np.dtype(np.float16)
    largest = 65504.0
