"""Namespaces: a secret kept private, keys for each purpose, and which one is meant."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import UnsupportedOperation
from potluck.identity.namespace import (
    MAX_PREVIOUS,
    InvalidNamespaceName,
    NamespaceExists,
    NamespaceFiles,
    NetworkNamespace,
    Protection,
    Secrets,
    SecurityWarning,
    UnknownNamespace,
    WeakPassphrase,
    checked_name,
)
from potluck.identity.private_files import DamagedFile, UnsafeFile

SECRETS = st.binary(min_size=32, max_size=32)
PASSPHRASE = "unruly copper migrant walnut tracing spoof"  # noqa: S105  an example

_STARTER = """
import sys
from potluck.identity.namespace import NetworkNamespace
print("ready", flush=True)
sys.stdin.readline()
print(NetworkNamespace.load_or_create().discovery_tag, flush=True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a machine of its own."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("POTLUCK_NAMESPACE", raising=False)
    return tmp_path / "home"


# --- making and finding one ---


def test_first_use_creates_a_private_namespace_silently(home: Path) -> None:
    """Nothing has to be set up; the secret is kept, for this user only."""
    first = NetworkNamespace.load_or_create()
    assert (first.name, first.protection) == ("home", Protection.SECRET)
    assert NetworkNamespace.load_or_create() == first
    file = home / "namespaces" / "home" / "secret"
    assert file.read_bytes() == first.secret
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for directory in (home, file.parent.parent, file.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_processes_that_start_at_once_share_one_namespace(home: Path) -> None:
    """Eight first starts at the same moment end up in the same group."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _STARTER],
            env={**os.environ, "POTLUCK_HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    tags = [process.communicate(timeout=30)[0].strip() for process in processes]
    assert tags == [NetworkNamespace.load("home").discovery_tag] * 8


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the environment over the default."""
    NetworkNamespace.generate("attic").save()
    monkeypatch.setenv("POTLUCK_NAMESPACE", "lab")
    assert NetworkNamespace.load_or_create("cellar").name == "cellar"
    assert NetworkNamespace.load_or_create().name == "lab"
    monkeypatch.setenv("POTLUCK_NAMESPACE", "")
    assert NetworkNamespace.load_or_create().name == "attic"


def test_the_only_namespace_in_use_is_the_default() -> None:
    """After pairing into "lab" nobody has to say "lab", also if an unused "home" is left over."""
    NetworkNamespace.load_or_create()
    lab = NetworkNamespace.generate("lab")
    lab.save()
    assert NetworkNamespace.load_or_create() == lab


def test_home_is_the_default_among_several_in_use() -> None:
    """With no "home" among them, one has to choose."""
    for name in ("lab", "attic"):
        NetworkNamespace.generate(name).save()
    with pytest.raises(UnknownNamespace, match=r"attic, lab\. Choose one with --namespace"):
        NetworkNamespace.load_or_create()
    NetworkNamespace.generate("home").save()
    assert NetworkNamespace.load_or_create().name == "home"


def test_loading_what_is_not_kept_names_what_is() -> None:
    """A typing mistake is seen at once."""
    with pytest.raises(UnknownNamespace, match="Its groups: none"):
        NetworkNamespace.load("lab")
    NetworkNamespace.generate("lab").save()
    with pytest.raises(UnknownNamespace, match=r"'lba'.*Its groups: lab") as caught:
        NetworkNamespace.load("lba")
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("name", ["home", "a", "my.lab-2_x", "0", "x" * 32])
def test_ordinary_names_are_accepted(name: str) -> None:
    """Letters, digits, and dots, dashes and underscores between them."""
    assert NetworkNamespace.generate(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            " ",
            ".",
            "..",
            "../etc",
            "a/b",
            "a\\b",
            "/abs",
            "-rf",
            "a.",
            "x" * 33,
            "a b",
            "a\nb",
        ),
        *(
            "a\0b",
            "con",
            "NUL",
            "com1.txt",
            "~",
            "$HOME",
            "na\u00efve",
            "\uff41",
            "\u017f",
            "\u212a",
        ),
    ],
)
def test_names_that_could_leave_the_directory_are_refused(name: str) -> None:
    """Also names that some system would read differently."""
    with pytest.raises(InvalidNamespaceName, match="not a valid group name"):
        NetworkNamespace.generate(name)
    with pytest.raises(InvalidNamespaceName):
        NamespaceFiles(Path("/nowhere"), name)


@given(st.text(max_size=40))
def test_an_accepted_name_is_one_plain_directory(text: str) -> None:
    """Whatever was typed, the result stays within its parent directory."""
    try:
        name = checked_name(text)
    except InvalidNamespaceName:
        return
    assert Path("/base", name).resolve().parent == Path("/base")
    assert name == checked_name(name)


def test_capitals_and_spaces_around_a_name_do_not_matter() -> None:
    """Two people may type the same name differently, and disks may ignore case."""
    assert NetworkNamespace.load_or_create(" Lab ") == NetworkNamespace.load_or_create("lab")


@pytest.mark.parametrize("name", ["open", "Insecure"])
def test_the_names_of_the_unprotected_are_reserved(name: str) -> None:
    """Nobody can believe to be protected by a secret when asking for them."""
    with pytest.raises(InvalidNamespaceName, match="reserved"):
        NetworkNamespace.generate(name)
    with pytest.warns(SecurityWarning):
        assert NetworkNamespace.load_or_create(name).protection.value == name.lower()
    assert NetworkNamespace.stored() == []


def test_a_secret_has_32_bytes() -> None:
    """Shorter ones are refused, as are shorter previous ones."""
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        NetworkNamespace("lab", bytes(31))
    with pytest.raises(ValueError, match="32 bytes, not 5"):
        NetworkNamespace("lab", bytes(32), (b"short",))


# --- passphrases ---


def test_a_passphrase_gives_the_same_namespace_everywhere(tmp_path: Path) -> None:
    """Name and passphrase decide, typed a little differently or not; the machine does not."""
    one = NetworkNamespace.from_passphrase("lab", PASSPHRASE)
    two = NetworkNamespace.from_passphrase(" LAB", f" {PASSPHRASE}\n", home=tmp_path / "other")
    assert one == two
    assert one.discovery_tag == "jj4jhc2o2mk3ahr3s3ze5y5sia"


def test_another_name_or_passphrase_gives_another_namespace() -> None:
    """The name salts the passphrase, so nobody can prepare a table for all."""
    one = NetworkNamespace.from_passphrase("lab", PASSPHRASE)
    assert NetworkNamespace.from_passphrase("attic", PASSPHRASE) != one
    assert NetworkNamespace.from_passphrase("lab", PASSPHRASE.title()) != one


def test_a_passphrase_stays_one_when_it_is_kept(home: Path) -> None:
    """Whoever knows it is a member, so there is nothing to rotate; it is replaced by another."""
    namespace = NetworkNamespace.from_passphrase("lab", PASSPHRASE)
    assert namespace.protection is Protection.PASSPHRASE
    assert not namespace.is_kept
    namespace.save()
    kept = NetworkNamespace.load("lab")
    assert kept == namespace
    assert kept.is_kept
    assert kept.protection is Protection.PASSPHRASE
    with pytest.raises(UnsupportedOperation, match="Choose another passphrase"):
        kept.rotated()
    NetworkNamespace.generate("lab").save(replace=True)
    assert NetworkNamespace.load("lab").protection is Protection.SECRET
    with pytest.raises(InvalidNamespaceName):
        NetworkNamespace.from_passphrase("open", PASSPHRASE)


def test_what_is_kept_is_known_under_an_earlier_secret_too(home: Path) -> None:
    """A process that started before the secret changed; another secret of that name is not it."""
    before = NetworkNamespace.load_or_create()
    before.rotated().save()
    assert before.is_kept
    assert not NetworkNamespace.generate().is_kept
    with pytest.warns(SecurityWarning):
        assert not NetworkNamespace.open().is_kept


def test_a_weak_passphrase_is_refused() -> None:
    """The secret never comes to be."""
    with pytest.raises(WeakPassphrase, match="could be guessed"):
        NetworkNamespace.from_passphrase("lab", "correct horse battery staple")


# --- those that protect less ---


def test_an_open_namespace_warns_and_is_the_same_for_everybody() -> None:
    """Encrypted, but anybody may come in; it is never kept."""
    with pytest.warns(SecurityWarning, match="any machine on this network can join"):
        one = NetworkNamespace.open()
    with pytest.warns(SecurityWarning):
        two = NetworkNamespace.open()
    assert one == two
    assert one.is_encrypted
    assert not one.is_unused


def test_an_insecure_namespace_warns_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """In the log and as a warning; and it has no keys that could be mistaken for real ones."""
    with (
        caplog.at_level(logging.WARNING),
        pytest.warns(SecurityWarning, match="NOTHING IS ENCRYPTED"),
    ):
        plain = NetworkNamespace.insecure()
    assert "NOTHING IS ENCRYPTED" in caplog.text
    assert not plain.is_encrypted
    with pytest.raises(UnsupportedOperation, match="plain TCP"):
        plain.subkey("anything")
    assert plain.discovery_tag


def test_only_a_secret_can_be_kept_rotated_or_deleted() -> None:
    """The open and the insecure namespace have nothing of their own."""
    with pytest.warns(SecurityWarning):
        unprotected = [NetworkNamespace.open(), NetworkNamespace.insecure()]
    for namespace in unprotected:
        for action in (namespace.save, namespace.delete, namespace.rotated):
            with pytest.raises(UnsupportedOperation, match="no secret of its own"):
                action()


# --- keys ---


@given(SECRETS, SECRETS)
def test_tags_and_keys_depend_on_the_secret_and_the_purpose(one: bytes, two: bytes) -> None:
    """Same secret, same tag; another secret or purpose, another key; none shows the secret."""
    lab, attic = NetworkNamespace("lab", one), NetworkNamespace("attic", two)
    assert (lab.discovery_tag == attic.discovery_tag) == (one == two)
    assert (lab == attic) == (one == two)
    assert lab.subkey("a") == NetworkNamespace("other", one).subkey("a")
    assert len({lab.secret, lab.subkey("a"), lab.subkey("b"), lab.subkey("discovery tag")}) == 4
    assert lab.subkey("a", 64)[:32] == lab.subkey("a")
    assert hash(lab) == hash(NetworkNamespace("other", one))


def test_keys_never_change_between_versions() -> None:
    """Members with different versions of Potluck have to find each other."""
    lab = NetworkNamespace("lab", bytes(range(32)))
    assert lab.discovery_tag == "xu7nu4xuhdh3yfugr6erlyqe3y"
    assert lab.subkey("example", 8).hex() == "500012797242886a"


def test_the_secret_is_never_shown() -> None:
    """Neither repr nor str of anything that holds it has a byte of it."""
    namespace = NetworkNamespace("lab", b"\xaa" * 32, (b"\xbb" * 32,))
    for text in (repr(namespace), str(namespace), repr(Secrets(b"\xaa" * 32, (b"\xbb" * 32,)))):
        assert "aa" not in text.replace(namespace.discovery_tag, "")
        assert "bb" not in text.replace(namespace.discovery_tag, "")
    assert namespace.discovery_tag in repr(namespace)


def test_a_namespace_equals_nothing_else() -> None:
    """Comparing with other types, or other kinds of protection, is simply unequal."""
    namespace = NetworkNamespace.generate()
    assert namespace != "home"
    assert namespace != NetworkNamespace("open", namespace.secret, protection=Protection.OPEN)


# --- keeping it ---


def test_a_saved_namespace_is_found_again() -> None:
    """With its earlier secrets, and listed."""
    lab = NetworkNamespace.generate("lab").rotated().rotated()
    lab.save()
    lab.save()
    kept = NetworkNamespace.load("lab")
    assert (kept.secret, kept.previous) == (lab.secret, lab.previous)
    assert NetworkNamespace.stored() == ["lab"]
    assert kept.roster_path == kept.directory / "roster"


def test_rotation_keeps_a_short_history_of_tags() -> None:
    """Absentees search under an old tag; only the last few are remembered."""
    namespace = NetworkNamespace.generate()
    tags: list[str] = []
    for _ in range(MAX_PREVIOUS + 3):
        tags.insert(0, namespace.discovery_tag)
        namespace = namespace.rotated()
    assert namespace.old_tags == tuple(tags[:MAX_PREVIOUS])
    assert namespace.discovery_tag not in namespace.old_tags
    namespace.save()
    assert NetworkNamespace.load("home").old_tags == namespace.old_tags


def test_rotation_to_a_given_secret() -> None:
    """A rotation agreed by others is taken over as it is."""
    old = NetworkNamespace.generate()
    new = old.rotated(b"n" * 32)
    assert new.has_secret(b"n" * 32)
    assert not new.has_secret(old.secret)
    assert new.previous == (old.secret,)


def test_an_unused_namespace_makes_way_for_pairing() -> None:
    """What was made silently is replaced silently, roster and all, until somebody has joined."""
    private = NetworkNamespace.load_or_create()
    assert private.is_unused
    private.roster_path.write_text("only me")
    paired = NetworkNamespace.generate("home")
    assert not paired.is_unused  # another one of that name is kept, and that is not this one
    paired.save()
    assert NetworkNamespace.load("home") == paired
    assert not paired.is_unused
    assert not paired.roster_path.exists()


def test_a_namespace_in_use_is_not_replaced() -> None:
    """Neither by pairing nor by a process that still holds an old secret, unless told to."""
    namespace = NetworkNamespace.load_or_create()
    namespace.mark_used()
    namespace.mark_used()
    assert not namespace.is_unused
    other = NetworkNamespace.generate("home")
    with pytest.raises(NamespaceExists, match="potluck unpair --namespace home"):
        other.save()
    rotated = namespace.rotated()
    rotated.save()
    with pytest.raises(NamespaceExists):
        namespace.save()
    assert NetworkNamespace.load("home") == rotated
    other.save(replace=True)
    assert NetworkNamespace.load("home") == other


def test_a_rotation_keeps_the_roster() -> None:
    """It is the same group under a new secret."""
    namespace = NetworkNamespace.generate()
    namespace.save()
    namespace.roster_path.write_text("all of us")
    namespace.rotated().save()
    assert namespace.roster_path.read_text() == "all of us"


def test_marking_concerns_the_namespace_that_was_meant() -> None:
    """A process that meets a peer after its namespace was replaced marks nothing."""
    old = NetworkNamespace.load_or_create()
    files = NamespaceFiles(old.home, old.name)
    files.delete()
    new = NetworkNamespace.load_or_create()
    files.mark_used(old.secret)
    assert new.is_unused


def test_deleting_forgets_everything() -> None:
    """Secret, history and roster are gone; deleting again is no error."""
    namespace = NetworkNamespace.generate("lab")
    namespace.delete()
    namespace.save()
    namespace.roster_path.write_text("all of us")
    namespace.delete()
    assert NetworkNamespace.stored() == []
    assert list(namespace.directory.parent.iterdir()) == []
    namespace.delete()


def test_foreign_directories_are_not_listed(home: Path) -> None:
    """What could not have been made by us is ignored."""
    NetworkNamespace.generate("lab").save()
    for name in (".lab.deleted", "Not Ours"):
        (home / "namespaces" / name).mkdir()
        (home / "namespaces" / name / "secret").touch()
    assert NetworkNamespace.stored() == ["lab"]


def test_a_secret_that_others_may_read_is_refused(home: Path) -> None:
    """The message is the command that helps."""
    NetworkNamespace.load_or_create()
    file = home / "namespaces" / "home" / "secret"
    file.chmod(0o644)
    with pytest.raises(UnsafeFile, match=f"chmod 600 {file}"):
        NetworkNamespace.load_or_create()


def test_a_damaged_secret_is_never_replaced_silently(home: Path) -> None:
    """Otherwise a machine would leave its group without a word."""
    NetworkNamespace.load_or_create()
    file = home / "namespaces" / "home" / "secret"
    file.write_bytes(b"half")
    with pytest.raises(DamagedFile, match="potluck unpair"):
        NetworkNamespace.load_or_create()
    assert file.read_bytes() == b"half"


def test_a_damaged_history_says_what_is_lost(home: Path) -> None:
    """It can be deleted; the message says at what price."""
    NetworkNamespace.generate("home").rotated().save()
    (home / "namespaces" / "home" / "previous").write_bytes(b"x" * 33)
    with pytest.raises(DamagedFile, match="Delete it"):
        NetworkNamespace.load("home")


def test_a_directory_that_cannot_be_removed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the system comes with the path."""
    namespace = NetworkNamespace.load_or_create()

    def busy(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(OSError, match="home could not be removed"):
        namespace.delete()
