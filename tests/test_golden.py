"""What an earlier version wrote is read, and written again byte for byte.

``tests/golden`` has one file for every message and what a machine keeps on its disk; see
:mod:`support.golden`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from potluck import NetworkNamespace
from potluck.cluster.reports import Said
from potluck.discovery.local import KnownPeers
from potluck.discovery.records import Advert
from potluck.membership.messages import ClusterMessage
from potluck.net.frames import FrameType
from potluck.training.checkpoint import latest
from potluck.trust.pairing_protocol import Message, Secret
from support import golden

EXAMPLES = {example.name: example for example in golden.examples()}


def recorded(name: str) -> bytes:
    """The bytes of an example, as they were written first."""
    return (golden.FOLDER / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_is_written_as_before(name: str) -> None:
    """The same values give the same bytes."""
    assert EXAMPLES[name].made == recorded(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_earlier_message_is_read_and_written_again(name: str) -> None:
    """Nothing in it is lost, and nothing is added."""
    assert EXAMPLES[name].again(recorded(name)) == recorded(name)


def test_every_message_has_an_example_and_every_file_is_one() -> None:
    """A new kind of message is recorded; a file without an example says nothing."""
    unions = {
        "membership": ClusterMessage,
        "control": Said,
        "pairing": Message | Secret,
    }
    wanted = {
        f"{name}-{kind.__struct_config__.tag}"
        for name, union in unions.items()
        for kind in union.__args__
    }
    wanted |= {f"frame-{kind.name.lower()}" for kind in FrameType}
    assert wanted - EXAMPLES.keys() == set()
    assert {file.stem for file in golden.FOLDER.glob("*.bin")} == EXAMPLES.keys()


def test_an_example_that_changes_is_noticed() -> None:
    """One byte is enough, wherever it is."""
    data = bytearray(recorded("membership-commit"))
    for position in range(1, len(data)):
        changed = bytes([*data[:position], data[position] ^ 1, *data[position + 1 :]])
        try:
            again = EXAMPLES["membership-commit"].again(changed)
        except Exception:  # noqa: BLE001, S112 - refused is noticed
            continue
        assert again != recorded("membership-commit")


def test_files_are_written_as_before(tmp_path: Path) -> None:
    """Namespace, known peers and checkpoint: the same names and the same bytes."""
    golden.write_home(tmp_path)
    assert golden.files_of(tmp_path) == golden.files_of(golden.HOME)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that an earlier version has left."""
    copy = tmp_path / "home"
    shutil.copytree(golden.HOME, copy)
    copy.chmod(0o700)
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copy


def test_an_earlier_home_is_read(home: Path) -> None:
    """The secret, its tag for discovery, the peers and the arrays are what they were."""
    namespace = NetworkNamespace.load("lab", home=home)
    assert (namespace.secret, namespace.previous) == (b"s" * 32, (b"p" * 32,))
    advert = Advert.of(namespace, golden.A, job="train.py", port=29500)
    (file,) = (home / "known").iterdir()
    assert file.name == advert.tag
    (peer,) = KnownPeers(home, clock=lambda: golden.WHEN).recall(advert)
    assert (peer.node, peer.name) == (golden.B.node, "attic")
    found = latest(home / "checkpoints", verify=True)
    assert found is not None
    assert (found.lineage, found.epoch, found.step) == (golden.LINEAGE, 2, 3)
    tree = found.tree()
    assert (tree["steps"], tree["betas"]) == (3, (0.9, None))
    for name, array in golden.STATE["model"].items():
        assert np.array_equal(tree["model"][name], array)


def test_the_derived_values_are_those_of_before() -> None:
    """What keys and tags are derived from stays: another label would part old and new machines."""
    namespace = NetworkNamespace("lab", b"s" * 32)
    derived = msgspec.json.decode((golden.FOLDER / "derived.json").read_bytes())
    assert golden.derived(namespace) == derived
