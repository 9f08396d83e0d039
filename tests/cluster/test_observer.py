"""Observers and launchers: they find each other, and stay in contact with everybody they found."""

from __future__ import annotations

import importlib.util
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

import potluck
from potluck._types import NodeId, ProcessId
from potluck.cluster import io, observer
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.connections import DialCandidate
from potluck.cluster.control import ControlThread
from potluck.cluster.io import ControlConnection
from potluck.cluster.observer import (
    KEPT_EPOCHS,
    KEPT_GONE,
    KEPT_NEWS,
    SILENT_AFTER,
    DashboardProcess,
    ObservedHistory,
    Observer,
    UnansweredQueries,
    find_web_server,
    place_of,
    request_for,
)
from potluck.cluster.reports import EpochLine, EventLine, Journal, StatusReport
from potluck.errors import BackendUnavailable, Timeout
from potluck.net.addresses import Address
from support.clusters import OPTIONS, clusters, join, new_job
from support.threads import PATIENCE, eventually
from support.web import Stream, ask, connect


def launcher(job: str) -> Observer:
    """Somebody who waits in ``potluck run``."""
    config = AutoDiscoveryConfig(job=job, multicast=OPTIONS["multicast"], known=OPTIONS["known"])
    return Observer(config, job=job, facts={"script": job})


def dial_again(caller: Observer, called: Observer) -> None:
    """One more connection, as when two dial each other at the same moment."""
    links = caller._links
    assert links.handshake is not None
    connection = links.handshake.dial([Address("127.0.0.1", called.port.port)], None, lambda: None)
    caller._inbox.put(lambda: links._on_opened(connection, DialCandidate("a hint")))


def test_launchers_that_dial_each_other_stay_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several connections both keep the same one, so nobody who is here seems to come and go."""
    heard: Counter[ProcessId] = Counter()
    lost: list[ProcessId] = []
    asked, missed = Observer.asked, Observer.lost

    def hear(observer: Observer, connection: ControlConnection, payload: bytes) -> None:
        heard[observer.card.process] += 1
        asked(observer, connection, payload)

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
    answer, mute = ControlThread.asked, set[int]()

    def asked(control: ControlThread, connection: ControlConnection, payload: bytes) -> None:
        if control.core.me.process.incarnation not in mute:
            answer(control, connection, payload)

    monkeypatch.setattr(ControlThread, "asked", asked)
    job = new_job()
    config = AutoDiscoveryConfig(job=job, multicast=OPTIONS["multicast"], known=OPTIONS["known"])
    with clusters(2, job) as nodes, Observer(config, job=job, journals=True) as observer:
        eventually(lambda: len(observer.reports) == 2)
        (silent, other) = (each.incarnation for each in observer.reports)
        mute.add(silent)
        eventually(lambda: [each.incarnation for each in observer.reports] == [other])
        eventually(lambda: len(observer.history.gone) == 1)
        (gone,) = observer.history.gone
        assert gone.report.incarnation == silent
        assert "has not answered" in gone.cause
        mute.clear()
        eventually(lambda: len(observer.reports) == 2)
        assert observer.history.gone == []
        assert len(nodes) == 2


# --------------------------------------------------------------------------------------------------
# A history: what an observer learned, once each, and never more than there is room for.


def report(letter: str = "a", job: str = "train.py", incarnation: int = 1) -> StatusReport:
    """Of a process."""
    return StatusReport(node=letter * 32, incarnation=incarnation, name=letter, job=job)


def told(letter: str, *events: EventLine, epochs: list[EpochLine] | None = None) -> Journal:
    """What it tells."""
    return Journal(node=letter * 32, incarnation=1, events=list(events), epochs=epochs or [])


def test_the_same_news_of_several_is_news_once() -> None:
    """Unless it happens again; and nothing is taken twice from one process."""
    history = ObservedHistory()
    line = EventLine(1, 100.0, "view 2 with 2 members")
    history.heard(report("a"), told("a", line))
    history.heard(report("a"), told("a", line))
    history.heard(report("b"), told("b", EventLine(1, 100.5, line.text)))
    history.heard(report("b", "other.py"), told("b", EventLine(2, 100.5, line.text)))
    history.heard(report("a"), told("a", EventLine(2, 200.0, line.text)))
    assert [(each.number, each.time, each.job) for each in history.news()] == [
        (1, 100.0, "train.py"),
        (2, 100.5, "other.py"),
        (3, 200.0, "train.py"),
    ]
    assert [each.number for each in history.news(2)] == [3]
    assert (history.after(report("a").key), history.after(report("b").key)) == (2, 2)


def test_views_are_kept_by_lineage_and_number_at_their_first_mention() -> None:
    """The first to enter a view tells when it began."""
    history = ObservedHistory()
    lines = [EpochLine(1, 5.0, [], "begun", "f"), EpochLine(2, 9.0, [], "without c", "f")]
    history.heard(report("a"), told("a", epochs=lines))
    history.heard(report("b"), told("b", epochs=[EpochLine(2, 8.0, [], "without c", "f")]))
    assert [(each.epoch, each.time) for each in history.epochs("train.py")] == [
        (1, 5.0),
        (2, 8.0),
    ]
    assert history.epochs("other.py") == []


def test_there_is_an_end_to_what_is_remembered() -> None:
    """Whatever the processes of a namespace tell, and however often they come and go."""
    history = ObservedHistory()
    for number in range(1, KEPT_NEWS + 50):
        epoch = EpochLine(number, float(number), [], "", "f")
        history.heard(report("a"), told("a", EventLine(number, number * 10.0, "x"), epochs=[epoch]))
        history.parted(report("b", incarnation=number), "gone")
        history.heard(report("c", f"job {number}"), told("c", epochs=[epoch]))
    assert len(history.news()) == KEPT_NEWS
    assert len(history.gone) == KEPT_GONE
    assert len(history._epochs) == observer.KEPT_JOBS
    history.heard(report("a"), told("a", epochs=[EpochLine(9, 9.0, [], "", "f")] * 99))
    assert len(history.epochs("train.py")) <= KEPT_EPOCHS


def test_who_was_in_an_earlier_view_is_known_to_be_over() -> None:
    """Whatever keeps it from answering; of who was only here, that nobody listens there now."""
    history = ObservedHistory()
    views = [EpochLine(1, 1.0, ["a/1", "b/1"], "", "f"), EpochLine(2, 2.0, ["a/1"], "", "f")]
    history.heard(report("a"), told("a", epochs=views))
    assert history.left_behind == {"b", "b/1"}
    b, c = NodeId("b"), NodeId("c")
    assert history.is_no_news(DialCandidate("b/1", b, ProcessId(b, 1), trouble="no answer"))
    assert history.is_no_news(DialCandidate("b@desk:1", b, trouble="no answer"))
    assert not history.is_no_news(DialCandidate("b/2", b, ProcessId(b, 2), trouble="no answer"))
    gone = StatusReport(node="c", incarnation=1, host="fd00::1", port=5, job="train.py")
    history.parted(gone, "its process ended")
    assert history.former == {"c/1", "[fd00::1]:5"}
    assert history.is_no_news(DialCandidate("c/1", c, ProcessId(c, 1), trouble="refused"))
    assert not history.is_no_news(DialCandidate("c/1", c, ProcessId(c, 1), trouble="no answer"))
    history.heard(report("a"), told("a", epochs=[EpochLine(3, 3.0, ["a/1", "b/1"], "", "f")]))
    assert history.left_behind == frozenset()


def test_who_comes_back_is_not_gone() -> None:
    """Its journal counts again from where it was."""
    history = ObservedHistory(lambda: 50.0)
    history.heard(report("a"), told("a", EventLine(3, 1.0, "x")))
    history.parted(report("a"), "its process ended")
    assert history.journals == {}
    (gone,) = history.gone
    assert (gone.time, gone.cause) == (50.0, "its process ended")
    history.arrived(report("a").key)
    assert history.gone == []
    assert history.after(report("a").key) == 3


def test_an_observer_that_wants_to_know_more_is_told() -> None:
    """Views, events and figures of every member; one that does not ask is told nothing."""
    job = new_job()
    config = AutoDiscoveryConfig(job=job, multicast=OPTIONS["multicast"], known=OPTIONS["known"])
    with clusters(2, job) as nodes, Observer(config, job=job, journals=True) as observer:
        with Observer(config, job=job) as other:
            eventually(lambda: len(observer.history.journals) == 2)
            eventually(lambda: len(other.reports) == 2)
            assert other.history.journals == {}
        assert nodes[0].view is not None
        (epoch,) = observer.history.epochs(job)
        assert epoch.epoch == nodes[0].view.epoch
        assert epoch.members == [
            f"{each.node}/{each.incarnation}" for each in nodes[0].view.members
        ]
        assert any("view 1 with 2 members" in each.text for each in observer.history.news())
        assert observer.port.port not in {node._backend.port for node in nodes}
        nodes[1].close()
        eventually(lambda: len(observer.history.gone) == 1)
        eventually(lambda: len(observer.history.epochs(job)) == 2)


# --------------------------------------------------------------------------------------------------
# Silence: questions are counted, not seconds.


def test_who_does_not_answer_falls_silent_once() -> None:
    """It is told when that happens, not again with every question; others go on."""
    silence = UnansweredQueries[str]()
    told = []
    for _ in range(3 * SILENT_AFTER):
        told += silence.asked(["attic", "desk"])
        silence.answered("desk")
    assert told == ["attic"]


def test_an_answer_begins_anew_and_who_is_gone_is_forgotten() -> None:
    """The count is of questions in a row."""
    silence = UnansweredQueries[str]()
    for _ in range(SILENT_AFTER - 1):
        assert silence.asked(["attic"]) == []
    silence.answered("attic")
    assert silence.asked(["attic"]) == []
    assert silence.asked([]) == []
    for _ in range(SILENT_AFTER - 1):
        assert silence.asked(["attic"]) == []
    assert silence.asked(["attic"]) == ["attic"]


# --------------------------------------------------------------------------------------------------
# A window: the dashboard beside a run, in a process of its own that never outlives it.


def children() -> set[int]:
    """Processes that this one has started."""
    return {each.pid for each in psutil.Process().children() if "dashboard" in str(each.cmdline())}


def test_a_run_shows_itself_and_its_window_ends_with_it(tmp_path: Path) -> None:
    """Of a namespace that no file of this machine keeps as well; the secret is in no argument."""
    namespace = potluck.NetworkNamespace.generate("attic", home=tmp_path)
    before, job = children(), new_job()
    with join(1, job, namespace=namespace, dashboard=0) as cluster:
        assert cluster.dashboard_url is not None
        port = int(cluster.dashboard_url.rstrip("/").rpartition(":")[2])
        with Stream(port) as stream:
            shown = stream.next("whole", "light")[2]
            while not shown.get("jobs"):
                shown = stream.next("light")[2]
        assert [job["job"] for job in shown["jobs"]] == [job]
        assert shown["namespace"] == "attic"
        (pid,) = children() - before
        assert not any(namespace.secret.hex() in each for each in psutil.Process(pid).cmdline())
        assert ask(port, "/").status == 200
    assert children() == before
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_a_window_ends_when_its_run_is_killed() -> None:
    """Its standard input ends then, whatever happened."""
    program = (
        "import sys, time, potluck\n"
        "cluster = potluck.join(1, job=sys.argv[1], multicast=False, known=False,\n"
        "    solo_delay=0.1, dashboard=0)\n"
        "print(cluster.dashboard_url, flush=True)\n"
        "time.sleep(60)\n"
    )
    with psutil.Popen([sys.executable, "-c", program, new_job()], stdout=-1, text=True) as run:
        assert run.stdout.readline().startswith("http://127.0.0.1:")
        (window,) = run.children()
        run.send_signal(signal.SIGKILL)
        run.wait(PATIENCE)
        eventually(lambda: not window.is_running() or window.status() == psutil.STATUS_ZOMBIE)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is looked for, and the node that asked is closed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else find(name)
    )
    with pytest.raises(BackendUnavailable, match=r"no uvicorn.*pip install 'potluck\[dashboard\]'"):
        find_web_server()
    with pytest.raises(BackendUnavailable, match="pip install"):
        join(1, new_job(), dashboard=True)


def test_a_place_that_cannot_be_had_is_an_error() -> None:
    """With the cause, from the other process."""
    busy = connect_listener()
    port = busy.getsockname()[1]
    namespace = potluck.NetworkNamespace.load_or_create()
    config = AutoDiscoveryConfig(job=new_job(), multicast=False, known=False)
    window = DashboardProcess(request_for(port, config, namespace, 1))
    try:
        with pytest.raises(BackendUnavailable, match=f"port {port}"):
            window.wait()
    finally:
        window.close()
        window.close()
        busy.close()


def connect_listener() -> socket.socket:
    """Somebody else's port."""
    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        (True, ("127.0.0.1", None)),
        (8000, ("127.0.0.1", 8000)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("desk.local", ("desk.local", None)),
        ("::1", ("::1", None)),
        ("[::]:80", ("::", 80)),
    ],
)
def test_places_can_be_said_in_several_ways(
    wanted: bool | int | str, place: tuple[str, int | None]
) -> None:
    """A port, an address, or both."""
    assert place_of(wanted) == place
