"""The dashboard in a real browser, with real processes behind it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator

import numpy as np
import pytest
from typer.testing import CliRunner

from potluck import Cluster, ElasticSampler, ElasticTrainer, TrainingState
from potluck.apps.cli.main import app
from potluck.apps.dashboard.server import Dashboard
from support.browser import Browser, Page, browser
from support.cluster_programs import Crowd
from support.clusters import clusters, new_job
from support.ranks import Ranks
from support.threads import eventually, together
from support.web import dashboard

SHOWN_WITHIN = 2.0  # seconds from a node's end to its being shown as gone

HEALTHY = "document.querySelectorAll('#graph .node[data-status=healthy]').length"
STORY = """[document.getElementById("headline"), ...document.querySelectorAll("#remarks li")]
    .map((each) => each.textContent)"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests here."""
    if shutil.which("chromium") is None:
        pytest.skip("the browser is Debian's package chromium")
    with browser() as started:
        yield started


def opened(chromium: Browser, served: Dashboard, count: int) -> Page:
    """A page that shows so many healthy nodes."""
    page = chromium.page()
    page.look(1280, 900)
    page.open(served.url)
    page.wait_for(f"{HEALTHY} === {count}")
    return page


def told_by_status(job: str) -> list[str]:
    """The sentences of ``potluck status``."""
    result = CliRunner().invoke(app, ["status", "--json", "--job", job])
    assert result.exit_code == 0, result.output
    return [sentence for paragraph in json.loads(result.stdout)["story"] for sentence in paragraph]


def test_a_killed_node_is_seen_at_once_and_the_story_is_that_of_status(
    chromium: Browser, ranks: Ranks
) -> None:
    """Within two seconds; afterwards page and command tell the same, word for word."""
    job = new_job()
    crowd = Crowd(ranks, job)
    found = crowd.views(crowd.start(3, 3), 3)
    with dashboard(job) as served:
        page = opened(chromium, served, 3)
        for chart in ("throughput", "waiting"):
            page.wait_for(f"document.querySelectorAll('#{chart} .curve').length === 3")
        killed = found[1].kill()
        seen = page.wait_for(f"{HEALTHY} < 3")
        gone = page.wait_for("document.querySelector('#graph .node[data-status=gone]')")
        assert seen - killed <= SHOWN_WITHIN
        assert gone - killed <= SHOWN_WITHIN * 5  # the others have agreed to go on without it
        page.wait_for("document.querySelectorAll('#epochs li').length === 2")
        eventually(lambda: page.value(STORY) == told_by_status(job))
        story = page.value(STORY)
        assert re.search(r'": view 2 of 2 nodes, led by .*, active$', story[0])
        assert re.match(r"View 2: without .* dead", story[1])
        reason = page.value("document.querySelector('#epochs li p:last-child').textContent")
        assert story[1] == f"View 2: {reason}"
        events = page.value("document.getElementById('events').innerText")
        assert "its process ended (it crashed or was killed)" in events
        assert page.complaints == []
        crowd.stop([found[0], found[2]])


def test_the_page_serves_phones_keyboards_and_screen_readers(chromium: Browser) -> None:
    """Nothing is wider than a phone; Tab walks through the nodes; everything has a name."""
    with clusters(3, name="<img src=x onerror=alert(1)>") as nodes:
        nodes[0].wait_until_active(10)
        with dashboard(nodes[0]._backend.job) as served:
            page = opened(chromium, served, 3)
            assert page.value("document.querySelectorAll('#graph img, #nodes img').length") == 0
            assert "<img src=x onerror=alert(1)>" in page.text()
            for width in (360, 768, 1280):
                page.look(width, 800, dark=width == 360, phone=width == 360)
                page.wait_for("document.querySelector('#graph svg').clientWidth <= innerWidth")
                page.wait_for("document.scrollingElement.scrollWidth <= innerWidth")
            assert page.value("getComputedStyle(document.body).colorScheme") == "light dark"
            walked = _walk(page, 16)
            assert walked[0] == "Skip to the cluster"
            assert len({each for each in walked if each.startswith("rank ")}) == 3
            assert any("links as a table" in each for each in walked)
            _check_names(page)
            assert page.complaints == []


def _walk(page: Page, steps: int) -> list[str]:
    """What is reached with the Tab key, one after the other; from the top."""
    name = """(({ labels, innerText, ariaLabel }) => ariaLabel ?? labels?.[0]?.innerText ??
        innerText)(document.activeElement)"""
    page.value("document.activeElement.blur(), scrollTo(0, 0)")
    found = []
    for _ in range(steps):
        page.press("Tab")
        found.append(str(page.value(name)))
    return found


def _check_names(page: Page) -> None:
    """As a screen reader finds them: no control, picture or group without a name."""
    page.send("Accessibility.enable")
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "checkbox", "link", "group", "image", "table", "region", "log"}
    roles = {each["role"]["value"] for each in tree if not each["ignored"]}
    assert {"banner", "main", "contentinfo", "log", "heading", "table"} <= roles
    nameless = [
        (each["role"]["value"], each.get("name"))
        for each in tree
        if not each["ignored"]
        and each["role"]["value"] in wanted - {"table", "group"}
        and not each.get("name", {}).get("value")
    ]
    assert nameless == []


def test_a_page_finds_its_dashboard_again(chromium: Browser) -> None:
    """It says that it is cut off; when the dashboard is back it goes on by itself, with a token."""
    token = "a-token-of-more-than-sixteen"  # noqa: S105
    first = dashboard(token=token)
    try:
        page = chromium.page()
        page.open(first.url)
        state = "document.getElementById('live')?.dataset.state"
        page.wait_for(f"{state} === 'live'")
        assert page.value("location.href") == f"http://127.0.0.1:{first.port}/"
        assert page.value("document.cookie") == ""  # no script can read it
        page.wait_for(
            "document.getElementById('headline').textContent.startsWith('No job is running')"
        )
    finally:
        first.close()
    page.wait_for(f"{state} === 'lost'")
    with dashboard(token=token, port=first.port):
        page.wait_for(f"{state} === 'live'")


def test_failed_operations_lead_to_what_failed(chromium: Browser) -> None:
    """The figure says which operations they were, and leads to the event that says why."""
    with clusters(2) as nodes:
        nodes[0].wait_until_active(10)
        reasons = set()
        for _ in range(3):  # a program that tries it again and again
            with pytest.raises(TypeError) as failure:
                nodes[0].all_reduce("soup")
            reasons.add(str(failure.value))
        with dashboard(nodes[0]._backend.job) as served:
            page = opened(chromium, served, 2)
            link = "document.querySelector('#facts a')"
            page.wait_for(f"{link}?.textContent === '3 all_reduce: why?'")
            target = page.value(f"document.querySelector({link}.getAttribute('href')).textContent")
            assert target == "Events"
            (reason,) = reasons
            event = f"all_reduce failed: TypeError: {reason}"
            page.wait_for(f"document.getElementById('events').innerText.includes({event!r})")
            assert page.value("document.getElementById('events').innerText").count(event) == 1
            assert page.complaints == []


FACTS = """Object.fromEntries([...document.querySelectorAll("#facts > div")].map(({ children }) =>
    [children[0].textContent, [children[1].textContent, children[2].textContent]]))"""


def test_samples_and_steps_are_those_of_the_job(chromium: Browser) -> None:
    """Not summed over ranks that all tell the same, and with the time that a step really takes."""
    steps, batch, pause = 40, 30, 0.05

    def train(node: Cluster) -> tuple[float, float]:
        sampler = ElasticSampler(100_000, seed=1)
        weights = np.zeros(4)
        trainer = ElasticTrainer(
            node, TrainingState(model=weights), lambda _: None, sampler=sampler, batch=batch
        )
        times = []
        with trainer:
            for _ in range(steps):
                trainer.take()
                time.sleep(pause)
                trainer.step(np.ones(4))
                times.append(time.monotonic())
        pace = (times[-1] - times[0]) / (steps - 1)
        return pace, batch / pace

    with clusters(2) as nodes:
        nodes[0].wait_until_active(10)
        with dashboard(nodes[0]._backend.job) as served:
            page = opened(chromium, served, 2)
            paces = together(*(lambda node=node: train(node) for node in nodes))
            page.wait_for(f"{FACTS}.step?.[0] === '{steps}'")
            facts = page.value(FACTS)
    true_pace, true_rate = paces[0]
    assert facts["samples"][1] == "all ranks"
    assert float(facts["samples"][0].removesuffix("/s")) == pytest.approx(true_rate, rel=0.3)
    number, unit, *rest = facts["step"][1].split()
    assert rest == ["per", "step"]
    assert float(number) * {"ms": 1e-3, "s": 1.0}[unit] == pytest.approx(true_pace, rel=0.3)
