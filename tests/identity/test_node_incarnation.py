"""Which start of which process: numbers that only grow, slots that prove a death, machine tags."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import NodeId
from potluck.errors import BackendUnavailable, DistributedError
from potluck.identity import node
from potluck.identity.node import (
    boot_tag,
    claim_incarnation,
    claim_process,
    is_slot_free,
    machine_tag,
    this_process,
)
from potluck.identity.private_files import maybe_lock
from support.forks import in_child
from support.threads import PATIENCE

NODE, OTHER = NodeId("a" * 32), NodeId("b" * 32)

# Claims, shows what it got, and lives until its input ends.
_CLAIMANT = """
import sys
from pathlib import Path
from potluck.identity.node import claim_incarnation
print("ready", flush=True)
sys.stdin.readline()
mine = claim_incarnation(Path(sys.argv[1]))
print(mine.number, mine.slot, flush=True)
sys.stdin.read()
"""


# Claims, and ends; a child that it made lives until its input ends.
_FORKING_CLAIMANT = """
import os, sys
from pathlib import Path
from potluck.identity.node import claim_incarnation
mine = claim_incarnation(Path(sys.argv[1]))
if os.fork() == 0:
    print(mine.slot, flush=True)
    sys.stdin.read()
os._exit(0)
"""


class Claimant:
    """A process that claims an incarnation when told to."""

    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLAIMANT, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def go(self) -> None:
        """Let it claim."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self) -> tuple[int, int]:
        """Number and slot."""
        number, slot = self._line().split()
        return int(number), int(slot)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def claimants(count: int, home: Path) -> Iterator[list[Claimant]]:
    """Processes that are ended whatever happens."""
    processes: list[Claimant] = []
    try:
        processes.extend(Claimant(home) for _ in range(count))
        yield processes
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(autouse=True)
def _release_claims() -> Iterator[None]:
    yield
    for claim in list(node._claims):
        claim.release()


def test_processes_that_live_at_once_have_different_numbers_and_slots(tmp_path: Path) -> None:
    """Eight processes that start at the same moment need no configuration to be told apart."""
    with claimants(8, tmp_path) as processes:
        for process in processes:
            process.go()
        results = [process.result() for process in processes]
    assert len({number for number, _ in results}) == 8
    assert sorted(slot for _, slot in results) == list(range(8))


def test_after_a_crash_the_next_one_is_higher_in_the_same_slot(tmp_path: Path) -> None:
    """The system frees the slot of a killed process, so taking it over proves the death."""
    with claimants(2, tmp_path) as (first, second):
        first.go()
        number, slot = first.result()
        first.kill()
        second.go()
        later, same = second.result()
    assert later > number
    assert same == slot == 0


def test_a_living_process_keeps_its_slot(tmp_path: Path) -> None:
    """A later start beside a living one is a neighbour, not its successor."""
    first, second = claim_incarnation(tmp_path), claim_incarnation(tmp_path)
    assert (first.slot, second.slot) == (0, 1)
    assert second.number > first.number
    first.release()
    first.release()
    assert claim_incarnation(tmp_path).slot == 0
    assert repr(second) == f"Incarnation({second.number}, slot=1)"


def test_a_claim_lasts_even_if_nobody_keeps_it(tmp_path: Path) -> None:
    """Only the end of the process, or release(), frees the slot."""
    claim_incarnation(tmp_path)
    assert maybe_lock(tmp_path / "processes" / "0.lock") is None


@given(st.lists(st.floats(min_value=0, max_value=2.5e11), min_size=1, max_size=20))
def test_numbers_grow_whatever_the_clock_says(times: list[float]) -> None:
    """A clock that jumps back, stands still or starts in 1970 changes nothing."""
    with tempfile.TemporaryDirectory() as directory:
        numbers = []
        for time in times:
            claim = claim_incarnation(Path(directory), clock=lambda time=time: time)  # type: ignore[misc]
            numbers.append(claim.number)
            claim.release()
    assert numbers == sorted(set(numbers))
    assert numbers[0] >= 1


@pytest.mark.parametrize("content", [None, b"", b"12x", b"-5", b"9" * 30])
def test_a_lost_counter_is_made_up_for_by_the_clock(tmp_path: Path, content: bytes | None) -> None:
    """Deleted, damaged or restored from an old backup: the number is still higher than before."""
    before = claim_incarnation(tmp_path, clock=lambda: 1_000_000.0)
    counter = tmp_path / "incarnation"
    if content is None:
        counter.unlink()
    else:
        counter.write_bytes(content)
    after = claim_incarnation(tmp_path, clock=lambda: 1_000_000.5)
    assert after.number > before.number


def test_too_many_processes_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on processes is an error, not an endless search."""
    monkeypatch.setattr(node, "MAX_SLOTS", 2)
    claims = [claim_incarnation(tmp_path) for _ in range(2)]
    with pytest.raises(BackendUnavailable, match="2 Potluck processes"):
        claim_incarnation(tmp_path)
    assert len(claims) == 2


def test_a_failed_claim_leaves_the_slot_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk costs the start, not the slot."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node, "replace_private", full)
        with pytest.raises(OSError, match="No space"):
            claim_incarnation(tmp_path)
    assert claim_incarnation(tmp_path).slot == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_keep_its_parents_slot(tmp_path: Path) -> None:
    """Data loaders that outlive a killed trainer must not make it look alive."""
    command = [sys.executable, "-c", _FORKING_CLAIMANT, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        parent.wait(PATIENCE)  # it has ended, its child lives on
        assert claim_incarnation(tmp_path).slot == 0


def test_a_slot_is_free_once_its_process_has_ended(tmp_path: Path) -> None:
    """A killed process has released it; a look at a free one does not take it."""
    with claimants(1, tmp_path) as (process,):
        process.go()
        _, slot = process.result()
        assert not is_slot_free(slot, tmp_path)
        process.kill()
        assert is_slot_free(slot, tmp_path)
        assert is_slot_free(slot, tmp_path)
    assert claim_incarnation(tmp_path).slot == slot


def test_our_own_slot_is_held(tmp_path: Path) -> None:
    """Also by this very process, until it lets go."""
    mine = claim_incarnation(tmp_path)
    assert not is_slot_free(mine.slot, tmp_path)
    mine.release()
    assert is_slot_free(mine.slot, tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_slot_is_free_though_a_forked_child_outlives_its_process(tmp_path: Path) -> None:
    """The child has closed its copy, so the death of the parent can be seen."""
    command = [sys.executable, "-c", _FORKING_CLAIMANT, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        parent.wait(PATIENCE)
        assert is_slot_free(0, tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_slot_whose_descriptor_lives_on_in_a_child_is_held(tmp_path: Path) -> None:
    """What a child of another library keeps open counts as alive: never too early."""
    mine = claim_incarnation(tmp_path)
    kept = os.dup(mine._lock._descriptor)  # as a child has it that closed nothing
    mine._lock.close()  # the process itself is gone
    assert not is_slot_free(mine.slot, tmp_path)
    os.close(kept)
    assert is_slot_free(mine.slot, tmp_path)


@pytest.mark.parametrize("slot", [3, -1, node.MAX_SLOTS])
def test_a_slot_that_never_was_is_no_testimony(tmp_path: Path, slot: int) -> None:
    """Nothing is known of it, and no file is made by the look; nor where there is no home."""
    claim_incarnation(tmp_path)
    assert not is_slot_free(slot, tmp_path)
    assert sorted(each.name for each in (tmp_path / "processes").iterdir()) == ["0.lock"]
    assert not is_slot_free(0, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_slot_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    """As a file of another user: whoever asks knows nothing."""
    mine = claim_incarnation(tmp_path)
    mine.release()
    file = tmp_path / "processes" / f"{mine.slot}.lock"
    file.unlink()
    file.mkdir()  # root, too, cannot open it for writing
    with pytest.raises(DistributedError, match="could not be opened"):
        is_slot_free(mine.slot, tmp_path)


def machine(root: Path, **files: str) -> Path:
    """A root directory with these facts about the machine in it."""
    places = {
        "machine_id": "etc/machine-id",
        "dbus_id": "var/lib/dbus/machine-id",
        "serial": "sys/firmware/devicetree/base/serial-number",
        "boot": "proc/sys/kernel/random/boot_id",
    }
    for name, content in files.items():
        file = root / places[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the files that Linux has")


@linux
def test_the_machine_tag_is_the_same_after_a_reboot(tmp_path: Path) -> None:
    """It depends on the machine and the node, and on nothing that changes."""
    root = machine(tmp_path / "root", machine_id="1234\n", boot="first")
    before = machine_tag(NODE, tmp_path / "home", root=root)
    machine(tmp_path / "root", boot="second")
    assert machine_tag(NODE, tmp_path / "home", root=root) == before
    assert machine_tag(OTHER, tmp_path / "home", root=root) != before
    assert "1234" not in before
    assert not (tmp_path / "home").exists()


@linux
def test_a_key_copied_to_another_machine_shows_another_tag(tmp_path: Path) -> None:
    """The whole directory may be copied: the machine id stays behind."""
    tags = {
        machine_tag(NODE, tmp_path, root=machine(tmp_path / "one", machine_id="1")),
        machine_tag(NODE, tmp_path, root=machine(tmp_path / "two", machine_id="2")),
        machine_tag(NODE, tmp_path, root=machine(tmp_path / "dbus", dbus_id="3")),
    }
    assert len(tags) == 3


@linux
def test_a_cloned_memory_card_in_another_board_shows_another_tag(tmp_path: Path) -> None:
    """The machine id was cloned with the card; the serial number belongs to the board."""
    one = machine(tmp_path / "one", machine_id="1", serial="100000003d1d\0")
    two = machine(tmp_path / "two", machine_id="1", serial="10000000a7b2\0")
    assert machine_tag(NODE, tmp_path, root=one) != machine_tag(NODE, tmp_path, root=two)


@linux
@pytest.mark.parametrize("content", ["", "uninitialized\n"])
def test_without_a_machine_id_a_random_one_is_kept(tmp_path: Path, content: str) -> None:
    """An image that was never booted says the same everywhere, so it does not count."""
    root = machine(tmp_path / "root", machine_id=content)
    tag = machine_tag(NODE, tmp_path / "home", root=root)
    assert machine_tag(NODE, tmp_path / "home", root=root) == tag
    assert machine_tag(NODE, tmp_path / "elsewhere", root=root) != tag


@linux
def test_a_boot_tag_changes_with_every_boot(tmp_path: Path) -> None:
    """Two machines with the same disk never have the same one at the same time."""
    first = boot_tag(NODE, root=machine(tmp_path, boot="first"))
    assert boot_tag(NODE, root=tmp_path) == first
    assert boot_tag(NODE, root=machine(tmp_path, boot="second")) != first
    assert boot_tag(NODE, root=tmp_path / "nowhere") == ""


def test_this_machine_has_tags(tmp_path: Path) -> None:
    """Whatever the system: 32 hexadecimal digits, the same for every process."""
    tag = machine_tag(NODE, tmp_path)
    assert len(tag) == 32
    assert int(tag, 16) >= 0
    script = (
        "import sys; from pathlib import Path; from potluck.identity.node import machine_tag;"
        "print(machine_tag(sys.argv[1], Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", script, NODE, str(tmp_path)]
    assert subprocess.check_output(command, text=True).strip() == tag


def test_a_process_is_one_incarnation_in_each_home(tmp_path: Path) -> None:
    """However often it is asked; a process that starts later has a higher number and a slot."""
    mine = this_process(NODE, tmp_path / "one")
    assert this_process(NODE, tmp_path / "one") == mine
    assert mine.machine == machine_tag(NODE, tmp_path / "one")
    assert mine.boot == boot_tag(NODE)
    other = claim_incarnation(tmp_path / "one")
    assert other.number > mine.incarnation
    assert other.slot != mine.slot
    other.release()
    assert this_process(NODE, tmp_path / "two").slot == 0


def test_a_process_may_claim_further_starts_and_give_them_back(tmp_path: Path) -> None:
    """Each is later than those before; its slot is free for the next one once it is released."""
    mine = this_process(NODE, tmp_path)
    first, claim = claim_process(NODE, tmp_path)
    assert (first.machine, first.boot) == (mine.machine, mine.boot)
    assert first.incarnation > mine.incarnation
    assert first.slot != mine.slot
    claim.release()
    second, claim = claim_process(NODE, tmp_path)
    assert second.slot == first.slot
    assert second.incarnation > first.incarnation
    claim.release()


def test_a_forked_child_is_another_process(tmp_path: Path) -> None:
    """It shares nothing with its parent that would let the two be taken for one."""
    mine = this_process(NODE, tmp_path)
    number, slot = in_child(lambda: this_process(NODE, tmp_path)[-1:-3:-1])
    assert number > mine.incarnation
    assert slot != mine.slot
