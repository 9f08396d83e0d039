"""Stories of whole clusters: forming, losing, pausing, healing, merging, leaving."""

from __future__ import annotations

import pytest

from potluck.core.cluster import ClusterConfig, ClusterCore, ClusterState
from potluck.core.cluster_cards import Role
from potluck.core.cluster_effects import Installed, Meet, Paused, Removed, Resumed
from potluck.core.cluster_messages import Propose
from potluck.core.election_events import ElectionConfig, ElectionRole
from support.cluster_net import ClusterNet, card


@pytest.mark.parametrize("letters", ["ab", "abc", "abcdefgh"])
def test_a_cold_start_ends_in_one_view_at_once(letters: str) -> None:
    """Whoever meets at the same time forms one view, within a fraction of a second."""
    net = ClusterNet()
    processes = [net.add(letter) for letter in reversed(letters)]
    net.mesh()
    net.run(0.2)
    assert net.agreed() == letters
    assert {net.view_of(process).epoch for process in processes} == {1}
    assert all(core.state is ClusterState.ACTIVE for core in net.cores.values())
    assert net.cores[processes[0]].leader == net.view_of(processes[0]).members[0]


def test_nothing_is_founded_below_the_number_asked_for() -> None:
    """With min_nodes=3 two wait and say so; the third completes them."""
    net = ClusterNet()
    config = ClusterConfig(min_nodes=3)
    first = net.add("a", config=config)
    net.add("b")
    net.mesh()
    net.run(3)
    assert net.cores[first].view is None
    assert "2 of at least 3" in net.cores[first].reason
    net.add("c")
    net.mesh()
    net.run(0.2)
    assert net.agreed() == "abc"


def test_a_later_process_is_let_in() -> None:
    """A newcomer gets the last rank, and nobody founds a second cluster."""
    net = ClusterNet()
    net.form("bc")
    net.add("a")
    net.mesh()
    net.run(0.3)
    assert net.agreed() == "bca"


def test_acquaintances_make_everybody_meet() -> None:
    """Who knows one address meets all: the others are introduced."""
    net = ClusterNet()
    a, b, c = (net.add(letter) for letter in "abc")
    net.link(a, b)
    net.run(0.05)
    net.link(a, c)
    net.run(0.5)
    assert net.agreed() == "abc"
    assert any(isinstance(effect, Meet) for _, _, effect in net.effects)


def test_a_killed_member_is_replaced_by_a_view_without_it() -> None:
    """All survivors abort at once and go on within milliseconds."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.kill(c)
    net.run(0.05)
    assert net.agreed() == "ab"
    assert [abort.lost for abort in net.aborts(a) + net.aborts(b)] == [c, c]
    assert "its port refuses connections" in net.cores[a].reason


def test_a_killed_leader_is_replaced_by_the_next_in_rank() -> None:
    """The second member is elected, in a term of its own, and leads the next view."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.kill(a)
    net.run(0.05)
    assert net.agreed() == "bc"
    assert net.cores[b].election.state.role is ElectionRole.LEADING
    assert net.cores[c].election.state.leader == b


def test_the_last_one_goes_on_when_all_others_crash() -> None:
    """Proofs of death leave a quorum of one."""
    net = ClusterNet()
    processes = net.form("abc")
    for victim in processes[:2]:
        net.kill(victim)
    net.run(0.1)
    assert net.agreed() == "c"
    for letter in "ab":
        net.add(letter, incarnation=2)
    net.mesh()
    net.run(0.5)
    assert net.agreed() == "cab"


def test_a_restart_proves_the_death_of_its_predecessor() -> None:
    """A later incarnation in the same slot is as good as a refused port, and comes in as new."""
    net = ClusterNet()
    a, _ = net.form("ab")
    net.dead.add(a)  # nobody notices: no lane is closed, nothing is refused
    net.add("a", incarnation=2)
    net.mesh()
    net.run(0.5)
    assert net.agreed() == "ba"


def test_silence_pauses_the_side_without_quorum_and_heals() -> None:
    """Of two cut apart, the first goes on after twice the pause; the other comes back as new."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.cut_off([a], [b])
    net.run(1.3)
    assert net.cores[a].state is ClusterState.ACTIVE
    assert net.cores[b].state is ClusterState.PAUSED
    assert "1 of 2 members" in net.cores[b].reason
    assert net.view_of(a).members == (a, b)  # nobody is excluded yet
    net.run(1.5)
    assert net.view_of(a).members == (a,)
    net.heal()
    net.run(1.5)
    assert net.agreed() == "ab"
    assert any(isinstance(e, Removed) for _, who, e in net.effects if who == b)


def test_a_short_cut_only_pauses() -> None:
    """Contact before anybody was excluded resumes the members of the view, in a fresh epoch."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.run(1.3)
    net.heal()
    net.run(1)
    assert net.agreed() == "abc"
    kinds = [type(e) for _, who, e in net.effects if who == c]
    assert kinds.index(Paused) < kinds.index(Resumed)
    assert Removed not in kinds


def test_a_minority_with_the_leader_pauses() -> None:
    """The majority elects, excludes and goes on; all end in one view."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    net.cut_off([a, b], [c, d, e])
    net.run(3)
    assert net.view_of(c).members == (c, d, e)
    assert {net.cores[p].state for p in (a, b)} == {ClusterState.PAUSED}
    net.heal()
    net.run(2)
    assert net.agreed() == "cdeab"


def test_a_stopped_leader_learns_that_it_was_removed() -> None:
    """It wakes up in a view that is over, and comes back by itself."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.stopped.add(a)
    net.run(3)
    assert net.view_of(b).members == (b, c)
    net.wake(a)
    net.run(1.5)
    assert net.agreed() == "bca"


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "c"), ("a", "c")])
def test_in_a_cut_triangle_two_go_on(one: str, other: str) -> None:
    """The largest mutually connected set stays; the third agrees, by way of a common friend."""
    net = ClusterNet()
    processes = dict(zip("abc", net.form("abc"), strict=True))
    net.cut_off([processes[one]], [processes[other]])
    net.run(4)
    states = [net.cores[process].state for process in processes.values()]
    assert sorted(state.value for state in states) == ["active", "active", "joining"]
    assert len({core.view for core in net.cores.values() if core.view}) == 1
    net.heal()
    net.run(2)
    assert sorted(net.agreed()) == ["a", "b", "c"]


def test_a_one_way_cut_is_a_cut() -> None:
    """Whoever is heard but hears nobody is excluded; it has paused itself."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut |= {(a, c), (b, c)}
    net.run(3)
    assert net.view_of(a).members == (a, b)
    assert net.cores[c].state is ClusterState.PAUSED


def test_a_reset_lane_brings_a_fresh_epoch_with_the_same_members() -> None:
    """What was aborted cannot go on in its epoch, though nobody is lost."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.sever(a, b)
    net.run(0.5)
    assert net.agreed() == "ab"
    assert net.view_of(a).epoch == 2
    assert net.cores[a].reason.endswith("broke and is back")


def test_a_goodbye_is_acted_upon_at_once() -> None:
    """A leader that leaves is replaced; whoever left does nothing more."""
    net = ClusterNet()
    a, b, _ = net.form("abc")
    net.do(a, net.cores[a].leave(net.now))
    assert net.cores[a].state is ClusterState.LEFT
    assert net.cores[a].next_deadline is None
    assert net.cores[a].tick(net.now) == []
    net.dead.add(a)
    net.run(0.05)
    assert net.agreed() == "bc"
    assert "said goodbye" in net.cores[b].reason


def test_a_process_without_a_view_leaves_too() -> None:
    """Its acquaintances are told, and do not look for it."""
    net = ClusterNet()
    a, b = net.add("a"), net.add("b")
    net.mesh()
    net.run(0.01)
    net.do(b, net.cores[b].leave(net.now))
    net.dead.add(b)
    net.run(3)
    assert net.agreed() == "a"
    assert net.cores[a].state is ClusterState.ACTIVE


def test_stepping_down_moves_the_leader_to_the_end() -> None:
    """The next member leads; only a leader of several can hand over."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.do(a, net.cores[a].step_down(net.now))
    net.run(0.05)
    assert net.agreed() == "bca"
    net.do(c, net.cores[c].step_down(net.now))
    net.run(0.05)
    assert net.agreed() == "bca"
    assert "only the first of several members" in net.told(c)
    assert "hands over" in net.told(a)


def test_without_being_asked_nobody_replaces_a_leader_where_that_is_off() -> None:
    """auto_elect_on_peer_loss=False waits for call_election()."""
    net = ClusterNet()
    config = ClusterConfig(election=ElectionConfig(auto_elect_on_peer_loss=False))
    a, b, _ = net.form("abc", config=config)
    net.kill(a)
    net.run(0.5)
    assert net.view_of(b).epoch == 1
    net.do(b, net.cores[b].call_election(net.now))
    net.run(0.05)
    assert net.agreed() == "bc"


def test_two_clusters_that_meet_become_one() -> None:
    """The one with fewer committed steps dissolves into the other."""
    net = ClusterNet()
    small = net.form("ab")
    large = [net.add(letter) for letter in "cde"]
    for one in large:
        for other in large:
            if one < other:
                net.link(one, other)
    net.run(0.5)
    for process in small:
        net.cores[process].samples = 7
    net.heal()
    net.run(2)
    assert net.agreed() == "abcde"
    lineage = net.view_of(small[0]).lineage
    assert all(v.lineage == lineage for v in [net.view_of(p) for p in large])
    assert "merges into" in net.told(large[0])


def test_with_any_quorum_a_minority_goes_on_as_a_new_lineage() -> None:
    """Both sides work; when they meet again they merge."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde", config=ClusterConfig(quorum="any"))
    before = net.view_of(a).lineage
    net.cut_off([a, b], [c, d, e])
    net.run(5)
    assert net.view_of(a).members == (a, b)
    assert net.view_of(a).lineage != before
    assert net.view_of(c).members == (c, d, e)
    assert net.view_of(c).lineage == before
    net.heal()
    net.run(4)
    assert sorted(net.agreed()) == list("abcde")


def test_an_orphan_goes_on_when_all_it_misses_have_ended() -> None:
    """Nobody can prove what the dead did meanwhile, so it is a new lineage."""
    net = ClusterNet()
    a, b = net.form("ab")
    before = net.view_of(a).lineage
    net.cut_off([a], [b])
    net.run(3)
    net.kill(a)
    net.cut.clear()
    net.run(6)
    assert net.agreed() == "b"
    assert net.view_of(b).lineage != before


def test_a_leader_cut_off_between_accept_and_commit_loses_nothing() -> None:
    """What a quorum has accepted is proposed again by the next leader."""
    net = ClusterNet()
    a, _, _, d = net.form("abcd")
    net.kill(d)
    cut: list[float] = []

    def once_accepted(sender: object, to: object, message: object) -> bool:
        if isinstance(message, Propose) and not cut:
            cut.append(net.now)
        return bool(cut) and sender == a and not isinstance(message, Propose)

    net.dropped = once_accepted
    net.run(0.01)
    net.kill(a)
    net.run(1)
    assert net.agreed() == "bc"
    assert all(len(views) == 1 for views in net.views().values())


def test_observers_look_on_and_are_never_members() -> None:
    """An observer learns the view; nobody counts it."""
    net = ClusterNet()
    a, _ = net.form("ab")
    watcher = net.add("z", role=Role.OBSERVER)
    net.mesh()
    net.run(1)
    core = net.cores[watcher]
    assert core.view is None
    assert core.state is ClusterState.JOINING
    assert set(core.observed.values()) == {net.view_of(a)}
    assert len(net.view_of(a).members) == 2
    net.add("c")
    net.mesh()
    net.run(0.5)
    assert [len(view.members) for view in core.observed.values()] == [3]


def test_different_schemas_do_not_mix() -> None:
    """A process with another shape of state is left alone, and leaves others alone."""
    net = ClusterNet()
    a, b = net.form("ab")
    other = net.add("c", schema="another")
    net.mesh()
    net.run(2)
    assert net.view_of(a).members == (a, b)
    assert net.view_of(other).members == (other,)


def test_a_clock_that_is_set_back_or_forward_excludes_nobody() -> None:
    """Deadlines move along; a core's own time never goes back."""
    core = ClusterCore(card("a"), ClusterConfig(solo_delay=0.5), now=100.0)
    core.tick(100.2)
    core.tick(40.0)
    assert core.view is None
    assert core.next_deadline is not None
    assert 40.0 <= core.next_deadline < 40.5
    effects = core.tick(40.4)
    assert any(isinstance(effect, Installed) for effect in effects)


def test_after_everything_only_one_successor_of_each_view_was_installed() -> None:
    """Kills in quick succession never lead to two views of one number."""
    net = ClusterNet()
    processes = net.form("abcdef")
    for victim, pause in zip(processes[:5], (0.002, 0.001, 0.004, 0.003, 0.0), strict=True):
        net.kill(victim)
        net.run(pause)
    net.run(5)
    assert net.agreed() == "f"
    assert all(len(views) == 1 for views in net.views().values())


def test_links_are_of_those_who_hear_each_other() -> None:
    """One bit for each of the others, in both rows or in none."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    contacts = net.cores[a]._situation.contacts
    assert contacts.links([a, b, c]) == [0b110, 0b101, 0b011]
    contacts.unhear(b, c)
    assert contacts.links([a, b, c]) == [0b110, 0b001, 0b001]
    contacts.unhear(c, a)
    assert contacts.links([c, b, a]) == [0b000, 0b100, 0b010]
