"""The certificate authority that every member of a namespace can recompute.

Its key is derived from the namespace's secret, so nobody has to be asked for a certificate: a node
signs one for its own key, and every other member recognises the signature.  To show a certificate
of the namespace proves membership; to use it proves the node's key, and with it the node's id.
Everything here is deterministic: the same secret and key give the same bytes, always.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.net.identity import node_id
from potluck.net.namespace import NetworkNamespace

__all__ = ["Authority"]

# Home machines boot without a clock (1970) or with a wrong one.  Membership ends when the secret is
# rotated, never by date, so the dates cover all that can be written; the last second of 9999 is
# what RFC 5280 prescribes for "no well-defined expiration".
_BEGIN = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_END = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Authority:
    """The authority of one namespace: its key, and the certificate that members trust."""

    key: Ed25519PrivateKey
    certificate: x509.Certificate

    @classmethod
    def of(cls, namespace: NetworkNamespace) -> Authority:
        """Recompute it from the secret.

        Its name contains the discovery tag, which strangers may know, and nothing else: a server
        shows its certificate before it knows whom it is talking to.
        """
        key = Ed25519PrivateKey.from_private_bytes(namespace.subkey("certificate authority"))
        name = _name(f"potluck {namespace.discovery_tag}")
        public_key = key.public_key()
        builder = (
            _builder(name, name, public_key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            # Only to sign certificates: every member has this key, so it must be nobody's identity.
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return cls(key, builder.sign(key, None))

    def issue(self, public_key: Ed25519PublicKey) -> x509.Certificate:
        """A certificate for the node that has this key, as client and as server."""
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        name = _name(node_id(public_key.public_bytes_raw()))
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            _builder(name, self.certificate.subject, public_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(issuer, critical=False)
        )
        return builder.sign(self.key, None)

    @property
    def der(self) -> bytes:
        """The certificate as bytes."""
        return self.certificate.public_bytes(Encoding.DER)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: Ed25519PublicKey
) -> x509.CertificateBuilder:
    serial = hashlib.sha256(issuer.public_bytes() + public_key.public_bytes_raw()).digest()[:16]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(int.from_bytes(serial, "big") | 1)  # never zero
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
