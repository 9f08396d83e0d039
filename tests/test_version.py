"""Versions: which builds work together, and files of a later version that an earlier one meets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import Checkpointer
from potluck._version import (
    CHECKPOINT_FORMAT,
    HOME_FORMAT,
    OLDEST_PROTOCOL,
    PROTOCOL,
    THIS_BUILD,
    Build,
    NewerFile,
    VersionMismatch,
    __version__,
    mixed,
)
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity
from potluck.net.frames import LAYOUT
from potluck.training.checkpoint import RESUME, Saving, latest
from potluck.trust.membership_store import NamespaceMembership, read_roster, signer_of
from support.builds import another_build, environment
from support.threads import PATIENCE

ranges = st.tuples(st.integers(1, 50), st.integers(1, 50)).map(sorted)
builds = ranges.map(lambda each: Build("", each[1], each[0]))


def content(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- what is spoken --------------------------------------------------------------------------------


def test_the_versions_of_this_build_are_a_range() -> None:
    """And frames look as the oldest of them says."""
    assert 1 <= LAYOUT <= OLDEST_PROTOCOL <= PROTOCOL
    assert THIS_BUILD.agreed(THIS_BUILD) == PROTOCOL


@given(builds, builds)
def test_two_builds_speak_the_newest_version_that_both_know(one: Build, other: Build) -> None:
    """Both come to the same result; without a common version there is none."""
    common = set(range(one.oldest, one.protocol + 1)) & set(range(other.oldest, other.protocol + 1))
    assert one.agreed(other) == other.agreed(one) == max(common, default=None)


@given(builds, builds)
def test_the_older_machine_is_to_be_upgraded(one: Build, other: Build) -> None:
    """Whichever side says so."""
    if one.agreed(other) is None:
        older = "one" if one.protocol < other.oldest else "other"
        for error in (
            VersionMismatch("one", one, "other", other),
            VersionMismatch("other", other, "one", one),
        ):
            assert str(error).endswith(
                f"Upgrade {older}: type `pip install --upgrade potluck` there."
            )


def test_two_builds_on_one_machine_are_told_apart() -> None:
    """Both have its name."""
    error = VersionMismatch("desk", Build("0.1.0", 1, 1), "desk", Build("0.2.0", 2, 2))
    assert "desk runs two: Potluck 0.1.0 (protocol 1), and Potluck 0.2.0" in error.message
    assert "Upgrade the older one" in str(error)


def test_a_mixture_names_the_machines_by_version() -> None:
    """The older ones are to be upgraded, when it suits."""
    old, new = Build("0.1.0", 1, 1), Build("0.2.0", 2, 1)
    assert mixed({"desk": old, "nas": old}) is None
    assert mixed({"desk": old, "attic": new, "nas": old}) == (
        "desk and nas run Potluck 0.1.0 (protocol 1), attic Potluck 0.2.0 (protocols 1 to 2)",
        "They work together; to upgrade desk and nas, type `pip install --upgrade potluck` there.",
    )


# -- files -----------------------------------------------------------------------------------------


def run(build: Path, home: Path, *arguments: str) -> str:
    """Run Python with a build; what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        check=True,
        text=True,
        env=environment(build, POTLUCK_HOME=str(home)),
        timeout=PATIENCE,
    )
    return done.stdout


def test_a_home_of_a_later_version_is_left_as_it_is(tmp_path: Path) -> None:
    """A later build takes over keys, secret and roster; ours then refuses, and names both."""
    home = tmp_path / "home"
    identity = NodeIdentity.load_or_generate(home / "node_keypair")
    NamespaceMembership.of(NetworkNamespace.load_or_create("lab", home=home), signer_of(identity))
    before = content(home)
    later = another_build(tmp_path / "later", "0.7.0", home_format=HOME_FORMAT + 1)
    shown = run(later, home, "-m", "potluck", "members", "--namespace", "lab", "--json")
    assert identity.id in shown
    after = content(home)
    assert {name: data for name, data in after.items() if name in before} == before
    assert after["format"] == b"2 0.7.0\n"
    for attempt in (
        lambda: NodeIdentity.load_or_generate(home / "node_keypair"),
        lambda: NetworkNamespace.load("lab", home=home),
        lambda: NetworkNamespace.load_or_create("new", home=home),
    ):
        with pytest.raises(NewerFile) as caught:
            attempt()
        assert str(caught.value) == (
            f"{home} was written by Potluck 0.7.0, in format 2; Potluck {__version__} reads up to "
            "format 1. Upgrade Potluck on this machine: `pip install --upgrade potluck`. Nothing "
            "was changed."
        )
    assert content(home) == after


@pytest.mark.parametrize("said", ["2", "2 0.7.0\n", "nonsense", ""])
def test_a_format_that_is_not_ours_is_a_later_one(tmp_path: Path, said: str) -> None:
    """Whatever the file says; one that is empty says nothing, which is not known to be ours."""
    (tmp_path / "format").write_text(said)
    (tmp_path / "format").chmod(0o600)
    with pytest.raises(NewerFile):
        NodeIdentity.load_or_generate(tmp_path / "node_keypair")
    assert not (tmp_path / "node_keypair").exists()


def test_a_member_list_of_a_later_version_is_not_called_damaged(tmp_path: Path) -> None:
    """Its owner would delete it."""
    identity = NodeIdentity.load_or_generate(tmp_path / "node_keypair")
    lab = NetworkNamespace.load_or_create("lab", home=tmp_path)
    NamespaceMembership.of(lab, signer_of(identity))
    data = bytearray(lab.roster_path.read_bytes())
    data[1] = 7
    lab.roster_path.write_bytes(data)
    with pytest.raises(NewerFile, match=r"roster was written by a later version.*in format 7"):
        read_roster(lab)


STATE = {"weights": np.arange(4.0)}

SAVE = """
import sys
import numpy as np
from potluck import Checkpointer
with Checkpointer(sys.argv[1]) as saver:
    saver.save({"weights": np.arange(4.0)}, step=int(sys.argv[2]), wait=True)
"""


def test_checkpoints_of_a_later_version_are_neither_skipped_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Resuming from an earlier step would lose those in between without a word."""
    folder = tmp_path / "saved"
    with Checkpointer(folder, keep=1) as saver:
        saver.save(STATE, step=3, wait=True)
    later = another_build(tmp_path / "later", "0.7.0", checkpoint_format=CHECKPOINT_FORMAT + 1)
    run(later, tmp_path / "home", "-c", SAVE, str(folder), "5")
    before = content(folder)
    monkeypatch.setenv(RESUME, "1")
    for fresh_start in (False, True):
        for attempt in (
            lambda fresh_start=fresh_start: latest(folder, fresh_start=fresh_start),
            Saving(folder, 1, 1, fresh_start=fresh_start).found,
        ):
            with pytest.raises(NewerFile, match=r"0\.7\.0, in format 2; .*Nothing was changed"):
                attempt()
    monkeypatch.delenv(RESUME)
    assert Saving(folder, 1, 1).found() is None  # a training of its own says what is there
    assert "in format 2" in caplog.text
    with pytest.raises(NewerFile), Checkpointer(folder, keep=1) as saver:
        saver.save(STATE, step=5, wait=True)  # it has the same name
    with Checkpointer(folder, keep=1) as saver:
        for step in (6, 7, 8):
            saver.save(STATE, step=step, wait=True)
    after = content(folder)
    assert {name: after.get(name) for name in before if "step-000000000005" in name} == {
        name: data for name, data in before.items() if "step-000000000005" in name
    }
    assert not any("step-000000000006" in name for name in after)  # ours are tidied as always


def test_a_later_version_reads_what_this_one_has_saved(tmp_path: Path) -> None:
    """So a machine can be upgraded and resume."""
    with Checkpointer(tmp_path / "saved") as saver:
        saver.save(STATE, step=3, wait=True)
    later = another_build(tmp_path / "later", "0.7.0", checkpoint_format=CHECKPOINT_FORMAT + 1)
    read = "import sys; from potluck.training.checkpoint import latest; print(latest(sys.argv[1]))"
    shown = run(later, tmp_path / "home", "-c", read, str(tmp_path / "saved"))
    assert "Checkpoint of step 3" in shown
