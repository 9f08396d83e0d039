"""The demo's plot: nodes meet and train, one is killed, the others go on, it comes back.

The story only gives orders and listens; bytes between nodes never pass through here.
"""

from __future__ import annotations

from typing import Any

from potluck.apps.cli.demo_crew import Crew
from potluck.apps.cli.demo_messages import Committed, Finish, Happened, Leave, Meet
from potluck.apps.cli.demo_report import Agreed, Killed, Noticed, Report, Resumed, Returned, Run
from potluck.apps.cli.demo_scene import STORY, UNDISTURBED, Actor, words

__all__ = ["Story"]

BEFORE, AWAY, TOGETHER = 4, 16, 24
"""One of so many parts of all steps is made before somebody is killed, before it is started again,
so that one sees the others go on, and with it before the story may end; at least three steps."""

MEETING, NOTICING, AGREEING, LEAVING = 60.0, 15.0, 30.0, 10.0
"""Seconds for an act, on a machine that has much else to do."""

TRAINING = 3600.0
"""Seconds for acts that take as long as they take; --seconds ends them."""

NO_MULTICAST = (
    "Multicast DNS finds nobody here (`potluck doctor` looks for reasons), so the nodes are told "
    "each other's addresses, as with --peer."
)
NOT_ASKED = "Without multicast the nodes are told each other's addresses, as with --peer."


class Story:
    """Runs the demo once."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._scene = crew.scene
        self._settings = crew.settings

    def run(self) -> Report:
        """The whole plot."""
        crew, scene = self._crew, self._scene
        names = words([actor.name for actor in scene.actors])
        crew.say(f"{names} start, each in a process and with keys of its own.")
        meeting = self._meet()
        kill = self._settings.kill
        disturbance = {} if kill is None else self._disturb(self._ranked()[kill])
        crew.order(Finish())
        story = self._await_run(STORY)
        crew.say(f"The story ends after step {story.steps:,} with a loss of {story.loss:.4f}.")
        crew.say("The same once more, undisturbed and at full speed, to compare.")
        scene.run = UNDISTURBED
        plain = self._await_run(UNDISTURBED)
        crew.say(f"Undisturbed it ends with a loss of {plain.loss:.4f}.")
        self._leave()
        return Report(
            nodes=[actor.name for actor in scene.actors],
            seed=self._settings.seed,
            found_by=scene.found_by,
            meeting_seconds=meeting,
            **disturbance,
            story=story,
            undisturbed=plain,
            losses=scene.losses,
            averaged_bytes=max(actor.finished[STORY].averaged for actor in scene.actors),
            view=max(actor.progress.epoch for actor in scene.actors if actor.progress),
            events=scene.events,
            pids=crew.pids,
            seconds=scene.seconds,
        )

    def _disturb(self, victim: Actor) -> dict[str, Any]:
        """Kill somebody, see what the others do, and bring it back."""
        killed, killed_at = self._kill(victim)
        noticed = self._await_notice(victim, killed_at)
        agreed = self._await_agreement(killed_at)
        resumed = self._await_next_step(agreed, killed_at)
        self._await_step(self._survivors[0], resumed.step + self._part(AWAY), "go on")
        returned = self._bring_back(victim)
        return {
            "killed": killed,
            "noticed": noticed,
            "agreed": agreed,
            "resumed": resumed,
            "returned": returned,
        }

    # -- the acts ------------------------------------------------------------------------------

    def _meet(self) -> float:
        """Wait until all train; give them addresses if multicast leads nowhere."""
        crew, scene = self._crew, self._scene

        def trains(actor: Actor) -> bool:
            if not crew.addresses and all(each.unfound and each.place for each in scene.actors):
                places = [each.place for each in scene.actors if each.place]
                crew.addresses = [f"127.0.0.1:{place.port}" for place in places]
                crew.say(NO_MULTICAST if self._settings.multicast else NOT_ASKED)
                crew.order(Meet(crew.addresses))
            return actor.progress is not None

        crew.wait_for(scene.actors, trains, MEETING, "find the others")
        begun = [actor.begun for actor in scene.actors if actor.begun]
        seconds = max(each.at for each in begun) - scene.began
        scene.found_by = "addresses" if crew.addresses else "multicast DNS"
        ranked = words([actor.name for actor in self._ranked()])
        crew.say(
            f"They found each other by {scene.found_by} and agreed on view "
            f"{max(each.epoch for each in begun)} after {seconds:.1f} s: {ranked} train one model."
        )
        return seconds

    def _kill(self, victim: Actor) -> tuple[Killed, float]:
        self._await_step(victim, self._part(BEFORE), "train")
        assert victim.progress is not None
        step, rank, pid = victim.progress.step, victim.progress.rank, victim.process.pid
        now = self._crew.kill(victim)
        self._scene.marks.append((step, "✕"))
        self._crew.say(f"{victim.name} (pid {pid}) is killed at step {step:,}.", grave=True)
        return Killed(victim.name, rank, pid, step), now

    def _await_notice(self, victim: Actor, killed_at: float) -> list[Noticed]:
        gone = victim.place.process if victim.place else ""

        def notice(actor: Actor) -> Happened | None:
            """What it saw itself; or what the others told it first, by going on."""
            lost = actor.first("lost", lambda each: each.about == gone)
            return lost or actor.first("installed", lambda each: each.at > killed_at)

        self._crew.wait_for(self._survivors, notice, NOTICING, "notice the loss")
        noticed = [
            Noticed(actor.name, (told.at - killed_at) * 1000, told.sentence)
            for actor in self._survivors
            if (told := notice(actor))
        ]
        noticed.sort(key=lambda each: each.milliseconds)
        times = [f"{each.name} after {each.milliseconds:.1f} ms" for each in noticed]
        victim.reason = noticed[0].sentence
        self._crew.say(f"Noticed by {words(times)}: {noticed[0].sentence}.")
        return noticed

    def _await_agreement(self, killed_at: float) -> Agreed:
        def view(actor: Actor) -> Happened | None:
            return actor.first("installed", lambda each: each.at > killed_at)

        self._crew.wait_for(self._survivors, view, AGREEING, "agree on a view")
        last = max(filter(None, map(view, self._survivors)), key=lambda each: each.at)
        agreed = Agreed(last.epoch, (last.at - killed_at) * 1000, last.sentence)
        self._crew.say(f"Agreed after {agreed.milliseconds:.0f} ms on {agreed.sentence}.")
        return agreed

    def _await_next_step(self, agreed: Agreed, killed_at: float) -> Resumed:
        def commit(actor: Actor) -> Committed | None:
            return next((c for c in actor.committed if c.epoch >= agreed.epoch), None)

        self._crew.wait_for(self._survivors, commit, AGREEING, "go on")
        last = max(filter(None, map(commit, self._survivors)), key=lambda each: each.at)
        resumed = Resumed(last.step, (last.at - killed_at) * 1000)
        self._crew.say(
            f"Step {resumed.step:,} is committed by those who are left, "
            f"{resumed.milliseconds:.0f} ms after the kill."
        )
        return resumed

    def _bring_back(self, victim: Actor) -> Returned:
        crew = self._crew
        actor = crew.restart(victim)
        crew.say(f"{actor.name} is started again (pid {actor.process.pid}).")
        crew.wait_for([actor], lambda each: each.begun, MEETING, "come back")
        begun = actor.begun
        assert begun is not None
        back = Returned(
            name=actor.name,
            pid=actor.process.pid,
            epoch=begun.epoch,
            step=begun.step,
            seconds=begun.at - actor.started_at,
            state_bytes=begun.received,
            state_seconds=begun.syncing,
        )
        self._scene.marks.append((back.step, "↑"))
        crew.say(
            f"{back.name} is back, in view {back.epoch}: {back.state_bytes / 1e6:.1f} MB of state "
            f"came in {back.state_seconds:.2f} s; it goes on from step {back.step:,}."
        )
        self._await_step(actor, back.step + self._part(TOGETHER), "catch up")
        return back

    def _await_step(self, actor: Actor, step: int, what: str) -> None:
        def is_there(each: Actor) -> bool:
            return each.progress is not None and each.progress.step >= step

        self._crew.wait_for([actor], is_there, TRAINING, what)

    def _await_run(self, run: str) -> Run:
        actors = self._scene.actors
        self._crew.wait_for(actors, lambda each: run in each.finished, TRAINING, "finish")
        return Run.of({actor.name: actor.finished[run] for actor in actors})

    def _leave(self) -> None:
        self._crew.let_go()
        self._crew.order(Leave())
        ended = self._scene.actors
        self._crew.wait_for(ended, lambda actor: actor.process.ended, LEAVING, "leave")

    def _part(self, of: int) -> int:
        return max(3, self._settings.steps // of)

    # -- who -----------------------------------------------------------------------------------

    @property
    def _survivors(self) -> list[Actor]:
        return [actor for actor in self._scene.actors if actor.state != "killed"]

    def _ranked(self) -> list[Actor]:
        """In the order of ranks."""
        return sorted(
            self._scene.actors, key=lambda each: each.progress.rank if each.progress else -1
        )
