"""What is carried over changes with a commit and not before."""

import numpy as np

from potluck.collective.compression.feedback import Ledger


def test_memory_that_is_read_is_never_written() -> None:
    """Room for the new is not that of the old."""
    ledger = Ledger()
    ledger.room("w", 3)[:] = 1
    ledger.commit()
    ledger.room("w", 3)[:] = 2
    assert ledger["w"].tolist() == [1, 1, 1]
    ledger.commit()
    assert ledger["w"].tolist() == [2, 2, 2]


def test_a_repeated_step_starts_from_the_same() -> None:
    """After a discard nothing of it is left."""
    ledger = Ledger()
    ledger["w"] = np.ones(2, np.float32)
    ledger.discard()
    ledger.commit()
    assert len(ledger) == 0


def test_it_is_a_mapping() -> None:
    """Of what is committed."""
    ledger = Ledger()
    ledger.load({"a": [1.0], "b": [2.0]})
    del ledger["a"]
    assert list(ledger) == ["b"]
    ledger.clear()
    assert list(ledger) == []


def test_one_name_can_be_taken_back() -> None:
    """What failed, while others go on."""
    ledger = Ledger()
    for name in "ab":
        ledger.room(name, 2)[:] = 1
    ledger.discard("a")
    ledger.discard("c")
    ledger.commit()
    assert list(ledger) == ["b"]


def test_a_try_that_is_repeated_writes_over_the_first() -> None:
    """It needs no further memory."""
    ledger = Ledger()
    first = ledger.room("w", 3)
    assert ledger.room("w", 3) is first
    assert ledger.room("w", 4) is not first
