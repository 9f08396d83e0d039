"""Each mutant is caught by a seed that the core itself survives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from potluck._types import ProcessId
from potluck.membership import election, views
from potluck.membership import events as effects
from potluck.membership.core import FailureEvidence
from potluck.membership.election import AcceptorState, ElectionManager
from potluck.membership.health import HealthConfig
from potluck.membership.state import MembershipState
from potluck.membership.views import ViewInstaller, ViewProposer
from potluck.testing import mutants
from potluck.testing.mutants import MUTANTS, Mutant, first_seed, main, planted
from potluck.testing.process import Violation
from potluck.testing.scenario import Scenario, play
from potluck.testing.seeds import check_seed, check_seeds
from potluck.testing.trainer import SimulatedTrainer
from potluck.training import steps


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.name))
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    """By the seed that is known for it."""
    found = first_seed(mutant, [mutant.known_seed])
    assert found is not None
    assert found[1].startswith("Violation: ")


def test_a_mutant_is_taken_out_again() -> None:
    """What it replaced is what it was, also where something was inherited."""
    before = FailureEvidence.__dict__["_is_proof"]
    with planted(MUTANTS[3]):
        assert FailureEvidence.__dict__["_is_proof"] is not before
    assert FailureEvidence.__dict__["_is_proof"] is before

    class Heir(FailureEvidence):
        pass

    heir = Mutant("heir", "", lambda patch: patch.setattr(Heir, "_is_proof", None), 0)
    with planted(heir):
        assert Heir._is_proof is None
    assert "_is_proof" not in vars(Heir)


def test_the_command_names_seeds_and_survivors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails if one is not caught."""
    harmless = Mutant("harmless", "It changes nothing.", lambda _: None, 0)
    monkeypatch.setattr(mutants, "MUTANTS", (MUTANTS[0], harmless))
    seed = str(MUTANTS[0].known_seed)
    assert main(["--seeds", "1", "--first", seed]) == 1
    told = capsys.readouterr().out
    assert "founds alone (" in told
    assert f"caught by seed {seed}: Violation" in told
    assert "NOT caught by 1 seeds" in told


# --------------------------------------------------------------------------------------------------
# The seeds find what they are for: rules of the protocol are taken out, and each loss is noticed.
#
# But for the missing rule the core is the real one.

_has_quorum = election.has_quorum
_SCENARIOS = Path(__file__).parent.parent / "scenarios"


def _the_dead_vote(
    members: Sequence[ProcessId], present: Collection[ProcessId], gone: AbstractSet[ProcessId]
) -> bool:
    with_the_dead = set(present) | (set(members) & gone)
    return _has_quorum(members, present, gone) or 2 * len(with_the_dead) > len(members)


def let_the_dead_vote(patch: pytest.MonkeyPatch) -> None:
    """Count those proved dead as if they had agreed."""
    for module in (views, election, views):
        patch.setattr(module, "has_quorum", _the_dead_vote)


def forget_what_was_accepted(patch: pytest.MonkeyPatch) -> None:
    """A new leader proposes what it likes."""
    patch.setattr(ElectionManager, "inherited", property(lambda _: None))


def vote_for_everybody(patch: pytest.MonkeyPatch) -> None:
    """Give the vote of a term to whoever asks."""

    def vote(ballot: AcceptorState, candidate: ProcessId, term: int) -> bool:
        if term >= ballot.promised:
            ballot.promised, ballot.voted_for = term, candidate
        return term == ballot.promised

    patch.setattr(AcceptorState, "vote", vote)


def exclude_too_early(patch: pytest.MonkeyPatch) -> None:
    """Do not wait until who is silent has paused itself."""
    patch.setattr(HealthConfig, "dead_after", property(lambda config: 0.7 * config.pause_after))
    patch.setattr(
        MembershipState, "is_silent", lambda s, who: not s.health.status(who).is_operational
    )


def never_pause(patch: pytest.MonkeyPatch) -> None:
    """Go on without a quorum."""
    patch.setattr(ViewInstaller, "_pause", lambda *_: None)


def let_some_decide_for_all(patch: pytest.MonkeyPatch) -> None:
    """Do without a quorum: whoever is silent is left out by whoever notices."""
    for module in (views, election, views):
        patch.setattr(module, "has_quorum", lambda *_: True)


def count_the_silent_without_their_word(patch: pytest.MonkeyPatch) -> None:
    """Do not ask an acceptor whom we do not hear who is silent to it."""
    patch.setattr(ViewProposer, "_has_long_ended", lambda change, who: change._state.is_silent(who))


PLANTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    let_the_dead_vote: 0,
    forget_what_was_accepted: 0,
    vote_for_everybody: 25,  # the rarest: two campaign at once, and both reach somebody
    exclude_too_early: 0,
    never_pause: 0,
    let_some_decide_for_all: 0,
}
"""With the seed from which on stories are told, to find each soon."""

SEEDS = 150  # each was found within a hundred, most within twenty


@pytest.mark.parametrize("take_out", PLANTS, ids=lambda plant: str(plant.__name__))
def test_a_missing_rule_is_noticed(
    take_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some story breaks an invariant; with the rule in place it does not."""
    with monkeypatch.context() as patch:
        take_out(patch)
        seeds = range(PLANTS[take_out], PLANTS[take_out] + SEEDS)
        found = next((seed for seed in seeds if _breaks(seed)), None)
    assert found is not None
    assert check_seeds([found]).failures == []


def _breaks(seed: int) -> bool:
    try:
        check_seed(seed)
    except Violation:
        return True
    return False


_tells = SimulatedTrainer.tells


def _work_while_paused(trainer: SimulatedTrainer, effect: effects.Effect) -> None:
    if not isinstance(effect, effects.Paused):
        _tells(trainer, effect)


def _work_on_in_an_old_view(trainer: SimulatedTrainer, effect: effects.Effect) -> None:
    if not isinstance(effect, effects.Abort | effects.Removed):
        _tells(trainer, effect)


@pytest.mark.parametrize(
    ("name", "fault", "seed", "words"),
    [
        ("tells", _work_while_paused, 29, "applies a step although it is paused"),
        ("tells", _work_on_in_an_old_view, 22, "applies a step in no view"),
        ("_discarded_by", lambda *_: 0, 0, "tells its user that 0 steps are discarded"),
    ],
)
def test_a_trainer_that_breaks_a_rule_is_noticed(
    name: str,
    fault: Callable[..., object],
    seed: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rules are checked where a step is applied, whatever the core says of itself."""
    check_seed(seed)
    monkeypatch.setattr(SimulatedTrainer, name, fault)
    with pytest.raises(Violation, match=words):
        check_seed(seed)


def test_a_state_that_a_living_process_has_must_not_be_called_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that has it is cut off, and those who lack it have to wait."""
    text = (_SCENARIOS / "the_state_is_lost_with_its_only_holder.txt").read_text(encoding="utf-8")
    story = Scenario.parse(text.partition("kill b")[0] + "wait 6")
    play(story)
    monkeypatch.setattr(steps, "_missing", lambda *_: ())
    with pytest.raises(Violation, match=r"says in view .* that the state is lost, although {b/1}"):
        play(story)


def test_the_dead_must_not_vote_for_those_who_are_cut_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the vote of the third, whom both know to be dead, each of two would go on alone."""
    story = Scenario.parse(
        "nodes a b c\nwithin 3 expect a b c in one view\ncut a | b\nkill c\nwait 6"
    )
    play(story)
    let_the_dead_vote(monkeypatch)
    with pytest.raises(Violation):
        play(story)


def test_an_acceptor_whom_its_leader_does_not_hear_must_say_who_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be at work with those who are left out, until it has accepted and for a moment after.

    Stories drawn by lot have not shown it: it takes a message that goes by way of a third.
    """
    story = Scenario.load(_SCENARIOS / "an_acceptor_that_is_not_heard_hears_others.txt")
    play(story)
    count_the_silent_without_their_word(monkeypatch)
    with pytest.raises(Violation, match=r"at work in view .* excluded"):
        play(story)


def test_nobody_may_vote_for_two_who_run_for_one_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two who do not hear each other campaign when the leader dies; the others hear both."""
    stories = [
        Scenario.parse(
            f"seed {seed}\nnodes a b c d e\nwithin 3 expect all in one view\n"
            "delay 0.001 to 0.2\ncut b | c\nkill a\nwait 3\ncalm\nsettle"
        )
        for seed in range(12)
    ]
    _play_all(stories)
    vote_for_everybody(monkeypatch)
    with pytest.raises(Violation, match="votes twice in term"):
        _play_all(stories)


def _play_all(stories: list[Scenario]) -> None:
    for story in stories:
        play(story)
