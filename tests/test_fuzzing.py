"""Every decoder, fed with hostile bytes: a few thousand inputs here, millions in ``make soak``."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from potluck import _decode, _values
from potluck._decode import KeyCheck
from potluck.arrays import trees
from potluck.errors import MalformedFrame
from support.fuzz_targets import targets
from support.fuzzing import Figures, Target, expensive, fuzz, try_one

SOURCE = Path(_decode.__file__).parent


def test_no_decoder_is_surprised_by_hostile_bytes() -> None:
    """Its own error or a value, within the time and the memory that the input explains."""
    figures = fuzz(targets(), seed=20_26, inputs=12_000)
    assert not figures.faults, "\n".join(map(str, figures.faults))
    assert set(figures.inputs) == {target.name for target in targets()}


def slow_inputs(target: Target, size: int) -> Figures:
    """What becomes of inputs that are expensive for a decoder without bounds."""
    figures = Figures()
    for data in expensive(target, random.Random(size), size):
        try_one(target, data, figures)
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["object", "call values, described"])
def test_the_fuzzer_finds_keys_that_share_a_hash(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check of keys, with it not: so the inputs are hostile, and the check works."""
    (target,) = (each for each in targets() if each.name == name)
    assert not slow_inputs(target, 10_000).faults

    def no_check(self: KeyCheck, keys: Iterable[object], *, is_set: bool = False) -> None:
        pass

    monkeypatch.setattr(KeyCheck, "check", no_check)
    assert any("s of CPU" in fault.what for fault in slow_inputs(target, 10_000).faults)


def test_keys_of_a_tree_are_checked_before_they_are_hashed() -> None:
    """They come in pairs, so the codec of objects does not see that they are keys."""
    pairs = [((number + 9) * ((1 << 61) - 1), 0) for number in range(3000)]
    shape, _ = trees.written({"a": 1})
    kind, _ = _values.decode(shape)
    with pytest.raises(MalformedFrame, match="share a hash"):
        trees.read(_values.encode([kind, [[key, value] for key, value in pairs]]), {})


def test_the_fuzzer_knows_every_module_that_decodes() -> None:
    """Whoever adds a decoder adds a target, or says here why there is none."""
    decodes = re.compile(r"\b(decode_(json|msgpack|plain)|(json|msgpack)_reader)\(")
    apart = {
        "decoding.py": "defines them",
        "messages.py": "unpack: hello, table, told, lane opened, control opened",
        "cluster/config.py": "what `potluck run` hands to its own children",
        "cluster/observer.py": "what a child of this process answers",
        "apps/dashboard/server.py": "what the parent of this process asks",
        "apps/cli/demo_story.py": "what the children of the demo print",
    }
    covered = (Path(__file__).parent / "support" / "fuzz_targets.py").read_text()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if decodes.search(path.read_text()) and name not in apart:
            assert path.stem in covered, f"{name} decodes and is not among the targets"
