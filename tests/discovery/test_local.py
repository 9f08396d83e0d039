"""Notes of processes on one machine: found at once, gone with their writer, never just believed."""

from __future__ import annotations

import functools
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from potluck.discovery.local import (
    KEPT,
    KNOWN_PEERS_MAX_SIZE,
    MAX_FILES,
    MAX_KNOWN,
    MAX_SIZE,
    KnownPeers,
    LocalProcesses,
)
from potluck.errors import DistributedError
from potluck.identity.namespace import NetworkNamespace
from potluck.net.addresses import Address
from support.discovering import ATTIC, LAB, advert, sighting
from support.threads import PATIENCE, eventually, together

NOBODY = advert("f", port=0)

# Leaves a note, says so, and lives until its input ends.
WRITER = """
import sys
from pathlib import Path
from potluck.discovery.local import LocalProcesses
from support.discovering import LAB
from potluck.discovery.records import Advert
from potluck._types import NodeId, ProcessId
shown = Advert.of(LAB, ProcessId(NodeId("a" * 32), 7), job="train.py", port=4711)
notes = LocalProcesses(Path(sys.argv[1]))
notes.publish(shown)
print("published", flush=True)
sys.stdin.read()
"""


def test_a_note_is_found_by_others_and_not_by_its_writer(tmp_path: Path) -> None:
    """With its loopback address, until it is taken back."""
    one, other = LocalProcesses(tmp_path), LocalProcesses(tmp_path)
    first, second = advert("a"), advert("a")
    one.publish(first)
    assert one.look(first) == []
    (seen,) = other.look(second)
    assert seen.process == first.process
    assert seen.addresses == (Address("127.0.0.1", first.port),)
    one.close()
    assert other.look(second) == []
    assert list((tmp_path / "neighbours").iterdir()) == []
    other.close()


def test_a_changed_note_is_read_again(tmp_path: Path) -> None:
    """Another port, or an address of its own choice."""
    one, other = LocalProcesses(tmp_path), LocalProcesses(tmp_path)
    first = advert("a")
    one.publish(first)
    assert len(other.look(advert("a"))) == 1
    one.publish(replace(first, port=5, hosts=("10.0.0.1",)))
    (seen,) = other.look(advert("a"))
    assert seen.addresses == (Address("10.0.0.1", 5),)
    one.close()


def test_other_namespaces_and_other_jobs_are_not_seen(tmp_path: Path) -> None:
    """Several of them may run on one machine."""
    crowd = [LocalProcesses(tmp_path) for _ in range(3)]
    shown = [advert("a"), advert("a", namespace=ATTIC), advert("a", job="other.py")]
    for notes, each in zip(crowd, shown, strict=True):
        notes.publish(each)
    for notes, each in zip(crowd, shown, strict=True):
        assert notes.look(each) == []
        assert [seen.process for seen in notes.look(replace(each, incarnation=9**9))] == [
            each.process
        ]
    for notes in crowd:
        notes.close()


def test_one_who_only_looks_leaves_no_note(tmp_path: Path) -> None:
    """An observer has no port."""
    notes = LocalProcesses(tmp_path)
    notes.publish(NOBODY)
    assert list((tmp_path / "neighbours").iterdir()) == []
    notes.close()


def test_the_note_of_a_killed_process_is_removed_by_whoever_sees_it(tmp_path: Path) -> None:
    """Its lock is free the moment it dies, whatever it dies of."""
    notes = LocalProcesses(tmp_path)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"published\n"
        assert [seen.incarnation for seen in notes.look(NOBODY)] == [7]
        writer.kill()
        writer.wait(PATIENCE)
    eventually(lambda: notes.look(NOBODY) == [])
    assert list((tmp_path / "neighbours").iterdir()) == []


def test_notes_of_dead_processes_of_other_jobs_do_not_pile_up(tmp_path: Path) -> None:
    """Whoever leaves a note first removes those that nobody holds any more."""
    living, dead = LocalProcesses(tmp_path), LocalProcesses(tmp_path)
    living.publish(advert("a", job="living.py"))
    shown = advert("a", job="dead.py")
    dead.publish(shown)
    assert dead._lock is not None
    dead._lock.release()  # as the system does when it dies
    newcomer = LocalProcesses(tmp_path)
    newcomer.publish(advert("a"))
    names = {path.name for path in (tmp_path / "neighbours").iterdir()}
    assert len(names) == 4
    assert f"{shown.incarnation}.json" not in names
    for notes in (living, newcomer):
        notes.close()


def test_a_note_of_another_machine_or_network_is_not_for_us(tmp_path: Path) -> None:
    """A home directory may be shared; loopback is not."""
    one, other = LocalProcesses(tmp_path), LocalProcesses(tmp_path)
    one.publish(advert("a"))
    other._place = "another boot/4026531840"
    assert other.look(NOBODY) == []
    one.close()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[" * 2000,
        b"\xff\xfe",
        b"x" * (MAX_SIZE + 10),
        b'{"port": 0}',
        b'{"port": "80"}',
        b'{"incarnation": 99}',
        b'{"extra": 1}',
    ],
)
def test_a_damaged_note_is_no_note(tmp_path: Path, damage: bytes) -> None:
    """And it hides no other."""
    one, other = LocalProcesses(tmp_path), LocalProcesses(tmp_path)
    shown = advert("a")
    one.publish(shown)
    note = tmp_path / "neighbours" / f"{shown.incarnation}.json"
    good = msgspec.json.decode(note.read_bytes())
    with_damage = damage
    if damage.startswith(b'{"'):
        with_damage = msgspec.json.encode({**good, **msgspec.json.decode(damage)})
    bad = note.with_name("999999.json")
    bad.write_bytes(with_damage)
    bad.chmod(0o600)
    assert [seen.process for seen in other.look(NOBODY)] == [shown.process]
    one.close()


def test_a_note_that_others_could_have_written_is_not_read(tmp_path: Path) -> None:
    """It might lead us anywhere; TLS would tell, but why try."""
    one, other = LocalProcesses(tmp_path), LocalProcesses(tmp_path)
    shown = advert("a")
    one.publish(shown)
    (tmp_path / "neighbours" / f"{shown.incarnation}.json").chmod(0o666)
    assert other.look(NOBODY) == []
    one.close()


# --------------------------------------------------------------------------------------------------
# The peers of earlier runs: kept privately, in bounds, and for a while.


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
    assert (tmp_path / "known" / mine.tag).stat().st_size < KNOWN_PEERS_MAX_SIZE
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
    "damage",
    [b"", b"nonsense", b"{}", b"[[]]", b"\xff", b"[" * 5000, b" " * (KNOWN_PEERS_MAX_SIZE + 1)],
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
