"""Whom a leader proposes: who stays, in which order, who comes in, and when it waits."""

from __future__ import annotations

import msgspec

from potluck.core.cluster_cards import mark
from potluck.core.cluster_effects import Installed, Removed
from potluck.core.cluster_messages import Cause, CauseCode, Commit, Heartbeat
from potluck.vocabulary import ProcessId
from support.cluster_net import ClusterNet


def last_beat(net: ClusterNet, me: ProcessId, of: ProcessId) -> Heartbeat:
    """The newest heartbeat of one process at another."""
    beat = net.cores[me]._situation.contacts.of(of).beat
    assert beat is not None
    return beat


def test_nothing_is_proposed_while_nothing_changes() -> None:
    """A healthy view stays as it is."""
    net = ClusterNet()
    a, _ = net.form("ab")
    planner = net.cores[a]._planner
    assert planner.plan(net.view_of(a), must_change=False) is None
    assert planner.next_look is None


def test_a_fresh_start_keeps_members_and_order() -> None:
    """What was aborted goes on with the same members in a new epoch."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    plan = net.cores[a]._planner.plan(net.view_of(a), must_change=True)
    assert plan is not None
    assert plan.members == (a, b, c)
    assert plan.reason == "a fresh start with the same members"


def test_after_a_loss_nobody_is_counted_on_who_was_not_heard_since() -> None:
    """It may stand still: what is proposed now would wait for it, and nothing else could be."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, succession = net.cores[a], net.cores[a]._succession
    core.disconnected(c, "it crashed", net.now)
    core.ended(c, "its port refuses connections", net.now)
    core.tick(net.now + 0.1)
    assert c in core._situation.proofs
    assert not succession.is_busy
    beat = msgspec.structs.replace(last_beat(net, a, b), sequence=1000, aborted=True)
    core.receive(b, beat, net.now + 0.15)
    assert succession.is_busy


def test_a_newcomer_waits_while_a_member_is_late() -> None:
    """By less than makes it suspect: it is heard again in a moment, or missed."""
    net = ClusterNet()
    a, b = net.form("ab")
    planner, situation = net.cores[a]._planner, net.cores[a]._situation
    silence = situation.health.silence(b, situation.now)
    assert planner._is_fresh(b)
    situation.now += 2 * situation.interval - silence
    assert not planner._is_fresh(b)
    assert situation.contacts.is_heard(b)


def test_newcomers_follow_in_the_order_of_their_ids() -> None:
    """Several that are ready come in together, whoever came first."""
    net = ClusterNet()
    net.form("b")
    net.run(1)
    for letter in "dca":
        net.add(letter)
    net.mesh()
    net.run(0.5)
    assert net.agreed() == "bacd"
    assert {view.epoch for views in net.views().values() for view in views} == {1, 2}


def test_a_newcomer_that_not_all_hear_waits_and_people_know_whom_it_lacks() -> None:
    """Until the missing link is there."""
    net = ClusterNet()
    a, b = net.form("ab")
    c = net.add("c")
    net.cut_off([b], [c])
    net.mesh()
    net.run(1)
    assert net.view_of(a).members == (a, b)
    assert "c (cccccccc/1) cannot come in yet: it and b (bbbbbbbb/1)" in net.told(a)
    net.heal()
    net.run(0.5)
    assert net.agreed() == "abc"


def test_a_short_gap_between_two_members_is_waited_for() -> None:
    """Nobody is excluded for a link that is missing for less than the pause."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([b], [c])
    net.sever(b, c)
    net.run(0.5)
    assert net.view_of(a).epoch == 1
    assert "until all members hear each other again" in net.told(a)
    net.heal()
    net.run(0.5)
    assert net.agreed() == "abc"
    assert net.view_of(a).epoch == 2


def test_a_leader_does_not_propose_a_stranger_s_view() -> None:
    """One other member that does not hear us is no cluster without us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    situation = core._situation
    for step in range(1, 16):
        now = net.now + 0.1 * step
        core.tick(now)
        contact = situation.contacts.of(a)
        deaf = msgspec.structs.replace(
            last_beat(net, b, a),
            sequence=contact.newest + 1,
            echo=situation.contacts.sequence,
            hears=(),
        )
        core.receive(a, deaf, now)
        assert core._planner.plan(net.view_of(b), must_change=True) is None
    assert mark(b) not in situation.contacts.of(a).hears


# --- causes ---


def commits_of(net: ClusterNet, process: ProcessId) -> tuple[Commit, ...]:
    """What the last view that a process entered was told to follow from."""
    installed = [e for _, who, e in net.effects if who == process and isinstance(e, Installed)]
    return installed[-1].commits


def causes_of(net: ClusterNet, process: ProcessId) -> dict[ProcessId, Cause]:
    """Why members are not in that view."""
    (commit,) = commits_of(net, process)
    return {cause.who: cause for cause in commit.proposal.causes}


def test_a_killed_member_has_ended() -> None:
    """Name, address and what proved it travel in the commit, the same for all."""
    net = ClusterNet()
    a, b, c = net.form("abc", hosts=("10.0.0.7",))
    net.kill(c)
    net.run(0.5)
    (cause,) = causes_of(net, a).values()
    assert (cause.who, cause.code, cause.name, cause.host) == (c, CauseCode.ENDED, "c", "10.0.0.7")
    assert "refuses" in cause.reason
    assert commits_of(net, a) == commits_of(net, b)


def test_a_member_whose_script_ended_has_left() -> None:
    """So that what was under way may be finished."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.do(c, net.cores[c].leave(net.now))
    net.dead.add(c)
    net.run(0.5)
    assert causes_of(net, a)[c].code is CauseCode.LEFT


def test_a_member_that_stands_still_is_silent() -> None:
    """The proposer says for how long."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.stopped.add(c)
    net.run(4)
    cause = causes_of(net, a)[c]
    assert cause.code is CauseCode.SILENT
    assert cause.silent_for >= 1
    assert net.cores[a].missing(net.now) == ()


def test_one_of_two_that_do_not_hear_each_other_is_unreachable_and_told_so() -> None:
    """It lives: the commit that leaves it out says with whom it has no contact."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([b], [c])
    net.sever(b, c)
    net.run(4)
    (out,) = {b, c} - set(net.view_of(a).members)
    cause = causes_of(net, a)[out]
    assert cause.code is CauseCode.UNREACHABLE
    assert "do not hear each other" in cause.reason
    (removed,) = [e for _, who, e in net.effects if who == out and isinstance(e, Removed)][:1]
    assert removed.commit == commits_of(net, a)[0]


def test_many_causes_are_told_in_short() -> None:
    """A message holds them all."""
    net = ClusterNet()
    members = net.form("abcdefghijklmnopqrst")
    net.run(3)  # a large group takes longer to form
    for victim in members[3:]:
        net.kill(victim)
    net.run(2)
    (commit,) = [each for each in commits_of(net, members[0]) if each.proposal.causes][:1]
    assert len(commit.proposal.causes) > 16
    assert all(cause.name and not cause.reason for cause in commit.proposal.causes)


def test_members_out_of_contact_are_known_before_a_view_leaves_them_out() -> None:
    """For whoever waits in vain."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([a], [b, c])
    net.run(1.5)
    assert {cause.who for cause in net.cores[a].missing(net.now)} == {b, c}
    newcomer = net.add("z")
    assert net.cores[newcomer].missing(net.now) == ()


def test_a_process_that_missed_views_is_told_the_one_right_after_its_own() -> None:
    """And then the newest, once it is back."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.run(4)
    assert net.view_of(a).epoch == 2
    for letter in "de":
        net.add(letter)
        for process in net.alive():
            if process != c:
                for other in net.alive():
                    if other not in {c, process}:
                        net.link(process, other)
        net.run(1)
    assert net.view_of(a).epoch > 2
    net.heal()
    net.run(3)
    (removed,) = [e for _, who, e in net.effects if who == c and isinstance(e, Removed)]
    assert removed.commit is not None
    assert removed.commit.epoch == 2
    assert removed.commit.proposal.causes[0].who == c


def test_the_reason_names_both_ends_of_a_broken_connection() -> None:
    """As the first to stop has reported it, whoever that was."""
    for letter, words in (("c", "between b (bbbbbbbb/1) and c (cccccccc/1)"), ("b", "to b (")):
        net = ClusterNet()
        a, b, c = net.form("abc")
        lost = {"b": b, "c": c}[letter]
        beat = last_beat(net, a, b)
        said = msgspec.structs.replace(beat, sequence=1000, aborted=True, lost=lost)
        net.cores[a].receive(b, said, net.now)
        heard = msgspec.structs.replace(last_beat(net, a, c), sequence=1000)
        net.cores[a].receive(c, heard, net.now)
        plan = net.cores[a]._planner.plan(net.view_of(a), must_change=True)
        assert plan is not None
        assert plan.members == (a, b, c)
        assert plan.reason.startswith(f"the connection {words}")
        assert plan.reason.endswith("broke and is back")
