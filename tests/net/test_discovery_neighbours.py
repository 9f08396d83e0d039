"""Notes of processes on one machine: found at once, gone with their writer, never just believed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from potluck.net.addresses import Address
from potluck.net.discovery_neighbours import MAX_SIZE, Neighbours
from support.discovering import ATTIC, advert
from support.threads import PATIENCE, eventually

NOBODY = advert("f", port=0)

# Leaves a note, says so, and lives until its input ends.
WRITER = """
import sys
from pathlib import Path
from potluck.net.discovery_neighbours import Neighbours
from support.discovering import LAB
from potluck.net.discovery import Advert
from potluck.vocabulary import NodeId, ProcessId
shown = Advert.of(LAB, ProcessId(NodeId("a" * 32), 7), job="train.py", port=4711)
notes = Neighbours(Path(sys.argv[1]))
notes.publish(shown)
print("published", flush=True)
sys.stdin.read()
"""


def test_a_note_is_found_by_others_and_not_by_its_writer(tmp_path: Path) -> None:
    """With its loopback address, until it is taken back."""
    one, other = Neighbours(tmp_path), Neighbours(tmp_path)
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
    one, other = Neighbours(tmp_path), Neighbours(tmp_path)
    first = advert("a")
    one.publish(first)
    assert len(other.look(advert("a"))) == 1
    one.publish(replace(first, port=5, hosts=("10.0.0.1",)))
    (seen,) = other.look(advert("a"))
    assert seen.addresses == (Address("10.0.0.1", 5),)
    one.close()


def test_other_namespaces_and_other_jobs_are_not_seen(tmp_path: Path) -> None:
    """Several of them may run on one machine."""
    crowd = [Neighbours(tmp_path) for _ in range(3)]
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
    notes = Neighbours(tmp_path)
    notes.publish(NOBODY)
    assert list((tmp_path / "neighbours").iterdir()) == []
    notes.close()


def test_the_note_of_a_killed_process_is_removed_by_whoever_sees_it(tmp_path: Path) -> None:
    """Its lock is free the moment it dies, whatever it dies of."""
    notes = Neighbours(tmp_path)
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
    living, dead = Neighbours(tmp_path), Neighbours(tmp_path)
    living.publish(advert("a", job="living.py"))
    shown = advert("a", job="dead.py")
    dead.publish(shown)
    assert dead._lock is not None
    dead._lock.release()  # as the system does when it dies
    newcomer = Neighbours(tmp_path)
    newcomer.publish(advert("a"))
    names = {path.name for path in (tmp_path / "neighbours").iterdir()}
    assert len(names) == 4
    assert f"{shown.incarnation}.json" not in names
    for notes in (living, newcomer):
        notes.close()


def test_a_note_of_another_machine_or_network_is_not_for_us(tmp_path: Path) -> None:
    """A home directory may be shared; loopback is not."""
    one, other = Neighbours(tmp_path), Neighbours(tmp_path)
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
    one, other = Neighbours(tmp_path), Neighbours(tmp_path)
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
    one, other = Neighbours(tmp_path), Neighbours(tmp_path)
    shown = advert("a")
    one.publish(shown)
    (tmp_path / "neighbours" / f"{shown.incarnation}.json").chmod(0o666)
    assert other.look(NOBODY) == []
    one.close()
