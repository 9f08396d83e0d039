"""``potluck version``: what is installed here, for a person or a bug report."""

from __future__ import annotations

import typer

from potluck.apps.cli.options import Json

__all__ = ["EXAMPLES", "version"]

EXAMPLES = """\
potluck version         one line
potluck version --json  the same for a program
"""


def version(*, json: Json = False) -> None:
    """Say which Potluck this is, and what it runs on."""
    import platform
    from importlib.metadata import version as version_of

    from potluck import __version__
    from potluck.net.frames import PROTOCOL_VERSION

    facts = {
        "potluck": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(facts))
    else:
        typer.echo(
            f"potluck {facts['potluck']} (protocol {facts['protocol']}, Python {facts['python']}, "
            f"numpy {facts['numpy']}, {facts['platform']})"
        )
