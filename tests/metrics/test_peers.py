"""Peers: few labels, whoever comes and goes; nothing that was counted is lost."""

import pytest

from potluck.metrics.cells import OTHER
from potluck.metrics.peers import MAX_LABEL, MAX_PEERS, MAX_WATCHES, PeerBook
from potluck.metrics.snapshot import PeerSnapshot


def waiting(book: PeerBook) -> dict[str, float]:
    """By label."""
    return {each.peer: each.waiting for each in book.snapshot()}


def test_a_peer_keeps_its_label() -> None:
    """Two processes of one machine are told apart, and stay who they are."""
    book = PeerBook()
    first = [book.label(key, "attic") for key in ("a", "b")]
    assert first == ["attic", "attic (2)"]
    assert [book.label(key, "attic") for key in ("b", "a")] == first[::-1]


def test_whoever_restarts_gets_the_label_again() -> None:
    """A machine that restarts a thousand times is one line in a graph, not a thousand."""
    book = PeerBook()
    for start in range(1000):
        assert book.label(("node", start), "attic") == "attic"
        book.keep([])
    assert book.snapshot() == []


def test_labels_are_bounded_in_number_and_size() -> None:
    """Whatever a thousand peers call themselves."""
    book = PeerBook()
    labels = {book.label(number, f"{number}-{'x' * 500}\n\x1b[2J") for number in range(1000)}
    assert len(labels) == MAX_PEERS + 1
    assert OTHER in labels
    assert all(len(label) <= MAX_LABEL and label.isprintable() for label in labels)


def test_nobody_can_call_itself_other() -> None:
    """Nor nothing at all."""
    book = PeerBook()
    assert book.label(1, "other") == "other (2)"
    assert book.label(2, "") == "?"


def test_waiting_is_counted_by_peer_over_all_groups() -> None:
    """A subgroup waits for the same machine as the whole, whatever rank that has there."""
    book = PeerBook()
    whole, part = {1: 2.0, 2: 1.0}, {0: 0.5}
    book.watch({1: "attic", 2: "cellar"}, whole)
    book.watch({0: "cellar"}, part)
    assert waiting(book) == {"attic": 2.0, "cellar": 1.5}
    part[0] += 1.0
    assert waiting(book)["cellar"] == 2.5
    book.release(part)
    part[0] += 100.0
    assert waiting(book)["cellar"] == 2.5


def test_what_was_counted_for_those_who_are_gone_is_of_others() -> None:
    """The sum never falls, also while the group they were in is still there."""
    book = PeerBook()
    labels = {1: book.label("a", "attic"), 2: book.label("c", "cellar")}
    book.watch(labels, {1: 2.0, 2: 1.0})
    settled = {1: 4.0}
    book.watch(labels, settled)
    book.release(settled)
    book.keep(["c"])
    assert waiting(book) == {"cellar": 1.0, OTHER: 6.0}
    assert book.label("new", "attic") == "attic"
    assert "attic" not in waiting(book)


def test_so_many_groups_at_once() -> None:
    """More of them cost no more memory, and what they had counted stays."""
    book = PeerBook()
    for _ in range(MAX_WATCHES + 10):
        book.watch({1: "attic"}, {1: 1.0})
    assert waiting(book) == {"attic": pytest.approx(MAX_WATCHES + 10)}


def test_peers_come_by_rank_and_the_others_last() -> None:
    """With what is known of each."""
    book = PeerBook()
    book.watch({0: "attic", 2: "cellar", 3: OTHER}, {0: 1.0, 3: 9.0})
    book.see(
        [
            PeerSnapshot(peer="cellar", rank=2, status="healthy", round_trip=0.001, jitter=0.0),
            PeerSnapshot(peer="visitor", status="dead", loss=0.5),
            PeerSnapshot(peer=OTHER, rank=7, status="suspect"),
        ]
    )
    lines = book.snapshot()
    assert [(each.peer, each.rank, each.status) for each in lines] == [
        ("attic", 0, ""),
        ("cellar", 2, "healthy"),
        ("visitor", -1, "dead"),
        (OTHER, -1, ""),
    ]
    assert lines[1].round_trip == 0.001
    book.see([])
    assert [each.status for each in book.snapshot()] == ["", ""]
