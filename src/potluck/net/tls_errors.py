"""What TLS says when it fails, in sentences for people.

OpenSSL has its own words for a handshake that failed ("tlsv1 alert unknown ca").  Here they become
what most likely happened at home and what to do about it; the original stays in ``cause``.
"""

from __future__ import annotations

import ssl

from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame

__all__ = [
    "AnotherNamespace",
    "NodeMismatch",
    "during_handshake",
    "on_open_channel",
    "plain_text",
]

_SAME_NAMESPACE = (
    "Check that both use the same namespace (--namespace, POTLUCK_NAMESPACE). If one was away when "
    "the secret was rotated, or never was paired, pair the two: potluck pair"
)
_NOT_POTLUCK = (
    "It is probably another program: check the address and the port. If it is Potluck, it may run "
    "with the insecure namespace while this side does not."
)
_OLD_TLS = (
    "Potluck speaks TLS 1.3 only. If the other side is Potluck too, update it; a virus scanner or "
    "proxy that inspects connections must leave this one alone."
)

# Words of OpenSSL -> what it means, what to do.  The first line that occurs decides.
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it showed no certificate", _NOT_POTLUCK),
    ("CERTIFICATE_REQUIRED", "it asks for a certificate and got none", _SAME_NAMESPACE),
    ("UNKNOWN_CA", "it does not belong to our namespace, and said so", _SAME_NAMESPACE),
    ("PROTOCOL_VERSION", "it does not speak TLS 1.3, and said so", _OLD_TLS),
    ("UNSUPPORTED_PROTOCOL", "it does not speak TLS 1.3", _OLD_TLS),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS 1.3", _OLD_TLS),
    ("VERSION_TOO_LOW", "it does not speak TLS 1.3", _OLD_TLS),
    ("NO_SHARED_CIPHER", "it has no cipher in common with us", _OLD_TLS),
    ("ALERT_HANDSHAKE_FAILURE", "it has no cipher in common with us, and said so", _OLD_TLS),
    ("ALERT_BAD_CERTIFICATE", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_CERTIFICATE", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_DECRYPT_ERROR", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_ACCESS_DENIED", "it does not accept us", _SAME_NAMESPACE),
)

# Why a certificate was not accepted: numbers of X509_V_ERR_*, stable across versions of OpenSSL.
_CERTIFICATES = {
    7: "its certificate is forged or damaged",
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: "its certificate was made by itself, not by a namespace",
    19: "it belongs to another namespace",
    20: "it belongs to another namespace",
    21: "it belongs to another namespace",
}


_OTHER_SECRET = frozenset({19, 20, 21})


class AnotherNamespace(HandshakeRefused):
    """The other side showed a certificate under a secret that is not ours now."""


class NodeMismatch(HandshakeRefused):
    """A member of the namespace answered, but not the one that was called."""


def plain_text(first: bytes, host: str | None) -> HandshakeRefused:
    """The other side's first bytes are no TLS at all."""
    return HandshakeRefused(
        f"{_who(host)} does not speak TLS: it began with {first[:16]!r}",
        host=host,
        got=first[:16],
        hint=_NOT_POTLUCK,
    )


def during_handshake(error: ssl.SSLError, host: str | None) -> HandshakeRefused:
    """The two could not agree on a connection."""
    words = (error.reason or str(error)).upper().replace(" ", "_")
    meaning, hint = "the two could not agree", _NOT_POTLUCK
    kind = HandshakeRefused
    if isinstance(error, ssl.SSLCertVerificationError):
        default = "its certificate is not one that Potluck makes"
        meaning, hint = _CERTIFICATES.get(error.verify_code, default), _SAME_NAMESPACE
        if error.verify_code in _OTHER_SECRET:
            kind = AnotherNamespace
    else:
        for key, *found in _MEANINGS:
            if key in words:
                meaning, hint = found
                break
    message = f"No connection with {_who(host)}, because {meaning}"
    return kind(message, host=host, cause=_cause(error), hint=hint)


def on_open_channel(error: ssl.SSLError, host: str | None) -> DistributedError:
    """The connection had been made, and then something came that does not belong there."""
    return MalformedFrame(
        f"The bytes from {_who(host)} were damaged or forged on the way",
        host=host,
        cause=_cause(error),
        hint="If this happens again, suspect the memory or the network hardware of either machine.",
    )


def _who(host: str | None) -> str:
    return host or "the other side"


def _cause(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return (error.reason or str(error)).replace("_", " ").lower()
