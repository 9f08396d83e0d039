"""Private files: never half-written, never read when others could have touched them."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.errors import DistributedError, IoError, Timeout
from potluck.identity import private_files
from potluck.identity.private_files import (
    DamagedFile,
    UnsafeFile,
    create_private,
    ensure_private_directory,
    exclusive_lock,
    maybe_lock,
    potluck_home,
    read_key,
    read_private,
    replace_private,
)


def mode(path: Path) -> int:
    """The permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_home_is_moved_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """POTLUCK_HOME decides where everything lies; without it, it is ~/.potluck."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "elsewhere"))
    assert potluck_home() == tmp_path / "elsewhere"
    monkeypatch.setenv("POTLUCK_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert potluck_home() == tmp_path / ".potluck"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with an unknown user the message names POTLUCK_HOME."""

    def nobody() -> Path:
        msg = "Could not determine home directory."
        raise RuntimeError(msg)

    monkeypatch.delenv("POTLUCK_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(IoError, match="Set POTLUCK_HOME"):
        potluck_home()


def test_a_new_directory_belongs_to_us_alone(tmp_path: Path) -> None:
    """Directories are made with mode 0700."""
    assert mode(ensure_private_directory(tmp_path / "a" / "b")) == 0o700


def test_a_directory_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """Whoever may write to the directory could swap the key; the message has the fix."""
    tmp_path.chmod(0o770)
    with pytest.raises(UnsafeFile, match=f"Run: chmod 700 {tmp_path}") as caught:
        ensure_private_directory(tmp_path)
    assert caught.value.got == 0o770
    tmp_path.chmod(0o755)
    ensure_private_directory(tmp_path)


def test_a_file_where_the_directory_should_be_is_named(tmp_path: Path) -> None:
    """A file in the way is an error of ours, with the path in it."""
    (tmp_path / "home").write_text("in the way")
    with pytest.raises(IoError, match="home could not be created"):
        ensure_private_directory(tmp_path / "home")


def test_a_private_file_is_created_once(tmp_path: Path) -> None:
    """The second creation changes nothing, and no temporary file remains."""
    file = tmp_path / "key"
    assert create_private(file, b"first")
    assert not create_private(file, b"second")
    assert read_private(file, limit=100) == b"first"
    assert mode(file) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_creation_is_exclusive_without_hard_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without hard links a lock decides who is first."""

    def unsupported(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    file = tmp_path / "key"
    won: list[bytes] = []
    contents = [bytes([number]) * 1000 for number in range(8)]

    def compete(content: bytes) -> None:
        if create_private(file, content):
            won.append(content)

    threads = [threading.Thread(target=compete, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [read_private(file, limit=2000)] == won


@pytest.mark.parametrize("write", [create_private, replace_private])
def test_content_and_name_are_forced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], object]
) -> None:
    """First the file, under another name, then the folder that has its name."""
    forced: list[tuple[bool, bool]] = []
    file, fsync = tmp_path / "key", os.fsync

    def noting(descriptor: int) -> None:
        forced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), file.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    write(file, b"content")
    assert forced == [(False, False), (True, True)]


def test_replacing_leaves_the_old_or_the_new_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the middle of writing costs nothing that was there."""
    file = tmp_path / "counter"
    replace_private(file, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(IoError, match="No space left"):
            replace_private(file, b"new")
    assert read_private(file, limit=100) == b"old"
    assert list(tmp_path.iterdir()) == [file]
    replace_private(file, b"new")
    assert read_private(file, limit=100) == b"new"


@pytest.mark.parametrize("loose", [0o644, 0o640, 0o604, 0o660, 0o601, 0o777])
def test_a_file_others_may_touch_is_refused(tmp_path: Path, loose: int) -> None:
    """Any right for group or others is too much; the message has the fix."""
    file = tmp_path / "my key"
    create_private(file, b"x" * 32)
    file.chmod(loose)
    with pytest.raises(UnsafeFile, match=r"Run: chmod 600 '.*my key'") as caught:
        read_private(file, limit=32)
    assert isinstance(caught.value, PermissionError)
    file.chmod(0o600)
    assert read_private(file, limit=32) == b"x" * 32


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that belongs to somebody else (sudo, a copied home) is named with its owner."""
    file = tmp_path / "key"
    create_private(file, b"x" * 32)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UnsafeFile, match=f"sudo chown {owner + 1} "):
        read_private(file, limit=32)


def test_root_is_not_advised_to_take_a_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After "sudo potluck" and a chown the user could not start any more."""
    file = tmp_path / "key"
    create_private(file, b"x" * 32)
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UnsafeFile, match="Run it without sudo") as caught:
        read_private(file, limit=32)
    assert "chown" not in str(caught.value)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A directory in the place of a key is refused in words."""
    with pytest.raises(DistributedError, match="not a regular file"):
        read_private(tmp_path, limit=32)


def test_a_file_that_cannot_be_opened_is_an_error_of_ours(tmp_path: Path) -> None:
    """Whatever the system says comes with the path."""
    (tmp_path / "file").touch()
    with pytest.raises(DistributedError, match="ls -l"):
        read_private(tmp_path / "file" / "key", limit=32)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must have 32 bytes and has 0"),
        (b"x" * 31, "must have 32 bytes and has 31"),
        (b"x" * 33, "must have 32 bytes and has more"),
        (bytes(32), "only zeros"),
    ],
)
def test_a_damaged_key_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Truncated, too long or zeroed by a power cut: never taken for a key."""
    file = tmp_path / "key"
    create_private(file, content)
    with pytest.raises(DamagedFile, match=f"{words}.*Do this"):
        read_key(file, advice="Do this.")


def test_what_does_not_exist_is_none(tmp_path: Path) -> None:
    """A missing file is no error: it is about to be made."""
    assert read_private(tmp_path / "nothing", limit=1) is None
    assert read_key(tmp_path / "nothing", advice="") is None


def test_a_lock_excludes_everybody_else(tmp_path: Path) -> None:
    """Held by one, it is refused to another, also within the same process."""
    held = maybe_lock(tmp_path / "lock")
    assert held is not None
    assert maybe_lock(tmp_path / "lock") is None
    held.release()
    held.release()
    with exclusive_lock(tmp_path / "lock"):
        assert maybe_lock(tmp_path / "lock") is None


def test_waiting_for_a_lock_has_an_end(tmp_path: Path) -> None:
    """A stopped holder makes others fail with an explanation, not hang."""
    with (
        exclusive_lock(tmp_path / "lock"),
        pytest.raises(Timeout, match="may be suspended") as caught,
        exclusive_lock(tmp_path / "lock", patience=0.05),
    ):
        pass
    assert caught.value.seconds == 0.05


def test_an_unusable_lock_file_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system without locks is named, with the way out."""
    with pytest.raises(DistributedError, match="POTLUCK_HOME"):
        maybe_lock(tmp_path / "missing" / "lock")

    def unsupported(_: int) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(private_files, "lock_file", unsupported)
    with pytest.raises(IoError, match=r"No locks available\. Set POTLUCK_HOME"):
        maybe_lock(tmp_path / "lock")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_neither_keeps_nor_drops_the_lock(tmp_path: Path) -> None:
    """The lock stays with the parent while the child lives, and goes when the parent lets go."""
    held = maybe_lock(tmp_path / "lock")
    assert held is not None
    context = multiprocessing.get_context("fork")
    parent_end, child_end = context.Pipe()
    child = context.Process(target=_report_lock, args=(tmp_path / "lock", child_end))
    child.start()
    assert parent_end.recv() is False
    held.close()  # without unlocking: only the last copy of the descriptor ends the lock
    parent_end.send("let go")
    assert parent_end.recv() is True
    child.join()


def _report_lock(path: Path, pipe: multiprocessing.connection.Connection) -> None:
    pipe.send(maybe_lock(path) is not None)
    pipe.recv()
    pipe.send(maybe_lock(path) is not None)


def test_a_lock_is_free_once_released_even_if_a_child_holds_a_copy(tmp_path: Path) -> None:
    """A program that was started meanwhile inherits the descriptor, and lives on."""
    held = maybe_lock(tmp_path / "lock")
    assert held is not None
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[held._descriptor],
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert maybe_lock(tmp_path / "lock") is None
        held.release()
        again = maybe_lock(tmp_path / "lock")
        assert again is not None
        again.release()
        child.communicate()
