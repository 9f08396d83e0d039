"""A paired machine that sends what is not valid is named and removed; the others train on."""

from __future__ import annotations

import logging
import resource
from typing import Any

import pytest

import potluck
from support.clusters import OPTIONS, new_job
from support.elastic_programs import Crew, Stoppable, check
from support.hostile_members import CALLS, FALSE_ALARM, LAYOUTS, MUTATIONS, RECORDS, Saboteur, rest
from support.place import Place
from support.ranks import Rank, Ranks
from support.threads import PATIENCE, eventually

pytestmark = pytest.mark.slow

MEMORY = 96 << 20  # bytes that an honest member may use more because of a hostile one


class Told(logging.Handler):
    """Keeps why views ended, as the trainer says it."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[potluck.DistributedError] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note the error."""
        for each in record.args if isinstance(record.args, tuple) else ():
            if isinstance(each, potluck.PeerLost):
                self.errors.append(each)


def honest(place: Place, job: str, min_nodes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train until the test says "stop", and say what was learnt of members that were removed."""
    told = Told()
    logger = logging.getLogger("potluck.training.elastic")
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    try:
        with potluck.join(min_nodes, job=job, timeout=PATIENCE, **OPTIONS) as cluster:
            run = Stoppable(cluster, **{"seed": place.rank, **options})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            run.trainer.start()
            place.say("begun", step=run.trainer.step_count, size=cluster.world_size)
            while not run.is_over:
                run.wants_to_stop = run.wants_to_stop or place.next_word() == "stop"
                place.say("step", **run.facts_of(run.step()))
                for error in told.errors:
                    text, about = str(error), error.rank
                    place.say("removed", text=text, about=about, host=error.host)
                told.errors.clear()
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
            return {**run.result(), "peak": peak}
    finally:
        logger.removeHandler(told)


def hostile(
    place: Place, job: str, min_nodes: int, deed: tuple[str, str, int], options: dict[str, Any]
) -> None:
    """Train as the others do, until it is time to send something else; the test ends it."""
    kind, how, seed = deed
    with potluck.join(min_nodes, job=job, timeout=PATIENCE, **OPTIONS) as cluster:
        run = Stoppable(cluster, **{"seed": place.rank, **options})
        waits = kind in {"layout", "chunk"}

        def is_due() -> bool:
            nonlocal waits
            waits = waits and place.next_word() != "now"
            return not waits

        Saboteur(kind, how, seed, is_due)
        try:
            run.trainer.start()
            place.say("begun")
            while True:
                run.step()
        except Exception:  # noqa: BLE001 - it does not leave, whatever it makes of its own message
            rest()


class Town(Crew):
    """Honest members and hostile guests."""

    def admit(self, count: int, min_nodes: int, **options: Any) -> list[Rank]:
        """Honest members."""
        started = []
        for _ in range(count):
            member = self._ranks.take()
            member.begin(honest, self._count, count, "", self._job, min_nodes, options)
            self._count += 1
            started.append(member)
        return started

    def invite(self, min_nodes: int, deed: tuple[str, str, int], **options: Any) -> Rank:
        """A hostile one."""
        guest = self._ranks.take(fresh=True)
        guest.begin(hostile, self._count, 1, "", self._job, min_nodes, list(deed), options)
        self._count += 1
        return guest

    def removals(self, members: list[Rank]) -> list[dict[str, Any]]:
        """What each honest member learns when another one is removed.

        All are listened to at the same time: one whose words are not read stops.
        """
        found: dict[Rank, dict[str, Any]] = {}

        def listen() -> bool:
            for member in members:
                while member.has_news():
                    said = self._note(member, member.hear_any())
                    if said["word"] == "removed":
                        found[member] = said
            return len(found) == len(members)

        eventually(listen)
        return [found[member] for member in members]


def check_removal(town: Town, members: list[Rank], size: int, kind: str) -> None:
    """All honest members get the same error, which names the culprit, and train on."""
    removals = town.removals(members)
    texts = {each["text"] for each in removals}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert " was removed: " in text, (kind, text)
    assert f"Rank {removals[0]['about']} " in text
    assert all(each["host"] for each in removals)
    for member in members:
        town.follow(member, size, steps=2)


def visit(ranks: Ranks, deeds: list[tuple[str, str, int]]) -> None:
    """Hostile guests come one after the other to a training of three."""
    town = Town(ranks, new_job())
    members = town.admit(3, 3, verify_every=2)
    for member in members:
        town.follow(member, 3)
    for kind, how, seed in deeds:
        # At least two: alone it would begin a training of its own, if it hears the others late.
        guest = town.invite(2, (kind, how, seed), verify_every=2)
        check_removal(town, members, 3, f"{kind}: {how}")
        guest.kill()
    finish(town, members)


def finish(town: Town, members: list[Rank]) -> None:
    """All end with the same state, every sample counted once, and little memory was used."""
    results = town.finish(members)
    check(town, results)
    assert max(each["peak"] for each in results) < MEMORY


SENT_BY_GUESTS = [
    (kind, how, seed)
    for seed, (kind, how) in enumerate(
        [(kind, how) for kind in ("report", "hash", "wishes", "condition") for how in MUTATIONS]
        + [("record", how) for how in RECORDS]
    )
]

PARTS = 10  # each a training of its own: views that follow each other quickly are put off

FEW = [SENT_BY_GUESTS[place] for place in (5, 46)]


def test_a_guest_that_sends_what_is_not_valid_is_named_and_removed(ranks: Ranks) -> None:
    """A report and a part in a step: the three who trained before train on, with the same bits."""
    visit(ranks, FEW)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_message_in_every_wrong_form(ranks: Ranks, part: int) -> None:
    """All kinds of messages that a guest sends, each changed in every way."""
    visit(ranks, SENT_BY_GUESTS[part::PARTS])


@pytest.mark.parametrize("how", ["a barrier", "a longer record", FALSE_ALARM])
def test_a_guest_that_makes_another_call_is_named_and_removed(ranks: Ranks, how: str) -> None:
    """Most members agree on what is due: the one that does not is removed, the others train on."""
    visit(ranks, [("call", how, 0)])


@pytest.mark.parametrize("how", ["other parts", "the last step"])
def test_a_guest_whose_state_is_of_no_use_is_named_and_removed(ranks: Ranks, how: str) -> None:
    """It claims to be ahead of all; the others have their own state, and train on."""
    visit(ranks, [("state", how, 0)])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_other_call(ranks: Ranks) -> None:
    """The same for all of them, one after the other in one training."""
    visit(ranks, [("call", how, 0) for how in CALLS])


def serve(ranks: Ranks, kind: str, how: str) -> None:
    """The first member, which has the state, turns hostile when a newcomer needs it."""
    town = Town(ranks, new_job())
    ballast = {"ballast": 1 << 18}  # 2 MiB: several chunks, from several servers
    first = town.invite(1, (kind, how, 3), **ballast)
    first.expect("begun")
    members = town.admit(2, 3, **ballast)  # three: they must not begin a training without it
    for member in members:
        town.follow(member, 3, steps=4)
    first.tell("now")
    members += town.admit(1, 2, **ballast)
    check_removal(town, members, 3, f"{kind}: {how}")
    first.kill()
    results = town.finish(members)
    assert len({each["print"] for each in results}) == 1
    assert not [prints for prints in town.prints.values() if len(prints) > 1]
    assert max(each["peak"] for each in results) < MEMORY


def test_a_server_whose_layout_is_not_valid_is_removed(ranks: Ranks) -> None:
    """The newcomer gets the state from the others, and allocates nothing for what was claimed."""
    serve(ranks, "layout", "an integer as shape")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [*LAYOUTS, *MUTATIONS])
def test_every_wrong_form_of_a_layout(ranks: Ranks, how: str) -> None:
    """The same for all of them."""
    serve(ranks, "layout", how)


def test_a_server_that_sends_other_bytes_than_it_announced_is_removed(ranks: Ranks) -> None:
    """Only the receiver can see that; the others believe it, and remove the server as well."""
    serve(ranks, "chunk", "")
