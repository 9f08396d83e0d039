"""bfloat16: eight significant bits, in the range of float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from potluck.collective.compression.sixteen import Sixteen

__all__ = ["BFloat16"]


class BFloat16(Sixteen):
    """Two bytes for each value; exact to 1 part in 256, however large or small."""

    name = "bfloat16"
    number = 3
    dtype = np.dtype(ml_dtypes.bfloat16)
    largest = 255 * 2.0**120
