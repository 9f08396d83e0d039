"""``docs/cli.md``, made from the help of the real command.

PYTHONPATH=tests python -m support.cli_page     writes it anew
"""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from potluck.apps.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"

INTRODUCTION = """\
# Command line

<!-- Made from the command's own help by `PYTHONPATH=tests python -m support.cli_page`. -->

`potluck COMMAND --help` prints what this page shows. Every command

* prints errors to stderr: what happened, the likely cause, what to do;
  `--debug` (or `POTLUCK_DEBUG=1`) adds the traceback;
* prints results to stdout and everything else to stderr; `--json` makes the result a JSON object;
* shows progress in a terminal, plain lines in a pipe or file, and no colours if `NO_COLOR` is set.

## Exit codes

| code | command | meaning |
|---|---|---|
| 0 | all | success |
| 1 | all | failure; the reason is on stderr |
| 2 | all | wrong usage; nothing was done |
"""

COMPLETION = """\
| 130 | all | interrupted by Ctrl-C |

`potluck run` exits with the exit code of the script, or with 128 + n if signal n ended it.

## Completion

`potluck --install-completion` sets up completion for your current shell: the Tab key then completes
commands and options. `potluck --show-completion` prints the script instead. For another shell use
`_POTLUCK_COMPLETE=source_bash potluck` (or `source_zsh`, `source_fish`).
"""

CODE = re.compile(r"\b3 ([^,;]+)")
WIDTH = "96"


def shown(*words: str) -> str:
    """The help of a command, as in a file: without colours, and of a fixed width."""
    variables = {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*words, "--help"], env=variables, prog_name="potluck")
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


def commands() -> list[str]:
    """All commands in the order of the help."""
    return [
        each.name or each.callback.__name__ for each in app.registered_commands if each.callback
    ]


def page() -> str:
    """The whole page."""
    helps = {name: shown(name) for name in commands()}
    parts = [INTRODUCTION + _special_codes(helps) + COMPLETION]
    parts += [f"## potluck {name}\n\n```text\n{text}\n```\n" for name, text in helps.items()]
    return "\n".join(parts)


def _special_codes(helps: dict[str, str]) -> str:
    rows = ""
    for name, text in helps.items():
        codes = " ".join(text.partition("Exit codes:")[2].split())
        meaning = CODE.search(codes)
        if meaning is not None:
            rows += f"| 3 | `potluck {name}` | {meaning[1].removesuffix('.')} |\n"
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
