"""The broadcast: many viewers, none of whom anybody waits for."""

from __future__ import annotations

import asyncio
import json

import pytest

from potluck.apps.dashboard import broadcast as module
from potluck.apps.dashboard.broadcast import MAX_VIEWERS, Broadcast, TooManyViewers


def events(message: bytes) -> list[tuple[str, str, object]]:
    """Kind, mark and data of each event in a message."""
    found = []
    for block in message.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], fields["id"], json.loads(fields["data"])))
    return found


def test_a_viewer_gets_everything_first_and_then_what_is_new() -> None:
    """Of pictures the latest alone: who is slow skips those in between."""

    async def watch() -> None:
        shown = Broadcast()
        shown.show(b'"all 1"', b'"light 1"')
        shown.tell(1, b'"news 1"')
        viewer = shown.admit()
        messages = viewer.messages()
        assert events(await anext(messages)) == [
            ("whole", f"{shown.start}.0", "all 1"),
            ("news", f"{shown.start}.1", "news 1"),
        ]
        for number in (2, 3):
            shown.show(b'"all %d"' % number, b'"light %d"' % number)
            shown.tell(number, b'"news %d"' % number)
        assert events(await anext(messages)) == [
            ("light", f"{shown.start}.1", "light 3"),
            ("news", f"{shown.start}.2", "news 2"),
            ("news", f"{shown.start}.3", "news 3"),
        ]
        viewer.leave()
        assert [each async for each in messages] == []
        assert shown.viewers == 0

    asyncio.run(watch())


def test_who_comes_back_misses_nothing_and_hears_nothing_twice() -> None:
    """By the mark of its last event; a mark of another start, or nonsense, means nothing."""

    async def watch() -> None:
        shown = Broadcast()
        for number in range(1, 6):
            shown.tell(number, b"%d" % number)
        for mark, expected in [
            (f"{shown.start}.3", [4, 5]),
            ("cafe.3", [1, 2, 3, 4, 5]),
            (f"{shown.start}.-1", [1, 2, 3, 4, 5]),
            (f"{shown.start}.{'9' * 5000}", [1, 2, 3, 4, 5]),
            (f"{shown.start}.999", []),
            ("", [1, 2, 3, 4, 5]),
        ]:
            viewer = shown.admit()
            message = await anext(viewer.messages(mark))
            assert [data for kind, _, data in events(message) if kind == "news"] == expected
            viewer.leave()

    asyncio.run(watch())


def test_there_is_room_for_so_many() -> None:
    """And again when one of them leaves."""

    async def watch() -> None:
        shown = Broadcast()
        viewers = [shown.admit() for _ in range(MAX_VIEWERS)]
        with pytest.raises(TooManyViewers):
            shown.admit()
        viewers[3].leave()
        shown.admit()

    asyncio.run(watch())


def test_in_silence_a_sign_of_life_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a connection that has broken is noticed on both sides; the end ends it."""
    monkeypatch.setattr(module, "HEARTBEAT", 0.01)

    async def watch() -> None:
        shown = Broadcast()
        messages = shown.admit().messages()
        await anext(messages)
        assert await anext(messages) == b": still here\n\n"
        shown.close()
        assert [each async for each in messages] == []

    asyncio.run(watch())


def test_what_is_kept_is_bounded() -> None:
    """However much happens."""
    shown = Broadcast()
    for number in range(1, 2000):
        shown.tell(number, b"%d" % number)
    assert len(json.loads(shown.news)) == module.KEPT
    assert shown.last_number == 1999
