"""The machine that shows a code: what its owner sees while it waits."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from potluck.apps.cli.membership import (
    CannotAsk,
    can_ask,
    describe,
    facts_of,
    print_json,
    this_machine,
)
from potluck.discovery.mdns import DiscoveryUnavailable
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.private_files import potluck_home
from potluck.net.addresses import Address, parse_address, usable_hosts
from potluck.trust.membership_store import Circle
from potluck.trust.pairing import (
    NO_NETWORK,
    Adopter,
    Application,
    Invitation,
    Notice,
    Plan,
    open_listener,
)
from potluck.trust.pairing_code import PairingCode, new_code, parse_code
from potluck.trust.pairing_net import PAIRING_PORT, PairingDiscovery
from potluck.trust.pairing_protocol import VERSION, Offered, Paired, TryFailed
from potluck.trust.roster_records import ID_SHOWN, Signer

LISTEN_FIRST = 0.3
"""Seconds to hear which numbers other machines show; the usual answer takes a tenth."""


def invite(namespace: str | None, *, json: bool) -> None:
    """Show a code until somebody has joined."""
    circle = Circle.of(NetworkNamespace.load_or_create(namespace), this_machine())
    with _Voice() as voice, open_listener() as listener, _screen(json=json) as screen:
        if not voice.has_network:
            screen.warn(f"{NO_NETWORK} The code works as soon as it is connected.")
        code = new_code(secrets.token_bytes, voice.slots())

        def tell(notice: Notice) -> None:
            if not voice.has_network and usable_hosts():
                voice.open()
                voice.announce(code, listener.port)
                screen.connected(listener.port)
            screen.notice(notice)

        invitation = Invitation(circle, listener, code, tell=tell)
        screen.show(circle, code, listener.port)
        if not voice.announce(code, listener.port):
            screen.warn("Machines cannot find each other on this network; --host is needed.")
        outcome = invitation.run()
    screen.paired(outcome)


class _Voice:
    """How others find this machine, where that is possible: the code works all the same."""

    def __init__(self) -> None:
        self._discovery: PairingDiscovery | None = None
        self.has_network = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def open(self) -> None:
        """Begin, or begin anew on the network that there is now."""
        self._close()
        self.has_network = bool(usable_hosts())
        with contextlib.suppress(DiscoveryUnavailable):
            self._discovery = PairingDiscovery()

    def _close(self) -> None:
        discovery, self._discovery = self._discovery, None
        if discovery is not None:
            discovery.close()

    def slots(self) -> Collection[int]:
        """The numbers that other machines show."""
        return () if self._discovery is None else self._discovery.slots(LISTEN_FIRST)

    def announce(self, code: PairingCode, port: int) -> bool:
        """Say which number is shown here; False where nobody could hear it."""
        if self._discovery is None:
            return False
        try:
            self._discovery.announce(code.slot, port, VERSION)
        except DiscoveryUnavailable:
            return False
        return True


class _PlainScreen:
    """Lines, for a file, a pipe or a simple terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=not self._console.is_terminal)

    def show(self, circle: Circle, code: PairingCode, port: int) -> None:
        name, me = circle.namespace.name, circle.me.card.name
        self.say(f'{me} lets one machine into "{name}". On that machine, within five minutes:\n')
        self.say(f"    potluck pair {code}\n", "bold")
        self._say_where(port)
        self.say("Waiting; Ctrl-C stops it.")

    def _say_where(self, port: int) -> None:
        if hosts := _hosts():
            places = [host if port == PAIRING_PORT else str(Address(host, port)) for host in hosts]
            more = f" (or {', '.join(places[1:])})" if places[1:] else ""
            self.say(f"If it does not find this one, add: --host {places[0]}{more}")

    def connected(self, port: int) -> None:
        self.say("This machine is connected now.", "green")
        self._say_where(port)

    def warn(self, sentence: str) -> None:
        self.say(sentence, "yellow")

    def notice(self, notice: Notice) -> None:
        if isinstance(notice, TryFailed):
            self.say(f"{notice.reason} {_tries(notice.tries_left)}", "yellow")

    def paired(self, outcome: Paired) -> None:
        self.say(outcome.reason, "green")
        self.say(describe(outcome.peer))
        revoke = f"potluck revoke {outcome.peer.node_id[:ID_SHOWN]}"
        self.say(f"If that is not the machine you meant: `{revoke}` takes it out again.")


class _LiveScreen(_PlainScreen):
    """The same, with a last line that shows the time left."""

    def __init__(self, live: Live) -> None:
        super().__init__(live.console)
        self._live = live
        self._shown = ""

    def notice(self, notice: Notice) -> None:
        super().notice(notice)
        if isinstance(notice, TryFailed):
            return
        minutes, seconds = divmod(int(notice.seconds_left), 60)
        line = f"Valid for {minutes}:{seconds:02}, {_tries(notice.tries_left)}"
        if line != self._shown:
            self._shown = line
            self._live.update(Text(line, "dim"), refresh=True)


class _JsonScreen(_PlainScreen):
    """One object for each event."""

    def show(self, circle: Circle, code: PairingCode, port: int) -> None:
        name = circle.namespace.name
        facts = {"event": "code", "code": str(code), "namespace": name}
        print_json({**facts, "hosts": _hosts(), "port": port})

    def warn(self, sentence: str) -> None:
        print_json({"event": "warning", "reason": sentence})

    def connected(self, port: int) -> None:
        print_json({"event": "connected", "hosts": _hosts(), "port": port})

    def notice(self, notice: Notice) -> None:
        if isinstance(notice, TryFailed):
            left = notice.tries_left
            print_json({"event": "try failed", "reason": notice.reason, "tries_left": left})

    def paired(self, outcome: Paired) -> None:
        namespace = outcome.namespace.name
        print_json({"event": "paired", "namespace": namespace, "peer": facts_of(outcome.peer)})


@contextmanager
def _screen(*, json: bool) -> Iterator[_PlainScreen]:
    console = Console(highlight=False)
    if json:
        yield _JsonScreen(console)
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield _LiveScreen(live)
    else:
        yield _PlainScreen(console)


def _hosts() -> list[str]:
    """Our addresses, without those that are good for one interface only."""
    return [host for host in usable_hosts() if "%" not in host]


def _tries(left: int) -> str:
    return "one try is left." if left == 1 else f"{left} tries are left."


# --------------------------------------------------------------------------------------------------
# The machine on which a code is typed: what its owner sees and is asked.


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
