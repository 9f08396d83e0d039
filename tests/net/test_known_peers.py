"""The peers of earlier runs: kept privately, in bounds, and for a while."""

from __future__ import annotations

import functools
import stat
from pathlib import Path

import msgspec
import pytest

from potluck.errors import DistributedError
from potluck.net.addresses import Address
from potluck.net.known_peers import KEPT, MAX_FILES, MAX_KNOWN, MAX_SIZE, KnownPeers
from potluck.net.namespace import NetworkNamespace
from support.discovering import ATTIC, LAB, advert, sighting
from support.threads import together


def test_what_is_remembered_is_recalled_in_the_next_run(tmp_path: Path) -> None:
    """Who it was, where, and what it is called; newest first."""
    mine = advert("a")
    KnownPeers(tmp_path).remember(mine, [sighting("b", "10.0.0.2", name="desk")])
    KnownPeers(tmp_path).remember(mine, [sighting("c", "10.0.0.3", "fd00::3")])
    third, second = KnownPeers(tmp_path).recall(advert("a"))
    assert (second.node, second.name) == ("b" * 32, "desk")
    assert third.addresses == (Address("10.0.0.3", 4711), Address("fd00::3", 4711))
    assert third.sources == ("known",)
    assert third.process is None  # whichever process is there now, it is another start


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    """Whom somebody works with is nobody's business."""
    mine = advert("a")
    KnownPeers(tmp_path).remember(mine, [sighting("b")])
    file = tmp_path / "known" / mine.tag
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    assert KnownPeers(tmp_path).recall(mine) == []


def test_namespaces_and_jobs_are_kept_apart(tmp_path: Path) -> None:
    """And remembering one does not forget the other."""
    known = KnownPeers(tmp_path)
    for letter, each in zip(
        "bcd", [advert(), advert(job="other.py"), advert(namespace=ATTIC)], strict=True
    ):
        known.remember(each, [sighting(letter)])
    for letter, each in zip(
        "bcd", [advert(), advert(job="other.py"), advert(namespace=ATTIC)], strict=True
    ):
        assert [peer.node for peer in known.recall(each)] == [letter * 32]


def test_after_a_change_of_the_secret_the_peers_are_still_known(tmp_path: Path) -> None:
    """By the tag of the earlier secret; the job's tag has changed with it."""
    known = KnownPeers(tmp_path)
    known.remember(advert(namespace=LAB), [sighting("b")])
    rotated = LAB.rotated(b"n" * 32)
    assert len(known.recall(advert(namespace=rotated))) == 1


def test_a_peer_that_is_seen_again_is_kept_once(tmp_path: Path) -> None:
    """With its newest address; two processes of one machine differ by their ports."""
    known, mine = KnownPeers(tmp_path), advert()
    known.remember(mine, [sighting("b", "10.0.0.2"), sighting("b", "10.0.0.2", port=4712)])
    known.remember(mine, [sighting("b", "10.0.0.9")])
    found = {peer.addresses[0] for peer in known.recall(mine)}
    assert found == {Address("10.0.0.9", 4711), Address("10.0.0.2", 4712)}


def test_what_needs_no_memory_is_not_kept(tmp_path: Path) -> None:
    """A process of this machine, a neighbour on loopback, and an address without a peer."""
    known, mine = KnownPeers(tmp_path), advert()
    known.remember(
        mine,
        [sighting("a"), sighting("b", "127.0.0.1"), sighting("", "10.0.0.1"), sighting("c", "::1")],
    )
    assert known.recall(mine) == []
    assert not (tmp_path / "known").exists()


def test_peers_are_forgotten_after_a_month(tmp_path: Path) -> None:
    """Their addresses are somebody else's by then."""
    mine = advert()
    KnownPeers(tmp_path, clock=lambda: 1000.0).remember(mine, [sighting("b")])
    assert len(KnownPeers(tmp_path, clock=lambda: 1000.0 + KEPT).recall(mine)) == 1
    assert KnownPeers(tmp_path, clock=lambda: 1001.0 + KEPT).recall(mine) == []


def test_the_memory_is_bounded(tmp_path: Path) -> None:
    """In peers of a namespace, and in namespaces."""
    known, mine = KnownPeers(tmp_path), advert()
    known.remember(mine, [sighting("b", port=port) for port in range(1, 100)])
    known.remember(mine, [sighting("c")])
    found = known.recall(mine)
    assert len(found) == MAX_KNOWN
    assert found[0].node == "c" * 32
    assert (tmp_path / "known" / mine.tag).stat().st_size < MAX_SIZE
    for number in range(MAX_FILES + 3):
        namespace = NetworkNamespace("lab", bytes([number]) * 32)
        known.remember(advert(namespace=namespace), [sighting("b")])
    files = [path for path in (tmp_path / "known").iterdir() if path.name != ".lock"]
    assert len(files) == MAX_FILES


def test_several_processes_may_remember_at_once(tmp_path: Path) -> None:
    """Nobody's peers are lost."""
    mine = advert()

    def remember(letter: str) -> None:
        KnownPeers(tmp_path).remember(mine, [sighting(letter)])

    together(*(functools.partial(remember, letter) for letter in "bcdefghi"))
    found = {peer.node for peer in KnownPeers(tmp_path).recall(mine)}
    assert found == {letter * 32 for letter in "bcdefghi"}


@pytest.mark.parametrize(
    "damage", [b"", b"nonsense", b"{}", b"[[]]", b"\xff", b"[" * 5000, b" " * (MAX_SIZE + 1)]
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, damage: bytes) -> None:
    """And is written anew."""
    known, mine = KnownPeers(tmp_path), advert()
    known.remember(mine, [sighting("b")])
    file = tmp_path / "known" / mine.tag
    file.write_bytes(damage)
    assert known.recall(mine) == []
    known.remember(mine, [sighting("c")])
    assert [peer.node for peer in known.recall(mine)] == ["c" * 32]


def test_one_bad_entry_spoils_the_file(tmp_path: Path) -> None:
    """Whoever could write that could have written all of it."""
    known, mine = KnownPeers(tmp_path), advert()
    known.remember(mine, [sighting("b")])
    file = tmp_path / "known" / mine.tag
    (entry,) = msgspec.json.decode(file.read_bytes())
    for field, value in (("addresses", [["10.0.0.1", 0]]), ("node", "../x"), ("addresses", [])):
        file.write_bytes(msgspec.json.encode([entry, {**entry, field: value}]))
        assert known.recall(mine) == []


def test_where_nothing_can_be_kept_the_caller_is_told(tmp_path: Path) -> None:
    """Discovery then says so, and goes on."""
    (tmp_path / "known").write_text("in the way")
    with pytest.raises(DistributedError, match="could not be created"):
        KnownPeers(tmp_path).remember(advert(), [sighting("b")])
