"""Seeds on a compiled copy of the core: which modules are compiled, and what is kept of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from potluck.testing.seeds import check_seeds
from support import compiled_seeds
from support.compiled_seeds import SOURCE, build, can_be_compiled, digest, main, modules, play


def test_the_heart_of_the_membership_is_compiled() -> None:
    """Commands and messages stay as they are."""
    names = modules(SOURCE)
    assert {"potluck/membership/core.py", "potluck/testing/invariants.py"} <= set(names)
    assert not {"potluck/membership/messages.py", "potluck/testing/seeds.py"} & set(names)


@pytest.mark.parametrize(
    "source",
    [
        "class Colour(Enum): RED = 1",
        "class Wrong(ValueError): pass",
        "def f():\n    class Inner(Struct, frozen=True): pass",
    ],
)
def test_classes_that_mypyc_has_no_form_for_stay_as_they_are(source: str) -> None:
    """With the whole module."""
    assert not can_be_compiled(source)


def test_the_digest_follows_the_membership_alone(tmp_path: Path) -> None:
    """A change elsewhere does not make the seeds that were played worthless."""
    package = tmp_path / "potluck"
    parts = ("membership/*.py", "testing/*.py", "training/steps.py", "_types.py")
    for path in (path for part in parts for path in SOURCE.glob(part)):
        copy = package / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert digest(package) == digest(SOURCE)
    (package / "training" / "elastic.py").write_text("", encoding="utf-8")
    assert digest(package) == digest(SOURCE)
    (package / "membership" / "election.py").write_text("", encoding="utf-8")
    assert digest(package) != digest(SOURCE)


def test_a_run_continues_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of this source are not played again; those of another are; a failure is told."""
    played = []

    def fake(folder: Path, first: int, seeds: int, jobs: int) -> dict[str, object]:
        assert (folder, jobs) == (tmp_path, 3)
        played.append((first, seeds))
        failures = [{"seed": 21, "reason": "broken"}] if first == 20 else []
        return {"seeds": seeds, "failures": failures}

    monkeypatch.setattr(compiled_seeds, "build", lambda _: "this")
    monkeypatch.setattr(compiled_seeds, "play", fake)
    log = tmp_path / "log"
    lines = [
        {"first": 0, "source": "this", "seeds": 10, "failures": []},
        {"first": 10, "source": "another", "seeds": 10, "failures": [{"seed": 11}]},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = ["--folder", str(tmp_path), "--jobs", "3", "--part", "10", "--seeds", "25"]
    assert main(run) == 1
    assert played == [(10, 10), (20, 5)]
    told = capsys.readouterr().out
    assert "10 to 19: all passed" in told
    assert "25 seeds, 1 failed" in told
    assert '"seed": 21' in told
    assert main(run) == 1  # all parts are known: it only tells
    assert len(played) == 2


def test_a_run_that_breaks_down_is_shown(tmp_path: Path) -> None:
    """With its exit code, and what it wrote."""
    broken = tmp_path / "potluck" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('this copy is broken')", encoding="utf-8")
    with pytest.raises(RuntimeError, match="Seeds 7 to 9 ended with code 1") as caught:
        play(tmp_path, 7, 3, 1)
    assert "this copy is broken" in str(caught.value)


@pytest.mark.soak
def test_the_compiled_core_does_the_same_as_the_source(tmp_path: Path) -> None:
    """Story by story: how long each took to settle is the same to the last digit."""
    build(tmp_path / "copy")
    assert list((tmp_path / "copy").glob("potluck/membership/core.*.so"))
    fast, slow = play(tmp_path / "copy", 0, 100, 1), check_seeds(range(100)).as_dict()
    assert not fast["failures"]
    for name in ("seeds", "exceptions", "taken_back", "settled_in_seconds"):
        assert fast[name] == slow[name]
