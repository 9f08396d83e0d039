"""Who a node is: a key made once, kept private, the same for all who start at once."""

from __future__ import annotations

import hashlib
import os
import stat
import string
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import NodeId
from potluck.identity.node import (
    ADJECTIVES,
    ANIMALS,
    NODE_ID_SIZE,
    NodeIdentity,
    node_id,
    short_name,
)
from potluck.identity.private_files import DamagedFile, UnsafeFile

SEEDS = st.binary(min_size=32, max_size=32)

# Waits for a line, so that all start at the same moment, then shows the identity it found.
_STARTER = """
import sys
from potluck.identity.node import NodeIdentity
print("ready", flush=True)
sys.stdin.readline()
print(NodeIdentity.load_or_generate().id, flush=True)
"""


def start_at_once(count: int, home: Path) -> list[str]:
    """The ids that ``count`` processes find when they all start for the first time."""
    environment = {**os.environ, "POTLUCK_HOME": str(home)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _STARTER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=30)[0].strip() for process in processes]


def test_the_first_start_makes_a_key_and_later_starts_keep_it(tmp_path: Path) -> None:
    """The file is the raw 32-byte seed, mode 0600, in a directory of mode 0700."""
    file = tmp_path / "home" / "node_keypair"
    first = NodeIdentity.load_or_generate(file)
    assert NodeIdentity.load_or_generate(str(file)).id == first.id
    assert NodeIdentity(file.read_bytes()).id == first.id
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert list(file.parent.iterdir()) == [file]


def test_the_environment_moves_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With POTLUCK_HOME two nodes of one user live side by side."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "a"))
    first = NodeIdentity.load_or_generate()
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "b"))
    assert NodeIdentity.load_or_generate().id != first.id
    assert (tmp_path / "a" / "node_keypair").exists()


@pytest.mark.parametrize("count", [2, 8])
def test_processes_that_start_at_once_share_one_identity(tmp_path: Path, count: int) -> None:
    """Whoever comes second uses the key of the first; nobody reads half a key."""
    ids = start_at_once(count, tmp_path)
    kept = NodeIdentity.load_or_generate(tmp_path / "node_keypair").id
    assert ids == [kept] * count
    assert [path.name for path in tmp_path.iterdir()] == ["node_keypair"]


def test_a_killed_first_start_leaves_no_half_key(tmp_path: Path) -> None:
    """A file that was left behind under a temporary name is never taken for the key."""
    (tmp_path / ".node_keypair.0123456789abcdef.new").write_bytes(b"half")
    identity = NodeIdentity.load_or_generate(tmp_path / "node_keypair")
    assert NodeIdentity.load_or_generate(tmp_path / "node_keypair").id == identity.id


def test_a_key_that_others_may_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    """Loose permissions stop the start, and the message is the command that helps."""
    file = tmp_path / "node_keypair"
    identity = NodeIdentity.load_or_generate(file)
    file.chmod(0o644)
    with pytest.raises(UnsafeFile, match=f"chmod 600 {file}"):
        NodeIdentity.load_or_generate(file)
    file.chmod(0o600)
    assert NodeIdentity.load_or_generate(file).id == identity.id


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 64])
def test_a_damaged_key_is_never_replaced_silently(tmp_path: Path, content: bytes) -> None:
    """A new identity would shut this machine out of its namespace, so a person has to decide."""
    file = tmp_path / "node_keypair"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with pytest.raises(DamagedFile, match="paired again"):
        NodeIdentity.load_or_generate(file)
    assert file.read_bytes() == content


def test_ephemeral_identities_differ_and_are_kept_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made from chance alone and touch no file."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    assert NodeIdentity.ephemeral().id != NodeIdentity.ephemeral().id
    assert not (tmp_path / "home").exists()


@given(SEEDS)
def test_the_id_is_a_hash_of_the_public_key(seed: bytes) -> None:
    """Whoever knows the public key knows the id, and it fits into a host name."""
    identity = NodeIdentity(seed)
    public_key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    assert identity.public_key == public_key
    assert identity.id == node_id(public_key)
    assert len(identity.id) == NODE_ID_SIZE
    assert set(identity.id) <= set(string.ascii_lowercase + string.digits)


def test_ids_and_names_never_change_between_versions() -> None:
    """Rosters hold ids and people remember names: both are fixed for a given key."""
    identity = NodeIdentity(hashlib.sha256(b"example").digest())
    assert identity.id == "ze5oi3iauwdehyfw2zrotv6x6iabaea2"
    assert identity.short_name == "regal-raccoon"


def test_a_seed_has_32_bytes() -> None:
    """Anything else is not a key."""
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        NodeIdentity(bytes(31))


@given(SEEDS, st.binary(), st.text(max_size=20))
def test_a_signature_is_recognised(seed: bytes, message: bytes, purpose: str) -> None:
    """With the right key, message and purpose a signature holds."""
    identity = NodeIdentity(seed)
    signature = identity.sign(message, purpose=purpose)
    assert NodeIdentity.verify(identity.public_key, signature, message, purpose=purpose)


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_what_strangers_invent_is_no_signature(
    public_key: bytes, signature: bytes, message: bytes
) -> None:
    """Keys and signatures of any length and content are False, never an error."""
    assert not NodeIdentity.verify(public_key, signature, message)


def test_a_signature_holds_for_its_message_purpose_and_key_only() -> None:
    """Each of the three changed makes it worthless."""
    me, other = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    signature = me.sign(b"soup", purpose="menu")
    assert not NodeIdentity.verify(me.public_key, signature, b"salad", purpose="menu")
    assert not NodeIdentity.verify(me.public_key, signature, b"soup", purpose="revocation")
    assert not NodeIdentity.verify(other.public_key, signature, b"soup", purpose="menu")
    assert not NodeIdentity.verify(me.public_key, signature, b"usoup", purpose="men")


def test_a_signature_is_no_tls_handshake() -> None:
    """Nobody can have us sign the bytes by which TLS proves an identity."""
    me = NodeIdentity.ephemeral()
    proof = b" " * 64 + b"TLS 1.3, client CertificateVerify\0" + bytes(32)
    key = Ed25519PrivateKey.generate()
    assert me.sign(proof) != me._key.sign(proof)
    assert key.sign(proof) != me.sign(proof)


def test_the_key_is_never_shown() -> None:
    """Neither repr nor the encrypted form for TLS contains the seed."""
    seed = bytes(range(1, 33))
    identity = NodeIdentity(seed)
    assert repr(identity) == f"NodeIdentity({identity.short_name}, {identity.id})"
    pem = identity.private_key_pem(b"password")
    assert pem.startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")


@given(st.text())
def test_every_id_has_a_readable_name(text: str) -> None:
    """Two words, the same every time."""
    name = short_name(NodeId(text))
    adjective, animal = name.split("-")
    assert (adjective in ADJECTIVES, animal in ANIMALS) == (True, True)
    assert short_name(NodeId(text)) == name


def test_the_words_of_names_are_many_and_plain() -> None:
    """128 different words each: every value of a byte is as likely as any other."""
    for words in (ADJECTIVES, ANIMALS):
        assert len(words) == len(set(words)) == 128
        assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_identities_of_one_key_are_equal(tmp_path: Path) -> None:
    """However often it is loaded; as a member of a set it is one."""
    first, second = (NodeIdentity.load_or_generate(tmp_path / "key") for _ in range(2))
    other = NodeIdentity.ephemeral()
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, other}) == 2
    assert first != other
    assert first != first.id
