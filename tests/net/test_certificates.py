"""The authority of a namespace: recomputed by every member, valid whatever the clock says."""

from __future__ import annotations

import datetime as dt
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from potluck.net.certificates import Authority
from support.tls_pair import ATTIC, CALLED, CALLER, LAB

_KEY = Ed25519PublicKey.from_public_bytes(CALLER.public_key)
_YEARS = {"1970": 1, "1971": 31_536_000, "2090": 3_786_912_000, "9999": 253_402_214_400}


def common_name(name: x509.Name) -> str:
    """The readable part of a name."""
    return str(name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_every_member_computes_the_same_authority() -> None:
    """Byte for byte, also in another process; another secret gives another one."""
    script = (
        "from pathlib import Path; from potluck.net.certificates import Authority;"
        "from potluck.net.namespace import NetworkNamespace;"
        "print(Authority.of(NetworkNamespace('other name', b'l' * 32)).der.hex())"
    ).replace("other name", "other-name")
    elsewhere = subprocess.check_output([sys.executable, "-c", script], text=True).strip()
    assert bytes.fromhex(elsewhere) == Authority.of(LAB).der
    assert Authority.of(ATTIC).der != Authority.of(LAB).der


def test_a_node_gets_the_same_certificate_every_time() -> None:
    """Nothing in it is random, so nothing has to be kept."""
    first = Authority.of(LAB).issue(_KEY)
    assert first == Authority.of(LAB).issue(_KEY)
    assert common_name(first.subject) == CALLER.id
    assert first != Authority.of(LAB).issue(Ed25519PublicKey.from_public_bytes(CALLED.public_key))


def test_only_the_own_authority_signed_it() -> None:
    """The signature tells namespaces apart."""
    certificate = Authority.of(LAB).issue(_KEY)
    certificate.verify_directly_issued_by(Authority.of(LAB).certificate)
    with pytest.raises((InvalidSignature, ValueError)):
        certificate.verify_directly_issued_by(Authority.of(ATTIC).certificate)


def test_certificates_reveal_the_tag_and_the_node_id_only() -> None:
    """Strangers get to see them, so neither the secret nor its name may be inside."""
    authority = Authority.of(LAB)
    certificate = authority.issue(_KEY)
    assert common_name(certificate.issuer) == f"potluck {LAB.discovery_tag}"
    for der in (authority.der, certificate.public_bytes(Encoding.DER)):
        assert LAB.secret not in der
        assert LAB.name.encode() not in der
        assert authority.key.private_bytes_raw() not in der


def test_certificates_are_valid_for_ever() -> None:
    """From the beginning of computer time to the last second that can be written."""
    for certificate in (Authority.of(LAB).certificate, Authority.of(LAB).issue(_KEY)):
        assert certificate.not_valid_before_utc == dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        assert certificate.not_valid_after_utc.year == 9999


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
@pytest.mark.parametrize("purpose", ["sslclient", "sslserver"])
@pytest.mark.parametrize("year", list(_YEARS))
def test_openssl_accepts_them_at_any_time(tmp_path: Path, purpose: str, year: str) -> None:
    """A board without a clock, and a clock that is wrong by decades, break nothing."""
    authority = Authority.of(LAB)
    (tmp_path / "ca").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    (tmp_path / "node").write_bytes(authority.issue(_KEY).public_bytes(Encoding.PEM))
    command = ["openssl", "verify", "-x509_strict", "-attime", str(_YEARS[year])]
    command += ["-purpose", purpose, "-CAfile", str(tmp_path / "ca"), str(tmp_path / "node")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_authority_may_sign_certificates_and_nothing_else() -> None:
    """Every member has its key, so it must not pass for a node; and nodes cannot sign."""
    authority = Authority.of(LAB)
    usage = authority.certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.digital_signature) == (True, False)
    constraints = authority.issue(_KEY).extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca
