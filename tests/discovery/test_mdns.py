"""Opening multicast DNS: on the right interfaces, with an error that helps, and not in children."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import zeroconf
from hypothesis import given
from hypothesis import strategies as st
from zeroconf._protocol.outgoing import DNSOutgoing

from potluck._types import NodeId
from potluck.discovery import mdns
from potluck.discovery.mdns import (
    MAX_ASKED,
    MAX_HOSTS,
    MAX_NAMES,
    MAX_TEXT,
    DiscoveryUnavailable,
    MdnsListener,
    MdnsRecord,
    is_label,
    label_of,
    open_zeroconf,
    properties_of,
    read_record,
    scoped,
    unscoped,
)
from potluck.discovery.records import Advert
from potluck.identity.namespace import NetworkNamespace
from potluck.net.addresses import Address
from support.discovering import ATTIC, LAB, advert
from support.forks import in_child
from support.quiet_network import Ear, Stranger, service
from support.threads import PATIENCE, eventually


def test_the_number_of_an_interface_becomes_its_name() -> None:
    """A link-local address is only good with its interface; other addresses need none."""
    loopback = socket.if_nametoindex("lo")
    assert scoped(f"fe80::1%{loopback}") == "fe80::1%lo"
    assert scoped("fe80::1%999999") == "fe80::1"
    assert scoped("fd00::1%3") == "fd00::1"
    assert scoped("10.0.0.1") == "10.0.0.1"
    assert unscoped("fe80::1%lo") == "fe80::1"


class _Deaf:
    """Zeroconf that notes what it was asked for, and cannot do it."""

    asked: list[list[str | int]]

    def __init__(self, interfaces: list[str | int]) -> None:
        self.asked.append(interfaces)
        self.engine = self
        self.senders: list[object] = []

    def close(self) -> None:
        """Nothing to close."""


def test_both_families_are_tried_then_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv6 by the interface's number, for that is what its multicast needs."""
    _Deaf.asked = []
    monkeypatch.setattr(zeroconf, "Zeroconf", _Deaf)
    index = socket.if_nametoindex("lo")
    with pytest.raises(DiscoveryUnavailable, match=r"no interface .* can multicast\. Do this\."):
        open_zeroconf(["127.0.0.1", "::1"], hint="Do this.", both=True)
    with pytest.raises(DiscoveryUnavailable):
        open_zeroconf(["127.0.0.1", "::1"], hint="Do this.")
    with pytest.raises(DiscoveryUnavailable):
        open_zeroconf(["::1"], hint="Do this.", both=True)
    has_ipv6 = any(entry.address == "::1" for entry in psutil.net_if_addrs()["lo"])
    first, third = ([["127.0.0.1", index]], [[index]]) if has_ipv6 else ([], [])
    assert _Deaf.asked == [*first, ["127.0.0.1"], ["127.0.0.1"], *third, ["::1"]]


def test_the_words_of_the_system_are_part_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for help can quote them."""

    def refused(**_options: object) -> None:
        raise OSError(98, "Address in use")

    monkeypatch.setattr(zeroconf, "Zeroconf", refused)
    with pytest.raises(DiscoveryUnavailable, match=r"Address in use\. Do this\."):
        open_zeroconf(["127.0.0.1"], hint="Do this.")


def test_a_forked_child_lets_go_of_the_sockets() -> None:
    """A data loader must not answer for its parent, nor keep the port."""
    opened = open_zeroconf(["127.0.0.1"], hint="")
    try:
        eventually(lambda: len(opened.engine.readers) > 1)
        numbers = [each.fileno for each in opened.engine.readers]
        assert in_child(lambda: [_is_socket(number) for number in numbers]) == [False, False]
        assert all(_is_socket(number) for number in numbers)  # ours are as they were
    finally:
        opened.close()


def test_a_forked_child_closes_nothing_that_is_not_its_parents_zeroconf() -> None:
    """One that was closed has numbers that belong to others by now."""
    opened = open_zeroconf(["127.0.0.1"], hint="")
    eventually(lambda: len(opened.engine.readers) > 1)
    numbers = [each.fileno for each in opened.engine.readers]
    opened.close()
    eventually(lambda: not any(map(_is_socket, numbers)))
    taken = [socket.socket() for _ in range(20)]
    try:
        again = [each.fileno() for each in taken if each.fileno() in numbers]
        assert again
        assert in_child(lambda: [_is_socket(number) for number in again]) == [True] * len(again)
    finally:
        for each in taken:
            each.close()


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------
# Listening to records: complete or in parts, kept in bounds, and asked for when they fade.

__all__ = ["service"]


def test_a_flood_of_names_is_bounded(service: str) -> None:
    """The newest few hundred are kept, the rest are as good as gone."""
    gone: list[str] = []
    listening = MdnsListener(service, lambda *_: True, lambda name, _: gone.append(name))
    crowd = [advert("f") for _ in range(MAX_NAMES + 50)]
    heard = MdnsRecord("", "", crowd[0].node, 1, 1, ())
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
        deadline = time.monotonic() + PATIENCE
        while not ear.hears(one):
            assert time.monotonic() < deadline, "the record was not found"
            pointer = DNSOutgoing(0x8400)  # an answer, with authority
            pointer.add_answer_at_time(info.dns_pointer(), 0)
            stranger.zeroconf.send(pointer)  # again and again: a datagram may be lost
            time.sleep(0.1)


def test_it_is_asked_again_now_and_then(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who announced himself while the network was cut is found when it is whole."""
    monkeypatch.setattr(mdns, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(mdns, "ASK_EVERY", 0.1)
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


# --------------------------------------------------------------------------------------------------
# An advert as a record of multicast DNS: read back as it was written, and refused otherwise.

HERE = ["10.0.0.5"]


def as_bytes(fields: dict[str, str]) -> dict[bytes, bytes | None]:
    """As zeroconf hands it out."""
    return {name.encode(): value.encode() for name, value in fields.items()}


def heard(fields: dict[str, str], hosts: list[str] = HERE, *, loopback: bool = False) -> MdnsRecord:
    """What a record says that says something."""
    found = read_record(as_bytes(fields), hosts, loopback=loopback)
    assert found is not None
    return found


def test_what_is_written_is_read() -> None:
    """Everything that an advert says, and the addresses of the record."""
    shown = advert("b")
    found = heard(properties_of(shown))
    assert (found.tag, found.job_tag, found.version) == (shown.tag, shown.job_tag, shown.version)
    assert (found.node, found.incarnation) == shown.process
    assert found.addresses == (Address("10.0.0.5", shown.port),)
    seen = found.sighting(advert("a"))
    assert seen is not None
    assert seen.process == shown.process
    assert seen.sources == ("mdns",)


def test_nothing_secret_and_no_plain_name_is_in_it() -> None:
    """Neither the secret, nor what the namespace or the job is called."""
    shown = advert(namespace=LAB, job="secret-project.py")
    text = f"{label_of(shown)} {properties_of(shown)}"
    assert "secret-project" not in text
    assert LAB.secret.hex() not in text
    assert LAB.name not in properties_of(shown).values()
    assert set(properties_of(shown)) == {"v", "l", "s", "t", "n", "i", "j", "p"}


def test_a_record_fits_into_every_limit_even_after_many_rotations() -> None:
    """Of names in DNS (63 bytes), of one string of a text (255), and our own."""
    namespace = NetworkNamespace("lab", b"0" * 32)
    for number in range(10):
        namespace = namespace.rotated(bytes([number]) * 32)
    shown = replace(advert(namespace=namespace), incarnation=(1 << 58), port=65535)
    assert len(label_of(shown)) <= 63
    assert is_label(label_of(shown))
    strings = [f"{name}={value}" for name, value in properties_of(shown).items()]
    assert max(map(len, strings)) <= 255
    assert sum(len(string) + 1 for string in strings) <= MAX_TEXT
    assert len(heard(properties_of(shown)).old_tags) == 8


def test_other_namespaces_other_jobs_and_ourselves_are_nobody() -> None:
    """Whoever looks is told of his own namespace and job alone."""
    mine = advert("a")
    assert heard(properties_of(mine)).sighting(mine) is None
    assert heard(properties_of(advert("b", namespace=ATTIC))).sighting(mine) is None
    assert heard(properties_of(advert("b", job="other.py"))).sighting(mine) is None
    assert heard(properties_of(advert("a"))).sighting(mine) is not None


def test_an_absentee_and_those_who_have_changed_the_secret_recognise_each_other() -> None:
    """Whoever dials first brings it up to date.  The job cannot be compared."""
    absentee, member = advert("a"), advert("b", namespace=LAB.rotated(b"n" * 32))
    seen = heard(properties_of(member)).sighting(absentee)
    assert seen is not None
    assert seen.job_tag == ""
    assert heard(properties_of(absentee)).sighting(member) is not None
    assert heard(properties_of(advert("c", namespace=ATTIC))).sighting(member) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("v", "one"),
        ("v", "1" * 7),
        ("t", "short"),
        ("t", "A" * 26),
        ("n", "x" * 31),
        ("n", "../../etc/passwd"),
        ("i", "0"),
        ("i", "-4"),
        ("i", "9" * 19),
        ("j", ""),
        ("p", "0"),
        ("p", "65536"),
        ("p", " 80"),
        ("p", "٣"),
    ],
)
def test_a_field_that_is_not_as_it_should_be_makes_the_record_none(field: str, value: str) -> None:
    """There is no guessing what somebody may have meant."""
    fields = properties_of(advert())
    assert read_record(as_bytes(fields), HERE, loopback=False) is not None
    assert read_record(as_bytes({**fields, field: value}), HERE, loopback=False) is None
    del fields[field]
    assert read_record(as_bytes(fields), HERE, loopback=False) is None


def test_a_field_without_a_value_is_no_field() -> None:
    """DNS allows a name alone."""
    fields = {**as_bytes(properties_of(advert())), b"n": None}
    assert read_record(fields, HERE, loopback=False) is None


def test_addresses_that_lead_back_to_ourselves_are_left_out() -> None:
    """Loopback on another machine is ours; so is a link-local address without its interface."""
    fields = properties_of(advert(port=80))
    for host in ("127.0.0.1", "::1", "fe80::1", "0.0.0.0", "224.0.0.251", "ff02::fb"):
        assert read_record(as_bytes(fields), [host], loopback=False) is None
        assert heard(fields, [host, "10.0.0.5"]).addresses == (Address("10.0.0.5", 80),)
    assert heard(fields, ["fe80::1%lo"]).addresses == (Address("fe80::1%lo", 80),)


def test_on_a_machine_without_a_network_loopback_is_meant() -> None:
    """Its processes find each other all the same."""
    fields = properties_of(advert(port=80))
    found = heard(fields, ["127.0.0.1"], loopback=True)
    assert found.addresses == (Address("127.0.0.1", 80),)


def test_a_record_cannot_point_at_a_whole_network() -> None:
    """The best few of its addresses count."""
    hosts = [f"10.0.0.{number}" for number in range(1, 100)] + ["fd00::1"]
    assert len(heard(properties_of(advert()), hosts).addresses) == MAX_HOSTS


def test_earlier_tags_that_make_no_sense_are_ignored() -> None:
    """The rest of the record stands."""
    fields = properties_of(advert("b"))
    for nonsense in ("", "x", "," * 50, "a" * 400):
        assert heard({**fields, "o": nonsense}).old_tags == ()


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"t", b"n", b"i", b"j", b"p", b"o", b"z"]),
        st.none() | st.binary(max_size=80) | st.from_regex(rb"[a-z2-7]{26}|[0-9]{1,20}"),
    ),
    st.lists(st.ip_addresses().map(str), max_size=5),
)
def test_any_text_is_read_or_refused(fields: dict[bytes, bytes | None], hosts: list[str]) -> None:
    """Nothing that somebody writes ends in an error."""
    found = read_record(fields, hosts, loopback=False)
    assert found is None or found.addresses


@pytest.mark.parametrize("label", ["", "Living Room TV", "a" * 56, "7-abcdefabcdef", "ä-b-c"])
def test_names_of_other_programs_are_not_looked_into(label: str) -> None:
    """They are told by their form."""
    assert not is_label(label)


def test_each_process_has_a_name_of_its_own() -> None:
    """Also two of one machine; so nobody has to ask whether it is taken."""
    one = advert("a")
    other = replace(one, incarnation=one.incarnation + 1)
    elsewhere = replace(one, node=NodeId("b" * 32))
    assert len({label_of(each) for each in (one, other, elsewhere)}) == 3


# --------------------------------------------------------------------------------------------------
# Multicast DNS as a source: real records between real zeroconfs, honest ones and others.

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
        eventually(lambda: list(ear.gone.values()) == ["it left"])


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
        assert list(ear.gone.values()) == ["it left"]


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
    monkeypatch.setattr(mdns, "LOOK_EVERY", 0.05)
    one = advert("a")
    with Ear(service) as ear, Ear(service, one) as other:
        eventually(lambda: ear.hears(one) and other.hears(one))
        before = other.source._zeroconf
        monkeypatch.setattr(mdns, "usable_hosts", lambda **_: ["127.0.0.2"])
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

    monkeypatch.setattr(mdns, "open_zeroconf", refused)
    one = advert("a")
    with Ear(service, one) as ear:
        eventually(lambda: ear.source.status == "There is no network. Plug it in.")
        monkeypatch.setattr(mdns, "LOOK_EVERY", 0.05)
        ear.source.update(replace(one, port=7))  # does not wait for the next look
        eventually(lambda: len(tries) > 3)
        assert min(after - before for before, after in itertools.pairwise(tries[2:])) > 0.04
        monkeypatch.setattr(mdns, "open_zeroconf", open_zeroconf)
        eventually(lambda: ear.hears(replace(one, port=7)))


@pytest.mark.parametrize("error", [zeroconf.NotRunningException(), ZeroDivisionError("a fault")])
def test_an_announcement_that_fails_is_told_and_tried_again(
    service: str,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it fails of."""
    monkeypatch.setattr(mdns, "LOOK_EVERY", 0.05)

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
