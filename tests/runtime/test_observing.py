"""Observers and launchers: they find each other, and stay in contact with everybody they found."""

from __future__ import annotations

from collections import Counter

import pytest

from potluck.errors import Timeout
from potluck.net.addresses import Address
from potluck.runtime import io
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.control import Control
from potluck.runtime.control_contacts import Contact
from potluck.runtime.io_lane import Lane
from potluck.runtime.observing import Observer
from potluck.vocabulary import ProcessId
from support.clusters import OPTIONS, clusters, new_job
from support.threads import PATIENCE, eventually


def launcher(job: str) -> Observer:
    """Somebody who waits in ``potluck run``."""
    config = AutoDiscoveryConfig(job=job, multicast=OPTIONS["multicast"], known=OPTIONS["known"])
    return Observer(config, job=job, facts={"script": job})


def dial_again(caller: Observer, called: Observer) -> None:
    """One more lane, as when two dial each other at the same moment."""
    links = caller._links
    assert links.doors is not None
    lane = links.doors.dial([Address("127.0.0.1", called.port.port)], None, lambda: None)
    caller._inbox.put(lambda: links._on_opened(lane, Contact("a hint")))


def test_launchers_that_dial_each_other_stay_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several lanes both keep the same one, so nobody who is here seems to come and go."""
    heard: Counter[ProcessId] = Counter()
    lost: list[ProcessId] = []
    asked, missed = Observer.asked, Observer.lost

    def hear(observer: Observer, lane: Lane, payload: bytes) -> None:
        heard[observer.card.process] += 1
        asked(observer, lane, payload)

    def lose(observer: Observer, process: ProcessId, cause: str) -> None:
        lost.append(process)
        missed(observer, process, cause)

    monkeypatch.setattr(Observer, "asked", hear)
    monkeypatch.setattr(Observer, "lost", lose)
    monkeypatch.setattr(io, "RETIRED", 0.1)
    job = new_job()
    with launcher(job) as one, launcher(job) as other:
        for each in (one, other):
            each.wait_until(lambda reports: len(reports) == 1, PATIENCE)
        dial_again(one, other)
        dial_again(other, one)
        heard.clear()
        eventually(lambda: min(heard[each.card.process] for each in (one, other)) >= 12)
        assert lost == []
        assert len(one.reports) == len(other.reports) == 1


def test_a_last_word_outlives_its_launcher() -> None:
    """Who has said that it begins counts for those who have not yet begun."""
    job = new_job()
    with launcher(job) as here:
        with launcher(job) as other:
            here.wait_until(lambda reports: len(reports) == 1, PATIENCE)
            other.wait_until(lambda reports: len(reports) == 1, PATIENCE)
            other.tell("starting")
            here.wait_until(lambda reports: reports[0].state == "starting", PATIENCE)
        eventually(lambda: [each.state for each in here.parted] == ["starting"])
        assert here.reports == []


def test_a_report_wakes_whoever_waits_for_news() -> None:
    """Nobody has to look again and again; with nobody there, waiting ends all the same."""
    job = new_job()
    with launcher(job) as here:
        assert here.wait_for_news(here.news, 0.01) == here.news == 0
        with pytest.raises(Timeout):
            here.wait_until(bool, 0.01)
        with launcher(job):
            assert here.wait_for_news(0, PATIENCE) > 0
            assert here.wait_until(bool, PATIENCE)
        here.wait_until(lambda reports: not reports, PATIENCE)  # that it left is news, too


def test_a_member_that_does_not_answer_is_not_believed_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cable may be cut, which no connection tells; what it said last is old."""
    answer, mute = Control.asked, set[int]()

    def asked(control: Control, lane: Lane, payload: bytes) -> None:
        if control.core.me.process.incarnation not in mute:
            answer(control, lane, payload)

    monkeypatch.setattr(Control, "asked", asked)
    job = new_job()
    config = AutoDiscoveryConfig(job=job, multicast=OPTIONS["multicast"], known=OPTIONS["known"])
    with clusters(2, job) as nodes, Observer(config, job=job, journals=True) as observer:
        eventually(lambda: len(observer.reports) == 2)
        (silent, other) = (each.incarnation for each in observer.reports)
        mute.add(silent)
        eventually(lambda: [each.incarnation for each in observer.reports] == [other])
        eventually(lambda: len(observer.chronicle.gone) == 1)
        (gone,) = observer.chronicle.gone
        assert gone.report.incarnation == silent
        assert "has not answered" in gone.cause
        mute.clear()
        eventually(lambda: len(observer.reports) == 2)
        assert observer.chronicle.gone == []
        assert len(nodes) == 2
