"""Numbers for people."""

from potluck.collective import wording


def test_numbers_are_scaled() -> None:
    """To the unit in which they are short."""
    assert [wording.time(ns) for ns in (5, 1500, 2_000_000, 3_210_000_000)] == [
        "5 ns",
        "1.5 µs",
        "2 ms",
        "3.21 s",
    ]
    assert [wording.size(count) for count in (0, 999, 1000, 5_000_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "5 GB",
    ]
    assert wording.speed(25_000_000) == "25 MB/s"


def test_long_proportions_are_cut() -> None:
    """A thousand shares do not belong into a sentence."""
    assert wording.ratio((2, 1)) == "2:1"
    assert wording.ratio((1,) * 1000) == "1:1:1:1:1:1:1:1:…"
