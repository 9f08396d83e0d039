"""What ``elastic.py`` found, as a table shows it."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]
Row = tuple[str, str, str]  # what, how much, and what it should be


def rows_of(name: str, found: Figures) -> list[Row]:
    """A part's figures as a table shows them."""
    if name == "recovery":
        text = f"{found['median']:.2f} s (90 %: {found['p90']:.2f} s, most: {found['most']:.2f} s)"
        return [(f"from a death to the next step, {found['deaths']} deaths", text, "≤ 2 s")]
    if name == "speeds":
        return [
            ("speeds 1, 1, 1, ¼: of the summed throughput", f"{found['elastic']:.0%}", "≥ 90 %"),
            (found["how"], f"{found['plain']:.0%}", ""),
        ]
    if name == "overlap":
        text = f"{found['overlapped']:.3f} s beside {found['plain']:.3f} s"
        return [("a step with overlap, and without", f"{text}, ratio {found['ratio']:.2f}", "< 1")]
    if name == "diloco":
        rare, late = found["rare"], found["overlapped"]
        losses = f"{rare['loss']:.4f} beside {found['plain']:.4f}"
        return [
            ("DiLoCo, H = 50, int8: fewer bytes", f"{rare['fewer']:.0f} ×", "≥ 150 ×"),
            ("its loss", f"{losses}, {rare['gap']:+.1%}", "≤ +2 %"),
            ("overlapped with 25 steps", f"{late['loss']:.4f}, {late['gap']:+.1%}", "≤ +2 %"),
        ]
    ways = {"plain": "every step", "rare": "DiLoCo", "overlapped": "DiLoCo, overlapped"}
    rows = [
        (
            f"20 Mbit/s, {label}: time spent computing",
            f"{found[key]['utilisation']:.0%}, {found[key]['seconds'] * 1000:.1f} ms a step",
            "",
        )
        for key, label in ways.items()
    ]
    return [*rows, ("20 Mbit/s: fewer bytes on the wire", f"{found['fewer']:.0f} ×", "≥ 150 ×")]
