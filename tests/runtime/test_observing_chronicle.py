"""A chronicle: what an observer learned, once each, and never more than there is room for."""

from __future__ import annotations

from potluck.runtime import observing_chronicle
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.control_contacts import Contact
from potluck.runtime.control_reports import Report
from potluck.runtime.observing import Observer
from potluck.runtime.observing_chronicle import KEPT_EPOCHS, KEPT_GONE, KEPT_NEWS, Chronicle
from potluck.runtime.observing_journal import EpochLine, EventLine, Journal
from potluck.vocabulary import NodeId, ProcessId
from support.clusters import OPTIONS, clusters, new_job
from support.threads import eventually


def report(letter: str = "a", job: str = "train.py", incarnation: int = 1) -> Report:
    """Of a process."""
    return Report(node=letter * 32, incarnation=incarnation, name=letter, job=job)


def told(letter: str, *events: EventLine, epochs: list[EpochLine] | None = None) -> Journal:
    """What it tells."""
    return Journal(node=letter * 32, incarnation=1, events=list(events), epochs=epochs or [])


def test_the_same_news_of_several_is_news_once() -> None:
    """Unless it happens again; and nothing is taken twice from one process."""
    chronicle = Chronicle()
    line = EventLine(1, 100.0, "view 2 with 2 members")
    chronicle.heard(report("a"), told("a", line))
    chronicle.heard(report("a"), told("a", line))
    chronicle.heard(report("b"), told("b", EventLine(1, 100.5, line.text)))
    chronicle.heard(report("b", "other.py"), told("b", EventLine(2, 100.5, line.text)))
    chronicle.heard(report("a"), told("a", EventLine(2, 200.0, line.text)))
    assert [(each.number, each.time, each.job) for each in chronicle.news()] == [
        (1, 100.0, "train.py"),
        (2, 100.5, "other.py"),
        (3, 200.0, "train.py"),
    ]
    assert [each.number for each in chronicle.news(2)] == [3]
    assert (chronicle.after(report("a").key), chronicle.after(report("b").key)) == (2, 2)


def test_views_are_kept_by_lineage_and_number_at_their_first_mention() -> None:
    """The first to enter a view tells when it began."""
    chronicle = Chronicle()
    lines = [EpochLine(1, 5.0, [], "begun", "f"), EpochLine(2, 9.0, [], "without c", "f")]
    chronicle.heard(report("a"), told("a", epochs=lines))
    chronicle.heard(report("b"), told("b", epochs=[EpochLine(2, 8.0, [], "without c", "f")]))
    assert [(each.epoch, each.time) for each in chronicle.epochs("train.py")] == [
        (1, 5.0),
        (2, 8.0),
    ]
    assert chronicle.epochs("other.py") == []


def test_there_is_an_end_to_what_is_remembered() -> None:
    """Whatever the processes of a namespace tell, and however often they come and go."""
    chronicle = Chronicle()
    for number in range(1, KEPT_NEWS + 50):
        epoch = EpochLine(number, float(number), [], "", "f")
        chronicle.heard(
            report("a"), told("a", EventLine(number, number * 10.0, "x"), epochs=[epoch])
        )
        chronicle.parted(report("b", incarnation=number), "gone")
        chronicle.heard(report("c", f"job {number}"), told("c", epochs=[epoch]))
    assert len(chronicle.news()) == KEPT_NEWS
    assert len(chronicle.gone) == KEPT_GONE
    assert len(chronicle._epochs) == observing_chronicle.KEPT_JOBS
    chronicle.heard(report("a"), told("a", epochs=[EpochLine(9, 9.0, [], "", "f")] * 99))
    assert len(chronicle.epochs("train.py")) <= KEPT_EPOCHS


def test_who_was_in_an_earlier_view_is_known_to_be_over() -> None:
    """Whatever keeps it from answering; of who was only here, that nobody listens there now."""
    chronicle = Chronicle()
    views = [EpochLine(1, 1.0, ["a/1", "b/1"], "", "f"), EpochLine(2, 2.0, ["a/1"], "", "f")]
    chronicle.heard(report("a"), told("a", epochs=views))
    assert chronicle.left_behind == {"b", "b/1"}
    b, c = NodeId("b"), NodeId("c")
    assert chronicle.is_no_news(Contact("b/1", b, ProcessId(b, 1), trouble="no answer"))
    assert chronicle.is_no_news(Contact("b@desk:1", b, trouble="no answer"))
    assert not chronicle.is_no_news(Contact("b/2", b, ProcessId(b, 2), trouble="no answer"))
    gone = Report(node="c", incarnation=1, host="fd00::1", port=5, job="train.py")
    chronicle.parted(gone, "its process ended")
    assert chronicle.former == {"c/1", "[fd00::1]:5"}
    assert chronicle.is_no_news(Contact("c/1", c, ProcessId(c, 1), trouble="refused"))
    assert not chronicle.is_no_news(Contact("c/1", c, ProcessId(c, 1), trouble="no answer"))
    chronicle.heard(report("a"), told("a", epochs=[EpochLine(3, 3.0, ["a/1", "b/1"], "", "f")]))
    assert chronicle.left_behind == frozenset()


def test_who_comes_back_is_not_gone() -> None:
    """Its journal counts again from where it was."""
    chronicle = Chronicle(lambda: 50.0)
    chronicle.heard(report("a"), told("a", EventLine(3, 1.0, "x")))
    chronicle.parted(report("a"), "its process ended")
    assert chronicle.journals == {}
    (gone,) = chronicle.gone
    assert (gone.time, gone.cause) == (50.0, "its process ended")
    chronicle.arrived(report("a").key)
    assert chronicle.gone == []
    assert chronicle.after(report("a").key) == 3


def test_an_observer_that_wants_to_know_more_is_told() -> None:
    """Views, events and figures of every member; one that does not ask is told nothing."""
    job = new_job()
    config = AutoDiscoveryConfig(job=job, multicast=OPTIONS["multicast"], known=OPTIONS["known"])
    with clusters(2, job) as nodes, Observer(config, job=job, journals=True) as observer:
        with Observer(config, job=job) as other:
            eventually(lambda: len(observer.chronicle.journals) == 2)
            eventually(lambda: len(other.reports) == 2)
            assert other.chronicle.journals == {}
        assert nodes[0].view is not None
        (epoch,) = observer.chronicle.epochs(job)
        assert epoch.epoch == nodes[0].view.epoch
        assert epoch.members == [
            f"{each.node}/{each.incarnation}" for each in nodes[0].view.members
        ]
        assert any("view 1 with 2 members" in each.text for each in observer.chronicle.news())
        assert observer.port.port not in {node._backend.port for node in nodes}  # type: ignore[attr-defined]
        nodes[1].close()
        eventually(lambda: len(observer.chronicle.gone) == 1)
        eventually(lambda: len(observer.chronicle.epochs(job)) == 2)
