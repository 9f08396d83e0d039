"""The command ``potluck``: puts its commands together, each from a file of its own.

A command imports what is heavy when it runs, so that ``potluck --help`` answers at once.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from potluck import logs
from potluck.apps.cli import bench, dashboard, demo, doctor, members, run, status, trace
from potluck.apps.cli.common import (
    ALL_EXIT_CODES,
    EXIT_CODES,
    Json,
    PlainCommand,
    PlainGroup,
    guarded,
)
from potluck.apps.cli.output import print_json
from potluck.errors import DistributedError

# --------------------------------------------------------------------------------------------------
# ``potluck version``: what is installed here, for a person or a bug report.

EXAMPLES = """\
potluck version         one line
potluck version --json  the same for a program
"""


def version(*, json: Json = False) -> None:
    """Say which Potluck this is, and what it runs on."""
    import platform
    from importlib.metadata import version as version_of

    from potluck._version import THIS_BUILD

    facts = {
        "potluck": THIS_BUILD.potluck,
        "protocol": THIS_BUILD.protocol,
        "oldest_protocol": THIS_BUILD.oldest,
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if json:
        print_json(facts)
    else:
        typer.echo(
            f"potluck {facts['potluck']} ({THIS_BUILD.range}, Python {facts['python']}, "
            f"numpy {facts['numpy']}, {facts['platform']})"
        )


# --------------------------------------------------------------------------------------------------

app = typer.Typer(
    name="potluck",
    cls=PlainGroup,
    no_args_is_help=True,
    epilog=ALL_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # guard.py does this
)


def _show_version(*, wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _choose_logs(wish: str | None) -> str | None:
    if wish is not None:
        try:
            logs.read_setting(wish)
        except DistributedError as error:
            raise typer.BadParameter(str(error)) from None
        os.environ["POTLUCK_LOG"] = wish
    return wish


@app.callback()
def potluck(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Say which version this is."
        ),
    ] = False,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="json|human|LEVEL",
            callback=_choose_logs,
            envvar="POTLUCK_LOG",
            help="Show logs on stderr, of programs that `run` starts as well: json or human, and "
            "debug, info, warning or error, with a comma between them.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Train together on the machines you already own."""


def _add(
    command: Callable[..., None],
    examples: str,
    exit_codes: str = EXIT_CODES,
    settings: dict[str, Any] | None = None,
    *,
    name: str | None = None,
) -> None:
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    epilog = f"{examples}\n{exit_codes}"
    shape = app.command(name, cls=PlainCommand, help=text, epilog=epilog, context_settings=settings)
    shape(guarded(command))


_add(demo.demo, demo.EXAMPLES, demo.EXIT_CODES)
_add(members.pair, members.PAIR_EXAMPLES)
_add(members.passphrase, members.PHRASE_EXAMPLES)
_add(members.members, members.EXAMPLES)
_add(members.revoke, members.REVOKE_EXAMPLES)
_add(members.rotate, members.ROTATE_EXAMPLES)
_add(run.run, run.EXAMPLES, run.EXIT_CODES, run.SETTINGS)
_add(status.status, status.EXAMPLES, status.EXIT_CODES)
_add(
    status.continue_job,
    status.CONTINUE_EXAMPLES,
    status.CONTINUE_EXIT_CODES,
    name="continue",
)
_add(bench.bench, bench.EXAMPLES, bench.EXIT_CODES)
_add(dashboard.dashboard, dashboard.EXAMPLES, dashboard.EXIT_CODES)
_add(doctor.doctor, doctor.EXAMPLES, doctor.EXIT_CODES)
_add(trace.trace, trace.EXAMPLES, trace.EXIT_CODES)
_add(members.unpair, members.UNPAIR_EXAMPLES)
_add(version, EXAMPLES)
