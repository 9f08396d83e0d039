"""The machine that shows a code: what its owner sees while it waits."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Self

import typer
from rich.text import Text

from potluck._version import THIS_BUILD
from potluck.apps.cli.membership import CannotAsk, can_ask, describe, facts_of, this_machine
from potluck.apps.cli.output import Display, console, open_display, print_json
from potluck.discovery.mdns import DiscoveryUnavailable
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.private_files import potluck_home
from potluck.net.addresses import NO_NETWORK, Address, parse_address, usable_hosts
from potluck.trust.membership_store import NamespaceMembership
from potluck.trust.pairing import (
    NamespaceImporter,
    Notice,
    PairingInvitation,
    PairingRequest,
    StoragePlan,
    WaitingForGuest,
    open_listener,
)
from potluck.trust.pairing_code import PairingCode, new_code, parse_code
from potluck.trust.pairing_net import PAIRING_PORT, PairingDiscovery
from potluck.trust.pairing_protocol import CallerDiffers, Offered, Paired, TryFailed
from potluck.trust.roster_records import ID_SHOWN, Signer

LISTEN_FIRST = 0.3
"""Seconds to hear which numbers other machines show; the usual answer takes a tenth."""


def invite(namespace: str | None, *, json: bool) -> None:
    """Show a code until a machine has joined."""
    membership = NamespaceMembership.of(NetworkNamespace.load_or_create(namespace), this_machine())
    with (
        _Announcement() as voice,
        open_listener() as listener,
        open_display(console(), json=json, transient=True) as display,
    ):
        screen = _Screen(display, listener.port)
        if not voice.has_network:
            screen.warn(f"{NO_NETWORK} The code works as soon as it is connected.")
        code = new_code(secrets.token_bytes, voice.slots())

        def tell(notice: Notice) -> None:
            if not voice.has_network and usable_hosts():
                voice.open()
                voice.announce(code, listener.port)
                screen.connected()
            screen.notice(notice)

        invitation = PairingInvitation(membership, listener, code, tell=tell)
        screen.show(membership, code)
        if not voice.announce(code, listener.port):
            screen.warn("Machines cannot find each other on this network; --host is needed.")
        screen.paired(invitation.run())


class _Announcement:
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
        """Say which number is shown here; False where no machine could hear it."""
        if self._discovery is None:
            return False
        try:
            self._discovery.announce(code.slot, port, THIS_BUILD.protocol)
        except DiscoveryUnavailable:
            return False
        return True


class _Screen:
    """What the owner of the machine that shows a code is told."""

    def __init__(self, display: Display, port: int) -> None:
        self._display, self._port = display, port

    def show(self, membership: NamespaceMembership, code: PairingCode) -> None:
        name, me = membership.namespace.name, membership.me.card.name
        text = Text.assemble(
            f'{me} lets one machine into "{name}". On that machine, within five minutes:\n\n',
            (f"    potluck pair {code}\n\n", "bold"),
            *(f"{line}\n" for line in self._where()),
            "Waiting; Ctrl-C stops it.",
        )
        facts = {"event": "code", "code": str(code), "namespace": name}
        self._display.say(text, facts={**facts, "hosts": _hosts(), "port": self._port})

    def _where(self) -> Iterator[str]:
        port = self._port
        if hosts := _hosts():
            places = [host if port == PAIRING_PORT else str(Address(host, port)) for host in hosts]
            more = f" (or {', '.join(places[1:])})" if places[1:] else ""
            yield f"If it does not find this one, add: --host {places[0]}{more}"

    def connected(self) -> None:
        facts = {"event": "connected", "hosts": _hosts(), "port": self._port}
        words = "\n".join(["This machine is connected now.", *self._where()])
        self._display.say(words, style="green", facts=facts)

    def warn(self, sentence: str) -> None:
        facts = {"event": "warning", "reason": sentence}
        self._display.say(sentence, style="yellow", facts=facts)

    def notice(self, notice: Notice) -> None:
        if isinstance(notice, CallerDiffers):
            said: dict[str, object] = {"event": "other version", "reason": notice.reason}
            self._display.say(notice.reason, style="yellow", facts=said)
            return
        if not isinstance(notice, TryFailed):
            self._display.show(_TimeLeft(notice))
            return
        left = notice.tries_left
        facts = {"event": "try failed", "reason": notice.reason, "tries_left": left}
        self._display.say(f"{notice.reason} {_tries(left)}", style="yellow", facts=facts)

    def paired(self, outcome: Paired) -> None:
        revoke = f"potluck revoke {outcome.peer.node_id[:ID_SHOWN]}"
        text = Text.assemble(
            (f"{outcome.reason}\n", "green"),
            f"{describe(outcome.peer)}\n",
            f"If that is not the machine you meant: `{revoke}` takes it out again.",
        )
        namespace, peer = outcome.namespace.name, facts_of(outcome.peer)
        self._display.say(text, facts={"event": "paired", "namespace": namespace, "peer": peer})


class _TimeLeft:
    """The last line in a terminal; it is nowhere else."""

    def __init__(self, notice: WaitingForGuest) -> None:
        self._notice = notice

    def draw(self) -> Text:
        minutes, seconds = divmod(int(self._notice.seconds_left), 60)
        return Text(f"Valid for {minutes}:{seconds:02}, {_tries(self._notice.tries_left)}", "dim")

    def line(self) -> str:
        return ""

    def facts(self) -> None:
        return None


def _hosts() -> list[str]:
    """Our addresses, without those that are good for one interface only."""
    return [host for host in usable_hosts() if "%" not in host]


def _tries(left: int) -> str:
    return "One try left." if left == 1 else f"{left or 'No'} tries left."


# --------------------------------------------------------------------------------------------------
# The machine on which a code is typed: what its owner sees and is asked.


@dataclass(frozen=True)
class PairOptions:
    """What the options say."""

    host: str | None
    namespace: str | None
    leave: bool
    """Leave the group this machine is in, without asking."""
    keep: bool
    """Stay in it, and join beside it."""
    json: bool


def join(text: str, wishes: PairOptions) -> None:
    """Type a code: find the machine that shows it, and join."""
    code, where = parse_code(text), _where(wishes.host)
    me = this_machine()
    guest = _Guest(me, NamespaceImporter(potluck_home(), me, wishes.namespace), wishes)
    guest.require_answers()
    outcome = _apply(code, where, guest)
    guest.finish(outcome)


def _where(host: str | None) -> Address | None:
    try:
        return parse_address(host, PAIRING_PORT) if host else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host") from None


def _apply(code: PairingCode, where: Address | None, guest: _Guest) -> Paired:
    application = PairingRequest(code, guest.me, guest.decide, tell=guest.tell)
    if where is not None:
        return application.at([where])
    with PairingDiscovery() as discovery:
        return application.search(discovery)


class _Guest:
    def __init__(self, me: Signer, adopter: NamespaceImporter, wishes: PairOptions) -> None:
        self.me = me
        self._adopter = adopter
        self._wishes = wishes
        self._plan: StoragePlan | None = None

    def require_answers(self) -> None:
        """Asking uses up the code, so find out first whether a person can answer."""
        wishes = self._wishes
        is_decided = wishes.leave or wishes.keep
        if self._adopter.may_ask and not is_decided and (wishes.json or not can_ask()):
            raise CannotAsk(
                "This machine is already in a group, and there is no terminal to ask on",
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
        membership = self._adopter.store(self._plan, outcome)
        name = membership.namespace.name
        if self._wishes.json:
            print_json({"event": "paired", "namespace": name, "peer": facts_of(outcome.peer)})
            return
        typer.echo(outcome.reason)
        if self._plan.reason:
            typer.echo(self._plan.reason)
        if name != outcome.namespace.name:
            typer.echo(f'Here it is called "{name}".')
        typer.echo(describe(outcome.peer))
        # By name: without one the command might mean a namespace that was here before.
        typer.echo(f"If that is not the machine you meant: `potluck unpair {name}` leaves it.")
