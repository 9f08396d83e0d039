"""Names of parameters that are the same in every process: workers must agree on what there is."""

import re

__all__ = ["shown"]


def shown(value: object) -> str:
    """How an object shows itself, without the address at which it happens to be."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
