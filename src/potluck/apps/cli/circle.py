"""What the commands about members share: this machine's circle, and how machines are shown."""

from __future__ import annotations

import sys
from typing import Any

import typer

from potluck.apps.cli.progress import working
from potluck.core.cards import Card, Signer
from potluck.core.roster import Roster
from potluck.errors import DistributedError, from_os_error
from potluck.net.identity import NodeIdentity
from potluck.net.names import short_name
from potluck.net.namespace import NetworkNamespace, Protection
from potluck.net.namespace_files import usual_name
from potluck.net.private_files import potluck_home

__all__ = [
    "CannotAsk",
    "can_ask",
    "confirm",
    "describe",
    "facts_of",
    "kept_namespace",
    "known_name",
    "pending_facts",
    "print_json",
    "sync",
    "this_machine",
]

SYNC_WITHIN = 10.0
"""Seconds for reaching a member that was named."""


class CannotAsk(DistributedError, RuntimeError):
    """A question came up where nobody can answer it."""


def this_machine() -> Signer:
    """Who we are."""
    from potluck.backend.circles import signer_of

    return signer_of(NodeIdentity.load_or_generate())


def kept_namespace(name: str | None) -> NetworkNamespace:
    """The namespace that is meant; raises if this machine does not have it."""
    home = potluck_home()
    return NetworkNamespace.load(name or usual_name(home), home=home)


def known_name(name: str | None) -> str | None:
    """The name of a namespace to look at, which looking shall not create."""
    keyless = {Protection.OPEN.value, Protection.INSECURE.value}
    if name is not None and name.strip().lower() not in keyless:
        NetworkNamespace.load(name)  # raises where there is none
    return name


def sync(namespace: NetworkNamespace, host: str | None) -> NetworkNamespace:
    """Agree with a running member on who belongs; the namespace as it is then.

    Without ``host`` nothing happens: members agree whenever their programs connect.
    """
    if host is None:
        return namespace
    import contextlib
    import socket
    import time

    from potluck.backend.introduction import Call, SecretChanged, dial, say_hello
    from potluck.backend.membership import Membership
    from potluck.messages import LaneOpened, Sync
    from potluck.net.addresses import parse_address

    try:
        where = parse_address(host)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host") from None
    members = Membership.load(namespace)
    deadline = time.monotonic() + SYNC_WITHIN
    try:
        with working(f"Asking {host}"):
            sock = dial(members, Call(where, deadline))
    except DistributedError:
        raise
    except socket.gaierror as error:
        raise from_os_error(f"{host} could not be reached", error) from error
    except OSError as error:
        hint = "Check that a program of a member runs there, and that no firewall is in between."
        raise from_os_error(f"{host} could not be reached", error, hint=hint) from error
    with contextlib.closing(sock), contextlib.suppress(SecretChanged):
        say_hello(sock, Sync(), LaneOpened, members, deadline)
    return NetworkNamespace.load(namespace.name, home=namespace.home)


def describe(card: Card) -> str:
    """A machine by all its names; the id is what counts."""
    return f"{card.name} is {short_name(card.node_id)}, with the id {card.node_id}."


def facts_of(card: Card) -> dict[str, str]:
    """The same for a program."""
    return {"name": card.name, "short_name": short_name(card.node_id), "id": card.node_id}


def pending_facts(roster: Roster) -> list[dict[str, Any]]:
    """The changes that wait for signatures, for a program."""
    return [
        {
            "revokes": change.rotation.revokes,
            "proposer": change.rotation.proposer,
            "reason": change.reason,
        }
        for change in roster.pending
    ]


def print_json(facts: dict[str, Any]) -> None:
    """One object on one line, at once: a program may be waiting for it."""
    import msgspec

    typer.echo(msgspec.json.encode(facts))
    sys.stdout.flush()


def can_ask() -> bool:
    """Whether a person sits at the other end."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if the person agrees, or has done so beforehand."""
    if yes:
        return
    if not can_ask():
        raise CannotAsk(question, hint="Nobody can be asked here; to agree, add --yes.")
    typer.confirm(question, abort=True, err=True)
