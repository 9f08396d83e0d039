"""Writes what the documentation takes from the code, so that the two cannot drift apart.

``python docs/build.py`` (``make docs``) rewrites the page ``reference.md`` and every part of a page
between ``<!-- generated: name -->`` and ``<!-- end -->``; with ``--check`` it only tells what is
out of date.  A test does the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT / "tests")]

import build_parts  # noqa: E402 - found by the path above
import build_reference  # noqa: E402

PARTS: dict[str, Callable[[], str]] = {
    "layers": build_parts.layers,
    "may import": build_parts.may_import,
    "frame layout": build_parts.frame_layout,
    "frame kinds": build_parts.frame_kinds,
    "messages": build_parts.messages,
    "limits": build_parts.limits,
    "comparison": build_parts.comparison,
    "checks of the doctor": build_parts.doctor_checks,
    "names of the origin": build_parts.origin_names,
    "metrics": build_parts.metrics,
}

_PART = re.compile(
    r"(?P<begin><!-- generated: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


def renewed(text: str) -> str:
    """A page with its generated parts as they should be."""

    def renew(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{PARTS[found['name']]()}\n{found['end']}"

    return _PART.sub(renew, text)


def pages() -> dict[Path, str]:
    """Every page that has something generated, as it should be."""
    found = {DOCS / "reference.md": build_reference.page()}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if _PART.search(text) and path.name != "reference.md":
            found[path] = renewed(text)
    return found


def stale() -> list[str]:
    """The names of pages that are out of date."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the pages, or tell which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    if parser.parse_args().check:
        names = stale()
        print("\n".join(f"{name} is out of date: make docs" for name in names))
        return int(bool(names))
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
