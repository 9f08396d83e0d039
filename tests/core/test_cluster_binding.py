"""A process belongs to its lineage: what it may enter, what it refuses, and how it is freed."""

from __future__ import annotations

import msgspec

from potluck.core.ancestry import MAX_BRANCHES, Branch
from potluck.core.cluster import ClusterConfig, ClusterState
from potluck.core.cluster_cards import mark
from potluck.core.cluster_effects import Probe, Send
from potluck.core.cluster_messages import (
    CauseCode,
    Charter,
    Commit,
    Departed,
    Found,
    Founded,
    Heartbeat,
    Phase,
    Proposal,
    Propose,
)
from potluck.vocabulary import ProcessId, View
from support.cluster_net import ClusterNet, card

OTHER = "0" * 32


def excluded(*, told: bool = True) -> tuple[ClusterNet, list[ProcessId]]:
    """Three of four have excluded the second; it has learned that, and is cut off again."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd", config=ClusterConfig(min_nodes=4))
    net.cut_off([b], [a, c, d])
    net.run(3)
    assert net.view_of(a).members == (a, c, d)
    if told:
        net.heal()
        net.run(0.1)
        assert net.cores[b].view is None
        net.cut_off([b], [a, c, d])
        for other in (a, c, d):
            net.sever(b, other)
    return net, [a, b, c, d]


def test_an_excluded_process_never_begins_alone() -> None:
    """Cut off, told of its exclusion in a short reconnection, cut off again for long."""
    net, (a, b, c, d) = excluded()
    net.run(60)
    core = net.cores[b]
    assert core.state is ClusterState.JOINING
    assert core.bound is not None
    assert core.bound.view == net.view_of(a)
    for name in "acd":
        assert f"{name} ({name * 8}/1)" in core.reason
    assert "To continue without them: potluck continue" in core.reason
    assert [each.who for each in core.missing(net.now)] == [a, c, d]
    assert min(each.silent_for for each in core.missing(net.now)) > 50
    net.heal()
    net.run(12)
    assert net.agreed() == "acdb"
    assert net.cores[b].missing(net.now) == ()


def test_it_probes_those_it_waits_for() -> None:
    """It keeps their cards, so it can learn that they have ended."""
    net, (a, b, c, d) = excluded()
    net.run(5)
    probed = {e.peer for when, who, e in net.effects if who == b and isinstance(e, Probe)}
    assert probed >= {a, c, d}
    last = net.view_of(a)
    for other in (a, c, d):
        net.kill(other)
    net.cut.clear()
    net.run(8)
    view = net.view_of(b)
    assert view.members == (b,)
    assert view.ancestry == (Branch(last.lineage, last.epoch),)
    bound = net.cores[b].bound
    assert bound is not None
    assert [cause.who for cause in bound.proposal.causes] == [a, c, d]
    for cause in bound.proposal.causes:
        assert cause.code is CauseCode.ENDED
        assert cause.reason.startswith("its process has ended (")
        assert "refuse" in cause.reason


def test_a_bound_process_refuses_other_foundings_and_views() -> None:
    """The founder may not know better: each process checks for itself."""
    net, (a, b, _, _) = excluded()
    net.run(5)
    core = net.cores[b]
    z = card("z")
    core.connected(z, net.now)
    proposal = Proposal((z.process, b))
    for charter in (Charter(), Charter(ancestry=(Branch("e" * 32, 9),))):
        effects = core.receive(z.process, Found(OTHER, proposal, charter), net.now)
        answers = [e.message for e in effects if isinstance(e, Send)]
        assert not any(isinstance(m, Founded) and m.is_agreed for m in answers)
        effects = core.receive(z.process, Commit(OTHER, 1, proposal, charter), net.now)
        assert core.view is None
        assert any(isinstance(e.message, Departed) for e in effects if isinstance(e, Send))
    assert core.bound is not None
    assert core.bound.lineage == net.view_of(a).lineage


def test_free_processes_do_not_count_it() -> None:
    """Two that are free, and a bound one: the two do not make three."""
    net, (a, b, c, d) = excluded()
    free = [net.add(letter, config=ClusterConfig(min_nodes=2)) for letter in "yz"]
    net.cut_off(free, [a, c, d])
    net.mesh()
    net.run(10)
    y = card("y").process
    assert net.cores[y].view is None  # it waits for the bound one, which it hears
    assert "cannot continue yet" in net.cores[y].reason
    assert net.cores[b].view is None


def test_a_person_may_free_it() -> None:
    """Then it continues as a child, which loses against the lineage itself."""
    net, (a, b, c, d) = excluded()
    net.run(5)
    net.cores[b].samples = 1000
    net.do(b, net.cores[b].continue_without_missing(net.now))
    net.run(2)
    assert net.agreed_by([b]) == "b"
    assert net.view_of(b).ancestry == (Branch(net.view_of(a).lineage, net.view_of(a).epoch),)
    before = net.view_of(a).lineage
    net.heal()
    net.run(6)
    assert sorted(net.agreed()) == list("abcd")
    assert {net.view_of(who).lineage for who in (a, b, c, d)} == {before}


def test_a_person_changes_nothing_while_it_works() -> None:
    """An active process has nothing to be freed from."""
    net = ClusterNet()
    a, _ = net.form("ab")
    view = net.view_of(a)
    net.do(a, net.cores[a].continue_without_missing(net.now))
    net.run(5)
    assert net.view_of(a) == view


def test_a_person_changes_nothing_for_a_process_that_belongs_nowhere() -> None:
    """It misses nobody: it waits until enough are here, as before."""
    net = ClusterNet()
    (a,) = net.form("a", config=ClusterConfig(min_nodes=2))
    net.do(a, net.cores[a].continue_without_missing(net.now))
    net.run(5)
    assert net.cores[a].state is ClusterState.JOINING
    b = net.add("b", config=ClusterConfig(min_nodes=2))
    net.mesh()
    net.run(2)
    assert net.agreed_by([a, b]) == "ab"
    assert not net.cores[a].is_insisting


def test_those_left_continue_together_and_others_follow() -> None:
    """A member that was away follows into the child that the others began."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.run(3)
    assert net.view_of(a).members == (a, b)
    net.cut_off([a], [b])
    net.run(3)
    net.kill(a)  # the second learns it only later, so it is no proof
    net.cut -= {(a, b), (b, a)}
    net.run(6)
    assert net.agreed_by([b]) == "b"
    child = net.view_of(b)
    assert child.ancestry
    net.heal()
    net.run(6)
    assert net.agreed() == "bc"
    assert net.view_of(c).lineage == child.lineage


def test_what_one_knows_of_the_dead_all_who_wait_learn() -> None:
    """Two wait; each knows the end of another member: together they can continue."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    net.cut_off([d, e], [a, b, c])
    for one in (d, e):
        for other in (a, b, c):
            net.sever(one, other)
    net.run(3)
    net.dead |= {a, b, c}
    net.cut.clear()
    net.cut_off([d], [b, c])
    net.cut_off([e], [a])
    net.run(10)
    assert net.agreed_by([d, e]) == "de"
    assert net.view_of(d).ancestry


def test_another_quorum_setting_is_refused_with_the_reason() -> None:
    """Both sides say which setting differs."""
    net = ClusterNet()
    a, _ = net.form("ab")
    z = net.add("z", config=ClusterConfig(quorum="any"))
    net.mesh()
    net.run(5)
    assert net.view_of(a).members == (a, card("b").process)
    assert net.cores[z].view is None
    words = "quorum='any', a (aaaaaaaa/1) with quorum='majority'"
    assert words in net.cores[z].reason
    assert "all processes of a job need the same setting" in net.told(a)


def hears_stranger(net: ClusterNet, process: ProcessId) -> ProcessId:
    """Connect a process with a stranger that hears it."""
    z = card("z")
    net.cores[process].connected(z, net.now)
    beat = Heartbeat(1, 1, 0.0, Phase.JOINING, (mark(process),))
    net.cores[process].receive(z.process, beat, net.now)
    return z.process


def answer_to(
    net: ClusterNet, process: ProcessId, sender: ProcessId, message: Found
) -> list[object]:
    """What a process answers to a founding: whether it agrees, and views that it tells of."""
    sent = [e for e in net.cores[process].receive(sender, message, net.now) if isinstance(e, Send)]
    return [e.message for e in sent if e.to == sender and isinstance(e.message, Founded | Commit)]


def test_a_bound_process_checks_every_rule_of_a_founding() -> None:
    """The same lineage, the newest view, nobody unaccounted for; a person may say otherwise."""
    net, (_, b, _, _) = excluded()
    net.run(5)
    z = hears_stranger(net, b)
    bound = net.cores[b].bound
    assert bound is not None

    def ask(lineage: str, epoch: int, *, is_forced: bool = False) -> list[object]:
        charter = Charter(ancestry=(Branch(lineage, epoch),))
        return answer_to(net, b, z, Found(OTHER, Proposal((z, b)), charter, is_forced))

    assert ask("e" * 32, bound.epoch) == [Founded(OTHER, False, "it belongs to another lineage")]
    old = Founded(OTHER, False, f"the newest view it knows is {bound.epoch}")
    assert ask(bound.lineage, bound.epoch - 1) == [bound, old]  # the founder learns what is newer
    assert ask(bound.lineage, bound.epoch + 1) == [old]
    (refused,) = ask(bound.lineage, bound.epoch)
    assert isinstance(refused, Founded)
    assert not refused.is_agreed
    assert refused.reason.startswith("it does not know what became of a (aaaaaaaa/1)")
    assert ask(bound.lineage, bound.epoch, is_forced=True) == [Founded(OTHER, True, "")]


def test_a_process_at_work_or_with_a_quorum_founds_no_child() -> None:
    """Its view decides, and nothing may begin beside it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    view = net.view_of(c)
    charter = Charter(ancestry=(Branch(view.lineage, view.epoch),))
    child = Found(OTHER, Proposal((a, b, c)), charter)
    why = "it is at work, or was until a moment ago"
    assert answer_to(net, c, a, child) == [Founded(OTHER, False, why)]
    leave_out = Propose(view.lineage, view.epoch, 0, Proposal((a, b), "without c"))
    net.cores[c].receive(a, leave_out, net.now)
    assert net.cores[c].state is ClusterState.PAUSED
    why = "the view it is in has a quorum"
    assert answer_to(net, c, a, child) == [Founded(OTHER, False, why)]


def test_the_origin_of_a_checkpoint_is_kept_within_bounds() -> None:
    """Of a long one the newest branches."""
    net = ClusterNet()
    (a,) = net.form("a")
    core = net.cores[a]
    core.origin = tuple(Branch(f"{number:032}", number) for number in range(40))
    assert [branch.epoch for branch in core.origin] == list(range(40 - MAX_BRANCHES, 40))


def test_a_last_word_in_its_lineage_frees_it_from_its_sender_and_no_other_word_does() -> None:
    """A process that works in another lineage is not to be waited for in this one."""
    net, (a, b, c, d) = excluded()
    net.run(5)
    core = net.cores[b]
    assert core.bound is not None
    for who in (a, c, d):
        core.connected(net.cores[who].me, net.now)

    word = Departed(core.bound.lineage, core.bound.epoch, 0, -1, None, "elsewhere")
    for other in (
        msgspec.structs.replace(word, lineage=OTHER),
        msgspec.structs.replace(word, epoch=word.epoch - 1),
    ):
        core.receive(a, other, net.now)
        assert a not in core._situation.departed
    core.receive(a, word, net.now)
    assert core._situation.departed == {a}


def paused() -> tuple[ClusterNet, ProcessId, View]:
    """A member that has been cut off from the two others for long; with its view."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    for other in (a, b):
        net.sever(c, other)
    net.run(5)
    assert net.cores[c].state is ClusterState.PAUSED
    return net, c, net.view_of(c)


def test_a_paused_member_leaves_for_a_child_of_its_lineage_that_is_at_work() -> None:
    """It cannot decide any more in its view, and waits for the child to let it in."""
    net, c, view = paused()
    z = hears_stranger(net, c)
    charter = Charter(ancestry=(Branch(view.lineage, view.epoch),))
    core = net.cores[c]
    facts = {"phase": Phase.ACTIVE, "epoch": 2, "size": 1, "leader": z}
    beat = Heartbeat(2, 1, 0.0, hears=(mark(c),), lineage=OTHER, **facts)  # type: ignore[arg-type]
    core.receive(z, beat, net.now)
    assert core.view == view  # it does not know where that lineage comes from
    core.receive(z, Commit(OTHER, 2, Proposal((z,)), charter), net.now)
    core.receive(z, msgspec.structs.replace(beat, sequence=3), net.now)
    assert core.view is None
    assert core.state is ClusterState.JOINING
    assert "to let us into a cluster of 1" in core.reason
    assert core.bound is not None
    assert core.bound.lineage == view.lineage


def test_nothing_is_begun_while_a_fellow_knows_a_later_view() -> None:
    """What it knows decides who has to be accounted for."""
    net, c, view = paused()
    z = hears_stranger(net, c)
    core = net.cores[c]
    facts = {"bound": view.lineage, "bound_epoch": view.epoch + 1}
    net.do(c, core.tick(net.now + 0.5))
    echo = core._situation.contacts.sequence
    beat = Heartbeat(2, echo, 0.0, Phase.JOINING, (mark(c),), **facts)  # type: ignore[arg-type]
    net.now += 0.5
    core.receive(z, beat, net.now)
    assert core.reason == f"waiting to learn of a later view than {view.epoch}"
    net.do(c, core.continue_without_missing(net.now))
    net.run(0.1)
    assert core.view == view
