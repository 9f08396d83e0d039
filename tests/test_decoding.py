"""Decoding: typed values out of bytes, from any thread and whatever it is the first to meet."""

import subprocess
import sys

import msgspec
import pytest

from potluck.decoding import decode_json, decode_msgpack, json_decoder, msgpack_decoder

# With what the library offers itself, this crashes within a few of its rounds.
_CROWD = """
import sys, threading, types, msgspec
from potluck.decoding import decode_msgpack
sys.setswitchinterval(1e-6)
SOURCE = '''
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    a: int
    b: str | None = None
class Outer(msgspec.Struct):
    a: int
    b: dict[str, str] | None = None
    c: tuple[Inner, ...] = ()
    d: Inner | None = None
'''
data = msgspec.msgpack.encode({"a": 1, "b": {"x": "y"}, "c": [{"a": 1}], "d": {"a": 2}})
for number in range(300):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(SOURCE, module.__dict__)
    together, read = threading.Barrier(3), []
    def run():
        together.wait()
        read.append(decode_msgpack(data, module.Outer).d.a)
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [2, 2, 2], read
"""


class Point(msgspec.Struct):
    """Something to read."""

    x: int


def test_values_are_read_as_they_were_written() -> None:
    """From both formats, and by one reader for each type."""
    point = Point(3)
    assert decode_json(msgspec.json.encode(point), Point) == point
    assert decode_msgpack(msgspec.msgpack.encode(point), Point) == point
    assert json_decoder(Point) is json_decoder(Point)
    assert msgpack_decoder(Point | None).decode(b"\xc0") is None


@pytest.mark.parametrize("data", [b"{}", b'{"x": "three"}', b"[", b""])
def test_what_is_something_else_is_refused(data: bytes) -> None:
    """With the errors of the library."""
    with pytest.raises(msgspec.DecodeError):
        decode_json(data, Point)
    with pytest.raises(msgspec.DecodeError):
        decode_msgpack(data, Point)


def test_threads_that_meet_a_new_type_together_all_read_it() -> None:
    """The library below crashes there."""
    subprocess.run([sys.executable, "-c", _CROWD], check=True, timeout=50)
