"""Everything that reads what a stranger sent: whatever he sends, it is refused in our own words.

The parsers, and where each is fed with arbitrary and with damaged bytes:

* TLS records and handshakes: ``test_tls.py``; the name a caller gives in them: here
* certificates: here
* frame headers: ``test_frames.py``; the first frame of a connection: ``test_opening.py``,
  ``test_acceptor_fuzz.py``; refusals, as whoever dials reads them: ``test_opening_refusals.py``
* hellos and the answers to them: ``tests/test_messages.py``
* messages of a pairing: ``tests/core/test_pairing_messages.py``, ``test_pairing.py``
* answers to a search: ``test_pairing_discovery.py`` and here
* rosters: ``tests/core/test_roster_records.py``
"""

from __future__ import annotations

import contextlib
import ssl
import warnings
from unittest import mock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.errors import DistributedError, HandshakeRefused
from potluck.net.certificates import Authority
from potluck.net.pairing_discovery import SERVICE, _Answers
from potluck.net.security import Security
from potluck.net.tls_context import peer_public_key
from support.tls_pair import CALLED, CALLER, LAB, stranger

CERTIFICATE = (
    Authority.of(LAB)
    .issue(Ed25519PublicKey.from_public_bytes(CALLER.public_key))
    .public_bytes(Encoding.DER)
)


def spliced(data: bytes) -> st.SearchStrategy[bytes]:
    """The same bytes with others put in their place, or added, or some left out."""
    places = st.tuples(st.integers(0, len(data)), st.integers(0, 40))
    return st.builds(
        lambda place, noise: data[: place[0]] + noise + data[place[0] + place[1] :],
        places,
        st.binary(max_size=40),
    )


@given(st.binary(max_size=600) | spliced(CERTIFICATE))
@example(b"")
@example(b"\x30\x84\xff\xff\xff\xff")  # a length of four gigabytes
def test_any_certificate_is_ours_or_refused(der: bytes) -> None:
    """A key of 32 bytes, or our error; whatever the bytes claim to be."""
    conversation = mock.Mock(spec=ssl.SSLObject)
    conversation.getpeercert.return_value = der
    with warnings.catch_warnings(), contextlib.suppress(HandshakeRefused):
        warnings.simplefilter("ignore")  # of the library, about certificates it calls unusual
        assert len(peer_public_key(conversation)) == 32


def first_flight(name: str | None) -> bytes:
    """How a stranger opens TLS when he names a server; b"" if no program would say it."""
    outgoing = ssl.MemoryBIO()
    try:
        tls = stranger(server_side=False).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    except (TypeError, ValueError):
        return b""
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


names = st.text(max_size=300) | st.text("0123456789abcdef.-", min_size=1, max_size=250)


@given(names)
@example(LAB.discovery_tag)
@example(LAB.discovery_tag[:-1])
@example("a" * 255)
def test_whatever_server_a_stranger_names_he_has_to_prove_himself(name: str) -> None:
    """The tag only says which secret he means; naming ours does not show that he has it."""
    channel = Security(LAB, CALLED).answer_channel("somebody")
    assert channel is not None
    with contextlib.suppress(DistributedError):
        channel.receive(first_flight(name))
    assert not channel.handshake_done
    with pytest.raises(DistributedError):
        channel.receive_eof()


HELLO = first_flight(LAB.discovery_tag)


@given(spliced(HELLO))
def test_a_damaged_opening_is_refused_in_our_words(data: bytes) -> None:
    """The name, its length, the extension around it: nothing else is raised, nothing granted."""
    channel = Security(LAB, CALLED).answer_channel("somebody")
    assert channel is not None
    with contextlib.suppress(DistributedError):
        channel.receive(data)
    assert not channel.handshake_done


labels_like_ours = st.builds(
    "{}-{}".format, st.text("0123456789٣", max_size=3), st.text("0123456789abcdef", max_size=13)
)


@given(st.lists(st.text(max_size=80) | labels_like_ours, max_size=5))
def test_any_name_may_answer_a_search(labels: list[str]) -> None:
    """Only those of our form come through, with a number that can be compared."""
    answers = _Answers()
    for label in labels:
        answers(name=f"{label}.{SERVICE}", service_type=SERVICE)
    while (found := answers.next_label(0)) is not None:
        assert 0 <= int(found[1][1]) < 1 << 32
