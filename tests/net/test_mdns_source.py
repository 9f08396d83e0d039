"""Multicast DNS as a source: real records between real zeroconfs, honest ones and others."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import zeroconf

from potluck.net import mdns_source
from potluck.net.mdns import DiscoveryUnavailable, open_zeroconf
from potluck.net.mdns_records import label_of, properties_of
from support.discovering import advert
from support.quiet_network import Ear, Stranger, service
from support.threads import eventually

__all__ = ["service"]


def test_two_sources_hear_each_other_and_themselves(service: str) -> None:
    """Whose word counts is decided by whoever listens."""
    one, two = advert("a"), advert("b")
    with Ear(service, one) as first, Ear(service, two) as second:
        eventually(lambda: first.hears(one, two) and second.hears(one, two))
        assert first.source.status == "listening on 127.0.0.1"


def test_goodbye_is_heard_at_once(service: str) -> None:
    """Nobody has to wait until a record has faded."""
    one = advert("a")
    with Ear(service) as ear:
        with Ear(service, one):
            eventually(lambda: ear.hears(one))
        eventually(lambda: list(ear.gone.values()) == ["it said goodbye"])


def test_one_who_only_looks_is_not_heard(service: str) -> None:
    """An observer has no port."""
    one = advert("a")
    with Ear(service) as ear, Ear(service, one):
        eventually(lambda: ear.hears(one))
        assert ear.source._shown is None


def test_a_change_is_heard(service: str) -> None:
    """Another port under the same name; another job under another name."""
    one = advert("a", port=1)
    with Ear(service) as ear, Ear(service, one) as other:
        eventually(lambda: ear.hears(one))
        moved = replace(one, port=2)
        other.source.update(moved)
        eventually(lambda: ear.hears(moved))
        assert not ear.gone
        renamed = replace(moved, job_tag="b" * 16)
        other.source.update(renamed)
        eventually(lambda: ear.hears(renamed))
        assert list(ear.gone.values()) == ["it said goodbye"]


def test_what_was_a_strangers_is_looked_at_again_after_a_change(service: str) -> None:
    """After a rotation the others are where they were, but now they are ours."""
    one = advert("a")
    with Ear(service, advert("b")) as ear, Ear(service, one):
        eventually(lambda: len(ear.heard) == 2)
        ear.heard.clear()
        ear.source.update(advert("b", job="other.py"))
        eventually(lambda: one.node in {each.node for each in ear.heard.values()})


def test_new_addresses_are_shown_without_a_goodbye(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop comes back to its Wi-Fi: zeroconf is opened anew, and nobody thinks we had left."""
    monkeypatch.setattr(mdns_source, "LOOK_EVERY", 0.05)
    one = advert("a")
    with Ear(service) as ear, Ear(service, one) as other:
        eventually(lambda: ear.hears(one) and other.hears(one))
        before = other.source._zeroconf
        monkeypatch.setattr(mdns_source, "usable_hosts", lambda **_: ["127.0.0.2"])
        eventually(lambda: other.source.status == "listening on 127.0.0.2")
        eventually(
            lambda: any(heard.addresses[-1].host == "127.0.0.2" for heard in ear.heard.values())
        )
        assert other.source._zeroconf is not before
        assert not ear.gone


def test_where_multicast_cannot_be_opened_it_is_told_and_tried_again(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network may come later; until then it is not tried more often than now and then."""
    tries: list[float] = []

    def refused(*_: object, **__: object) -> None:
        tries.append(time.monotonic())
        raise DiscoveryUnavailable("There is no network", hint="Plug it in.")

    monkeypatch.setattr(mdns_source, "open_zeroconf", refused)
    one = advert("a")
    with Ear(service, one) as ear:
        eventually(lambda: ear.source.status == "There is no network. Plug it in.")
        monkeypatch.setattr(mdns_source, "LOOK_EVERY", 0.05)
        ear.source.update(replace(one, port=7))  # does not wait for the next look
        eventually(lambda: len(tries) > 3)
        assert min(after - before for before, after in itertools.pairwise(tries[2:])) > 0.04
        monkeypatch.setattr(mdns_source, "open_zeroconf", open_zeroconf)
        eventually(lambda: ear.hears(replace(one, port=7)))


@pytest.mark.parametrize("error", [zeroconf.NotRunningException(), ZeroDivisionError("a fault")])
def test_an_announcement_that_fails_is_told_and_tried_again(
    service: str,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it fails of."""
    monkeypatch.setattr(mdns_source, "LOOK_EVERY", 0.05)

    def refused(*_arguments: object, **_options: object) -> None:
        raise error

    one = advert("a")
    with monkeypatch.context() as patch:
        patch.setattr(zeroconf.Zeroconf, "register_service", refused)
        ear = Ear(service, one)
        eventually(lambda: ear.source.status.startswith("this process could not be announced"))
    with ear:
        eventually(lambda: ear.hears(one))
    assert ("opened anew" in caplog.text) == isinstance(error, ZeroDivisionError)


def test_a_machine_that_listens_elsewhere_shows_nothing_here(service: str) -> None:
    """An address that others cannot use is not shown to them."""
    elsewhere = replace(advert("a"), hosts=("10.9.9.9",))
    here = replace(advert("b"), hosts=("127.0.0.1",))
    with Ear(service) as ear, Ear(service, elsewhere) as silent, Ear(service, here):
        eventually(lambda: ear.hears(here))
        eventually(lambda: silent.source._shown_advert == elsewhere)
        assert silent.source._shown is None


def test_forged_records_are_not_heard(service: str) -> None:
    """Names of another form, texts of another form or size, ports that are none."""
    honest = advert("b")
    with Ear(service) as ear, Stranger(service) as stranger:
        label = label_of(honest)
        stranger.say("Living Room TV", {"v": "1"})
        last, last_but_one = ("1" if digit == "0" else "0" for digit in label[:-3:-1])
        stranger.say(
            f"{label[:-1]}{last}", {**properties_of(honest), "z": "x" * 200, "y": "x" * 200}
        )
        stranger.say(f"{label[:-2]}{last_but_one}{label[-1]}", b"\xff" * 20)
        stranger.forge(advert("c", port=0))
        stranger.forge(advert("d"), n="nobody")
        stranger.forge(advert("d"), p="65536")
        stranger.forge(honest)
        eventually(lambda: ear.hears(honest))
        assert not ear.gone  # so nobody else was heard before
