"""``python -m potluck``: the command, where its folder is not on the path."""

from potluck.apps.cli.main import app

if __name__ == "__main__":
    app(prog_name="potluck")
