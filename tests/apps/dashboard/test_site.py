"""The site: a page that needs nothing from outside, and can be read by everybody."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from importlib.resources import files

import pytest

from potluck.apps.dashboard.server import Dashboard
from support.web import ask, dashboard

STATIC = {
    each.name: each.read_text(encoding="utf-8")
    for each in files("potluck.apps.dashboard").joinpath("static").iterdir()
}
SCRIPTS = {name: text for name, text in STATIC.items() if name.endswith(".js")}


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    """A dashboard of this machine."""
    with dashboard() as found:
        yield found


def test_every_file_the_page_needs_is_served(served: Dashboard) -> None:
    """With its type; what a browser has already is not sent again."""
    named = set(re.findall(r'(?:href|src)="(/static/[^"]+)"', STATIC["index.html"]))
    named |= {
        f"/static/{name}"
        for text in SCRIPTS.values()
        for name in re.findall(r'from "\./([^"]+)"', text)
    }
    assert named == {f"/static/{name}" for name in STATIC if name != "index.html"}
    for path in named:
        answer = ask(served.port, path)
        assert answer.status == 200
        assert answer.text == STATIC[path.removeprefix("/static/")]
        again = ask(served.port, path, {"If-None-Match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    assert ask(served.port, "/static/app.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/%2e%2e/server.py", "/static/", "/static/x.js", "/etc/passwd"],
)
def test_nothing_else_is_served(served: Dashboard, path: str) -> None:
    """Requests never reach the file system."""
    assert ask(served.port, path).status == 404


def test_nothing_comes_from_outside() -> None:
    """No address in any file but the name of SVG's vocabulary, which nobody asks for."""
    for name, text in STATIC.items():
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


def test_no_text_becomes_markup() -> None:
    """Neither by a property that parses nor by code from text; no styles or scripts in the page."""
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), name
        assert not re.search(r"\beval\(|new Function|setTimeout\(\s*[\"'`]", text), name
    page = STATIC["index.html"]
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]*src=)", page)


def test_the_page_has_landmarks_and_names() -> None:
    """Every section is named by its heading, and the graph has a table beside it."""
    page = STATIC["index.html"]
    for tag in ("<header", "<main", "<nav", "<footer", 'lang="en"', 'class="skip"'):
        assert tag in page
    named = re.findall(r'<section[^>]*aria-labelledby="([^"]+)"', page)
    assert len(named) == page.count("<section")
    assert all(f'id="{each}"' in page for each in named)
    assert 'role="log" aria-live="polite"' in page
    assert '<table id="links">' in page


# --- contrast, by the rule of WCAG 2 ---


def luminance(colour: str) -> float:
    """Of ``#rrggbb``, from 0 to 1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_texts_can_be_read_on_every_surface(is_dark: bool) -> None:
    """A contrast of at least 4.5 for words, and of 3 for lines that carry a meaning."""
    blocks = re.findall(r":root \{(.*?)\}", STATIC["style.css"], flags=re.DOTALL)
    assert len(blocks) == 2
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", blocks[is_dark]))
    words = ["ink", "quiet", "accent", "ok", "warn", "bad"]
    for word, surface in itertools.product(words, ["page", "surface"]):
        assert contrast(colours[word], colours[surface]) >= 4.5, (word, surface)
    for word in ("ok", "warn", "bad"):
        assert contrast(colours[word], colours[f"{word}-soft"]) >= 4.5, word
        assert contrast(colours["ink"], colours[f"{word}-soft"]) >= 4.5, word
    assert contrast(colours["quiet"], colours["sunken"]) >= 4.5
    for number in range(8):
        assert contrast(colours[f"tone-{number}"], colours["surface"]) >= 3
