"""The machine on which a code is typed: what its owner sees and is asked."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from potluck.apps.cli.circle import (
    CannotAsk,
    can_ask,
    describe,
    facts_of,
    print_json,
    this_machine,
)
from potluck.core.cards import Signer
from potluck.core.pairing import Offered, Paired, PairingCode, parse_code
from potluck.net.addresses import Address, parse_address
from potluck.net.pairing import PAIRING_PORT
from potluck.net.pairing_discovery import PairingDiscovery
from potluck.net.private_files import potluck_home
from potluck.runtime.adoption import Adopter, Plan
from potluck.runtime.pairing_guest import Application

__all__ = ["Wishes", "join"]


@dataclass(frozen=True)
class Wishes:
    """What the options say."""

    host: str | None
    namespace: str | None
    leave: bool
    """Leave the namespace this machine is in, without asking."""
    keep: bool
    """Stay in it, and join beside it."""
    json: bool


def join(text: str, wishes: Wishes) -> None:
    """Type a code: find the machine that shows it, and join."""
    code, where = parse_code(text), _where(wishes.host)
    me = this_machine()
    guest = _Guest(me, Adopter(potluck_home(), me, wishes.namespace), wishes)
    guest.require_answers()
    outcome = _apply(code, where, guest)
    guest.finish(outcome)


def _where(host: str | None) -> Address | None:
    try:
        return parse_address(host, PAIRING_PORT) if host else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host") from None


def _apply(code: PairingCode, where: Address | None, guest: _Guest) -> Paired:
    application = Application(code, guest.me, guest.decide, tell=guest.tell)
    if where is not None:
        return application.at([where])
    with PairingDiscovery() as discovery:
        return application.search(discovery)


class _Guest:
    def __init__(self, me: Signer, adopter: Adopter, wishes: Wishes) -> None:
        self.me = me
        self._adopter = adopter
        self._wishes = wishes
        self._plan: Plan | None = None

    def require_answers(self) -> None:
        """A code is used up by asking what nobody can answer, so that is found out first."""
        wishes = self._wishes
        is_decided = wishes.leave or wishes.keep
        if self._adopter.may_ask and not is_decided and (wishes.json or not can_ask()):
            raise CannotAsk(
                "This machine is in a namespace already, and nobody can be asked here",
                hint="Add --yes to leave it for the new one, or --keep to be in both.",
            )

    def tell(self, sentence: str) -> None:
        """Say how it goes, beside the output."""
        if not self._wishes.json:
            typer.echo(sentence, err=True)

    def decide(self, offered: Offered) -> bool:
        """Accept, unless the person does not want to."""
        self._plan = self._adopter.plan(offered, keep=self._wishes.keep)
        if self._plan.question is None or self._wishes.leave:
            return True
        if not can_ask():
            raise CannotAsk(self._plan.question, hint="To agree, add --yes.")
        typer.echo(describe(offered.peer), err=True)
        choices = "y: yes, n: no" if self._plan.known else "y: yes, k: keep both, n: no"
        answer = typer.prompt(f"{self._plan.question} ({choices})", default="n", err=True)
        if answer.strip().lower() in {"k", "keep"}:
            self._plan = self._adopter.plan(offered, keep=True)
            return True
        return answer.strip().lower() in {"y", "yes"}

    def finish(self, outcome: Paired) -> None:
        """Store it and say so."""
        assert self._plan is not None
        circle = self._adopter.store(self._plan, outcome)
        name = circle.namespace.name
        if self._wishes.json:
            print_json({"event": "paired", "namespace": name, "peer": facts_of(outcome.peer)})
            return
        typer.echo(outcome.reason)
        typer.echo(self._plan.reason)
        if name != outcome.namespace.name:
            typer.echo(f'Here it is called "{name}".')
        typer.echo(describe(outcome.peer))
        # By name: without one the command might mean a namespace that was here before.
        typer.echo(f"If that is not the machine you meant: `potluck unpair {name}` leaves it.")
