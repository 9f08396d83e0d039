"""The first record of TLS: name and groups are read where they were written, nowhere else."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.net.client_hello import first_record_size, read_hello
from support.hostile_hellos import hostile_hello


def client_hello(
    name: str | None,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    context: ssl.SSLContext | None = None,
) -> bytes:
    """What opens a TLS conversation with a server of that name."""
    context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = version
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HELLO = client_hello("abcdefgh234567abcdefgh2345")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
@pytest.mark.parametrize("name", ["abcdefgh234567abcdefgh2345", "a", "x" * 63, None])
def test_the_name_comes_back_as_it_was_given(name: str | None, version: ssl.TLSVersion) -> None:
    """Also where there is none."""
    hello = client_hello(name, version)
    assert first_record_size(hello) == len(hello)
    assert read_hello(hello).server == (name or "")


def test_a_record_is_complete_when_all_of_it_is_there() -> None:
    """Its length is known from the fifth byte on; one that cannot be is left to TLS."""
    for size in range(len(HELLO)):
        assert size < first_record_size(HELLO[:size])
        assert not read_hello(HELLO[:size]).server or size > HELLO.index(b"abcdefgh")
    assert first_record_size(b"\x16\x03\x01\xff\xff") == 5


@given(st.binary(max_size=600))
def test_noise_names_nobody(data: bytes) -> None:
    """And raises nothing."""
    assert first_record_size(data) >= 5
    assert read_hello(data).server.isascii()


@given(st.integers(0, len(HELLO) - 1), st.integers(1, 255))
def test_a_damaged_record_names_nobody_or_plain_letters(place: int, change: int) -> None:
    """Whatever it names still has to be proved."""
    damaged = bytearray(HELLO)
    damaged[place] ^= change
    assert read_hello(damaged).server.isascii()


def test_what_is_no_hello_names_nobody() -> None:
    """An alert, another message of the handshake, a name that is no host, no letters."""
    at = HELLO.index(b"abcdefgh")
    for place, value in ((0, 21), (5, 2), (at - 3, 1), (at, 0xE9)):
        other = bytearray(HELLO)
        other[place] = value
        assert not read_hello(other).server


def test_the_groups_come_back_as_they_were_given() -> None:
    """Up to a bound: a caller that lists thousands has said enough."""
    for group in ("X25519", "prime256v1"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ecdh_curve(group)
        hello = client_hello(None, context=context)
        assert read_hello(hello).groups == ({"X25519": 29, "prime256v1": 23}[group],)
    assert 29 in read_hello(HELLO).groups
    assert len(read_hello(hostile_hello("X25519", groups=[*range(1000)])).groups) <= 64
