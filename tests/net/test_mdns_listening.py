"""Listening to records: complete or in parts, kept in bounds, and asked for when they fade."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import zeroconf
from zeroconf._protocol.outgoing import DNSOutgoing

from potluck.net import mdns_source
from potluck.net.discovery import Advert
from potluck.net.mdns_listening import MAX_ASKED, MAX_NAMES, Listening
from potluck.net.mdns_records import Heard, label_of, properties_of
from support.discovering import advert
from support.quiet_network import Ear, Stranger, service
from support.threads import PATIENCE, eventually

__all__ = ["service"]


def test_a_flood_of_names_is_bounded(service: str) -> None:
    """The newest few hundred are kept, the rest are as good as gone."""
    gone: list[str] = []
    listening = Listening(service, lambda *_: True, lambda name, _: gone.append(name))
    crowd = [advert("f") for _ in range(MAX_NAMES + 50)]
    heard = Heard("", "", crowd[0].node, 1, 1, ())
    for each in crowd:
        listening._keep(label_of(each), heard)
    assert len(listening._names) == MAX_NAMES
    assert gone == [label_of(each) for each in crowd[:50]]


def test_names_without_records_cost_a_question_each(service: str) -> None:
    """A thousand pointers that lead nowhere: a bounded number is asked for, nothing waits."""
    with Ear(service) as ear:
        eventually(lambda: ear.source._listening._browser is not None)
        begin = time.monotonic()
        for _ in range(1000):
            ear.source._listening._changed(
                name=f"{label_of(advert('f'))}.{service}",
                state_change=zeroconf.ServiceStateChange.Added,
            )
        assert time.monotonic() - begin < PATIENCE / 2
        assert len(ear.source._listening._asked) == MAX_ASKED
        assert not ear.heard


def test_a_record_in_parts_is_asked_for_and_found(service: str) -> None:
    """Somebody may only have heard its name."""
    one = advert("a")
    with Ear(service) as ear, Stranger(service) as stranger:
        eventually(lambda: ear.source._listening._browser is not None)
        info = _silent_record(stranger, one, service)
        pointer = DNSOutgoing(0x8400)  # an answer, with authority
        pointer.add_answer_at_time(info.dns_pointer(), 0)
        stranger.zeroconf.send(pointer)
        eventually(lambda: ear.hears(one))


def test_it_is_asked_again_now_and_then(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who announced himself while the network was cut is found when it is whole."""
    monkeypatch.setattr(mdns_source, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(mdns_source, "ASK_EVERY", 0.1)
    first, late = advert("a"), advert("b")
    with Ear(service) as ear, Stranger(service) as stranger:
        stranger.forge(first)
        eventually(lambda: ear.hears(first))
        browser = ear.source._listening._browser
        _in_loop(stranger.zeroconf, browser.query_scheduler.stop)  # no questions of its own
        _silent_record(stranger, late, service)
        eventually(lambda: ear.hears(first, late))


def _silent_record(stranger: Stranger, shown: Advert, service: str) -> zeroconf.ServiceInfo:
    """A record that is answered for, but was never announced."""
    info = zeroconf.ServiceInfo(
        service,
        f"{label_of(shown)}.{service}",
        port=shown.port,
        properties=properties_of(shown),
        server=f"{label_of(shown)[-12:]}.local.",
        parsed_addresses=["127.0.0.1"],
    )
    _in_loop(stranger.zeroconf, lambda: stranger.zeroconf.registry.async_add(info))
    return info


def _in_loop(opened: zeroconf.Zeroconf, action: Callable[[], None]) -> None:
    done = threading.Event()

    def act() -> None:
        action()
        done.set()

    assert opened.loop is not None
    opened.loop.call_soon_threadsafe(act)
    assert done.wait(PATIENCE)


def test_one_who_died_silently_is_noticed_by_asking(service: str) -> None:
    """Its record has faded and is not answered for: asked once more, then it counts as gone."""
    dead, alive = advert("a"), advert("b")
    with Ear(service) as ear, Stranger(service) as stranger, Stranger(service) as other:
        stranger.forge(dead)
        other.forge(alive)
        eventually(lambda: ear.hears(dead, alive))
        _in_loop(stranger.zeroconf, lambda: stranger.zeroconf.registry.async_remove(stranger.said))
        ours = ear.source._zeroconf
        assert ours is not None
        faded = [
            record
            for records in list(ours.cache.cache.values())
            for record in records
            if record.type in (1, 16, 33)  # A, TXT, SRV
        ]
        _in_loop(ours, lambda: ours.cache.async_remove_records(faded))
        check = ear.source._listening.check
        check()
        assert not ear.gone
        eventually(lambda: ear.source._listening._info(f"{label_of(alive)}.{service}") is not None)
        check()
        assert ear.gone == {f"{label_of(dead)}.{service}": "it no longer answers on the network"}
        assert ear.hears(alive)
