"""An advert as a record of multicast DNS: read back as it was written, and refused otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.net.addresses import Address
from potluck.net.mdns_records import (
    MAX_HOSTS,
    MAX_TEXT,
    Heard,
    is_label,
    label_of,
    properties_of,
    read_record,
)
from potluck.net.namespace import NetworkNamespace
from potluck.vocabulary import NodeId
from support.discovering import ATTIC, LAB, advert

HERE = ["10.0.0.5"]


def as_bytes(fields: dict[str, str]) -> dict[bytes, bytes | None]:
    """As zeroconf hands it out."""
    return {name.encode(): value.encode() for name, value in fields.items()}


def heard(fields: dict[str, str], hosts: list[str] = HERE, *, loopback: bool = False) -> Heard:
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
    assert set(properties_of(shown)) == {"v", "t", "n", "i", "j", "p"}


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
