"""Members as people and machines meet them: commands, several processes, copied keys."""

from pathlib import Path
from unittest import mock

import psutil
import pytest

from potluck.identity import node
from support.command import potluck
from support.group_machines import gather, leave, meet, meet_soon, start_all, start_on, stay
from support.homes import Home, pair
from support.place import Place
from support.ranks import Rank, Ranks, new_master
from support.threads import eventually


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """The machine that founds the group."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """A machine that the desk brings in."""
    return Home(tmp_path, "laptop")


@pytest.fixture
def nas(tmp_path: Path) -> Home:
    """A third one."""
    return Home(tmp_path, "nas")


# --- commands ---


def command(home: Home, *arguments: str) -> str:
    """Run the command on a machine; what it says."""
    result = potluck(*arguments, variables={"POTLUCK_HOME": str(home.path)})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_commands_agree_with_a_member_that_runs(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home
) -> None:
    """With --host nothing but a running program of one member is needed to take a machine out."""
    pair(desk, laptop)
    pair(desk, nas)
    gather(ranks, desk, laptop, nas)
    master = new_master()
    started = start_on(ranks, stay, [desk, laptop], master)
    for process in started:
        process.expect("joined")
    said = command(desk, "revoke", "laptop", "--yes")
    assert "the same command on each of them signs" in said
    said = command(nas, "members", "--host", master)
    assert "Revoking laptop needs one more signature" in said
    assert f"To agree, on this machine: potluck revoke {laptop.me.node_id[:8]}" in said
    said = command(nas, "revoke", "laptop", "--yes", "--host", master)
    assert '"home" has a new secret on this machine.' in said
    assert desk.namespace() == nas.namespace()
    assert desk.members() == nas.members() == ["desk", "nas"]
    leave(started)


def test_a_change_is_in_force_before_its_secret_has_arrived(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home
) -> None:
    """The second signature counts at once; the secret comes from the machine that proposed."""
    pair(desk, laptop)
    pair(desk, nas)
    gather(ranks, desk, laptop, nas)
    command(desk, "rotate", "--yes")
    gather(ranks, desk, laptop, nas)
    said = command(nas, "rotate", "--yes")
    assert "enough machines have agreed" in said
    gather(ranks, nas, laptop)
    gather(ranks, laptop, desk)
    assert laptop.namespace() == desk.namespace()
    gather(ranks, laptop, desk, nas)
    assert nas.namespace() == desk.namespace()
    assert desk.membership().roster.generation.number == 1


def test_who_is_taken_out_while_it_waits_is_turned_away(
    ranks: Ranks, desk: Home, laptop: Home, nas: Home, tmp_path: Path
) -> None:
    """Rank 0 learns of it from the last one who comes; the group waits for somebody else."""
    tablet = Home(tmp_path, "tablet")
    for guest in (laptop, nas, tablet):
        pair(desk, guest)
    gather(ranks, desk, laptop, nas, tablet)
    for home in (desk, tablet):
        tablet.join_records_of(desk)
        command(home, "revoke", "laptop", "--yes")
    desk.join_records_of(tablet)
    assert desk.membership().has_secret
    master = new_master()
    zero, one = start_all(ranks, [(meet, nas), (meet, laptop)], master, size=3)
    eventually(lambda: is_connected(one, master))
    (two,) = start_all(ranks, [(meet, desk)], master, 2, size=3)
    assert "laptop was revoked by desk" in one.failure()["text"]
    (other,) = start_all(ranks, [(meet, desk)], master, 1, size=3)
    assert [process.value() for process in (zero, other, two)] == [3, 3, 3]


def is_connected(process: Rank, master: str) -> bool:
    """Whether a process has reached rank 0."""
    port = int(master.rpartition(":")[2])
    connections = psutil.Process(process.pid).net_connections("tcp")
    return any(entry.raddr and entry.raddr[1] == port for entry in connections)


# --- processes and machines ---


def test_several_processes_of_one_machine_need_no_configuration(
    ranks: Ranks, desk: Home, laptop: Home
) -> None:
    """Two on the desk, two on the laptop; each has an incarnation of its own."""
    pair(desk, laptop)
    gather(ranks, desk, desk, laptop, laptop)


def test_a_private_namespace_is_unused_until_another_machine_is_met(
    ranks: Ranks, desk: Home, laptop: Home
) -> None:
    """Processes of one machine alone do not count: pairing may still replace it."""
    gather(ranks, desk, desk)
    assert desk.namespace().is_unused
    pair(laptop, desk)
    assert desk.members() == ["desk", "laptop"]
    assert not desk.namespace().is_unused


def on_another_machine(place: Place, home: str) -> int:
    """Take part as a copy of the home directory on a machine of its own would."""
    with mock.patch.object(node, "_machine_facts", return_value=[b"another"]):
        node._known.clear()
        try:
            return meet_soon(place, home)
        finally:
            node._known.clear()


def test_a_key_that_was_copied_to_another_machine_is_named(ranks: Ranks, desk: Home) -> None:
    """Both errors name the key, and what to do; whichever side the copy is on."""
    for programs in ((meet_soon, on_another_machine), (on_another_machine, meet_soon)):
        for process in start_all(ranks, [(program, desk) for program in programs]):
            text = process.failure()["text"]
            assert f"the node key {desk.me.node_id} is used on two machines" in text
            assert "delete the file node_keypair on one of the two" in text


def test_two_copies_of_a_key_are_found_by_rank_0(ranks: Ranks, desk: Home, laptop: Home) -> None:
    """Neither of the two is rank 0, and the first of them keeps its place."""
    pair(desk, laptop)
    started = start_all(
        ranks, [(meet_soon, desk), (meet_soon, laptop), (on_another_machine, laptop)]
    )
    zero, *others = [process.failure()["text"] for process in started]
    named = f"the node key {laptop.me.node_id} is used on two machines"
    assert named in zero
    assert any(named in text for text in others)
