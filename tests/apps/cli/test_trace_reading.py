"""Dumps are read whoever wrote them; what is wrong with one is no harm to the others."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.apps.cli import trace_reading
from potluck.apps.cli.trace_reading import (
    UnreadableDump,
    expand,
    latest,
    merge,
    read_dump,
)
from potluck.runtime.recorder_format import Header, encode
from support.traces import collective, dump_of, header_of, write


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Every field of it."""
    record = collective(0, 1, 1.0, 2.0, waited={1: 0.5}, members=(0, 1), reason="x", epoch=3)
    dump = read_dump(write(tmp_path / "a", header_of(0), [record]))
    assert (dump.header, dump.records, dump.trouble) == (header_of(0), (record,), None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"\x00\xff\x00\xff", "its first line is no header"),
        (b"[1, 2]\n", "its first line is no header"),
        (b'{"potluck_trace": 1}\n', "its first line is no header"),
        (b'{"potluck_trace": 9, "monotonic": 1, "wall": 2}\n', "its format is 9"),
        (b'{"potluck_trace": 1, "monotonic": 1e999, "wall": 2}\n', "its first line is no header"),
        (b'{"a": ' * 100_000, "its first line is no header"),
        (b"x" * (trace_reading.LONGEST_LINE + 10), "its first line is no header"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """With the file's name and the reason, and without reading more than one line."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UnreadableDump, match=reason) as caught:
        read_dump(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A file that is not there, and something that is no file."""
    with pytest.raises(UnreadableDump, match="No such file"):
        read_dump(tmp_path / "nowhere")
    with pytest.raises(UnreadableDump):
        read_dump(tmp_path)


def test_what_keeps_waiting_or_claims_any_size_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe that nobody writes to, and a file of a terabyte that takes no room."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableDump, match="not a regular file"):
        read_dump(tmp_path / "pipe")
    dump = write(tmp_path / "a", header_of(0), [])
    os.truncate(dump, 1 << 40)
    with pytest.raises(UnreadableDump, match="it has 1099511627776 bytes"):
        read_dump(dump)


def test_a_damaged_line_costs_that_line(tmp_path: Path) -> None:
    """Cut off, too long, too large, ending before it begins: each is counted, the rest is used."""
    good = [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, 4.0)]
    content = encode(header_of(0), good)
    damaged = [
        b'{"lane": "collectives", "what": "all_re',
        b"\xff\xfe",
        b'{"lane": "x", "what": "y", "begin": 5, "end": 4}',
        b'{"lane": "x", "what": "y", "begin": 1e300}',
        b'{"lane": "x", "what": "y", "begin": 1, "number": 123456789012345678901234567890}',
        b'{"lane": "x", "what": "' + b"y" * 300 + b'", "begin": 1}',
        b" " * (trace_reading.LONGEST_LINE + 5),
    ]
    first, second, rest = content.splitlines()[0], content.splitlines()[1], content.splitlines()[2]
    (tmp_path / "a").write_bytes(b"\n".join([first, second, *damaged, rest]))
    dump = read_dump(tmp_path / "a")
    assert dump.records == tuple(good)
    assert dump.skipped == len(damaged)
    assert dump.trouble is not None
    assert "7 lines could not be read; the other 2 are used" in dump.trouble


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.integers(0, 400))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path: Path, noise: bytes, place: int
) -> None:
    """No noise anywhere in a dump leads to anything else."""
    content = encode(header_of(0), [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, 4.0)])
    (tmp_path / "a").write_bytes(content[:place] + noise + content[place:])
    try:
        dump = read_dump(tmp_path / "a")
    except UnreadableDump:
        return
    assert all(each.end is None or each.end >= each.begin for each in dump.records)


def test_dumps_of_one_process_become_one() -> None:
    """What both hold counts once; what ran in the first has ended in the second."""
    early = dump_of(header_of(0), [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, None)])
    late = dump_of(
        header_of(0, clock=5.0), [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, 4.0)]
    )
    other = dump_of(header_of(1), [])
    merged, alone = merge([late, early, other])
    assert [each.number for each in merged.records] == [1, 2]
    assert all(each.end is not None for each in merged.records)
    assert merged.header == late.header
    assert alone == other


def test_a_folder_stands_for_the_dumps_in_it(tmp_path: Path) -> None:
    """Nothing else in it is taken for one."""
    for name in ("b.trace.jsonl", "a.trace.jsonl", "notes.txt", ".x.trace.jsonl.new"):
        (tmp_path / name).write_text("")
    assert [path.name for path in expand([tmp_path, tmp_path / "notes.txt"])] == [
        "a.trace.jsonl",
        "b.trace.jsonl",
        "notes.txt",
    ]


def test_the_last_incident_is_of_one_job_and_one_minute() -> None:
    """What happened yesterday, or to another job, is another story."""
    dumps = [dump_of(header_of(rank, job="ab"[rank > 0]), []) for rank in range(3)]
    old = Header(potluck_trace=1, monotonic=1.0, wall=dumps[0].header.wall - 100, job="b")
    found = latest([*dumps, dump_of(old, [])])
    assert [dump.header.rank for dump in found] == [1, 2]
    assert latest([]) == []
