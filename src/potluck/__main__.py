"""The command ``potluck``, also as ``python -m potluck`` where its folder is not on the path."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command and run it; Ctrl-C while it loads is not a crash either."""
    try:
        from potluck.apps.cli.main import app
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    app(prog_name="potluck")


if __name__ == "__main__":
    main()
