"""Checkpoints on a machine with other users, on full disks, and through power cuts."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import DistributedError, IoError
from potluck.training.checkpoint import Checkpointer, latest
from potluck.training.checkpoint_files import TEMPORARY, Folder, refusal

TREE = {"weights": np.arange(1000.0)}

needs_root = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() != 0, reason="changes owners"
)


def save(folder: Path, step: int = 1) -> Path:
    """Save, and wait for it; where it is."""
    with Checkpointer(folder) as saver:
        return saver.save(TREE, step, wait=True).wait()


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """Files are private because we say so, not because the user has a careful umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_everything_is_private(tmp_path: Path) -> None:
    """Folders 0700, files 0600, also those on the way to the folder."""
    made = save(tmp_path / "new" / "saved")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    for path in (made.parent, *made.parent.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o711])
def test_folders_that_only_this_user_can_change_are_fine(tmp_path: Path, mode: int) -> None:
    """As users make them; files in them are private by themselves."""
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(mode)
    save(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode


def test_a_link_of_this_user_to_its_own_folder_is_fine(tmp_path: Path) -> None:
    """As when home is too small."""
    (tmp_path / "large").mkdir(mode=0o700)
    (tmp_path / "saved").symlink_to("large")
    save(tmp_path / "saved")
    assert latest(tmp_path / "large", verify=True) is not None


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (0o777, r"can be changed by all users of this machine \(mode 0777\).*chmod go-w"),
        (0o1777, r"is shared by all users of this machine .*Name a folder within it"),
    ],
)
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, mode: int, words: str) -> None:
    """They could replace what is resumed; a folder within it, which is ours, is fine."""
    folder = tmp_path / "common"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(DistributedError, match=words):
        save(folder)
    assert not list(folder.iterdir())
    save(folder / "mine")


def test_a_group_of_one_is_no_other(tmp_path: Path) -> None:
    """Many systems make a group for each user, and let it change what the user makes."""
    status = os.stat_result((0o40775, 1, 1, 1, os.geteuid(), os.getegid(), 0, 0, 0, 0))
    shared = os.stat_result((0o40775, 1, 1, 1, os.geteuid(), 54321, 0, 0, 0, 0))
    assert refusal(tmp_path, shared)[0] == "can be changed by group 54321 (mode 0775)"
    for mode in (0o40755, 0o40711, 0o40750):
        others = os.stat_result((mode, 1, 1, 1, os.geteuid(), 54321, 0, 0, 0, 0))
        assert refusal(tmp_path, others) == ("", "")
    import grp
    import pwd

    me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(os.getegid())
    is_own = group.gr_name == me.pw_name and not set(group.gr_mem) - {me.pw_name}
    assert (refusal(tmp_path, status) == ("", "")) is is_own


@needs_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Its owner could put anything in the way of what is written there."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, 12345, 12345)
    with pytest.raises(DistributedError, match=r"belongs to user 12345, but this is user 0.*chown"):
        save(folder)
    assert not list(folder.iterdir())


@needs_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    """As planted in a folder that all share."""
    (tmp_path / "secret").mkdir(mode=0o700)
    (tmp_path / "saved").symlink_to("secret")
    os.lchown(tmp_path / "saved", 12345, 12345)
    with pytest.raises(DistributedError, match="is a symbolic link that user 12345 has made"):
        save(tmp_path / "saved")
    assert not list((tmp_path / "secret").iterdir())


@needs_root
def test_a_link_on_the_way_that_another_user_planted_is_refused(tmp_path: Path) -> None:
    """In a folder that all users share; in a folder of that user it is as good as the folder."""
    for mode in (0o1777, 0o755):
        shared, target = tmp_path / f"shared-{mode:o}", tmp_path / f"target-{mode:o}"
        shared.mkdir()
        shared.chmod(mode)
        target.mkdir(mode=0o700)
        (shared / "runs").symlink_to(target)
        os.lchown(shared / "runs", 12345, 12345)
    with pytest.raises(DistributedError, match="symbolic link that user 12345 has made"):
        save(tmp_path / "shared-1777" / "runs" / "saved")
    assert not list((tmp_path / "target-1777").iterdir())
    save(tmp_path / "shared-755" / "runs" / "saved")


def test_a_file_with_the_name_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    """It is not called damaged either."""
    (tmp_path / "saved").mkdir(mode=0o700)
    (tmp_path / "saved" / "step-notes.txt").write_text("lower the rate")
    assert latest(tmp_path / "saved", verify=True) is None
    save(tmp_path / "saved")
    assert latest(tmp_path / "saved", verify=True) is not None


@pytest.mark.parametrize("name", ["part-00000-of-00001.json", "part-00000-of-00001.safetensors"])
@pytest.mark.parametrize("begin", ["", TEMPORARY])
def test_a_folder_in_the_way_of_a_file_raises_our_error(
    tmp_path: Path, begin: str, name: str
) -> None:
    """It says which one, and earlier checkpoints stay."""
    made = save(tmp_path / "saved", 1)
    save(tmp_path / "saved", 2)
    (made / name).unlink()
    (made / f"{begin}{name}").mkdir()
    with pytest.raises(IoError, match=rf"{name} could not be .*in the way"):
        save(tmp_path / "saved", 1)
    found = latest(tmp_path / "saved", verify=True)
    assert found is not None
    assert found.step == 2


@needs_root
@pytest.mark.parametrize("whose", [".", "saved", "saved/step-*"])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, whose: str) -> None:
    """Training would begin at the first step, beside the checkpoints of another user."""
    save(tmp_path / "saved")
    for path in (tmp_path, tmp_path / "saved", *tmp_path.glob("saved/step-*")):
        path.chmod(0o755)
    (hidden,) = tmp_path.glob(whose) if whose != "." else (tmp_path,)
    hidden.chmod(0o700)
    code = (
        "import os, sys\nfrom potluck.training.checkpoint import latest\nos.chdir(sys.argv[1])\n"
        "os.setgroups([])\nos.setgid(12345)\nos.setuid(12345)\n"
        "latest('saved', verify=True)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "could not be read: Permission denied" in ended.stderr


def test_what_cannot_be_removed_does_not_keep_the_rest(tmp_path: Path) -> None:
    """Folders of earlier versions, which others could change, go; a planted link stays."""
    folder = tmp_path / "saved"
    with Checkpointer(folder, keep=1) as saver:
        old = saver.save(TREE, 1, wait=True).wait()
        old.chmod(0o777)
        saver.save(TREE, 2, wait=True)
        assert not old.exists()
        odd = folder / "step-000000000001-000000-start-of-7"
        odd.symlink_to(tmp_path)
        saver.save(TREE, 3, wait=True)
    assert sorted(path.name[:17] for path in folder.iterdir()) == [
        "step-000000000001",
        "step-000000000003",
    ]
    assert odd.is_symlink()


PART = "part-00000-of-00001"


@pytest.mark.parametrize(
    "name",
    [
        f"{TEMPORARY}{PART}.safetensors",
        f"{TEMPORARY}{PART}.json",
        f"{PART}.safetensors",
        f"{PART}.json",
    ],
)
def test_a_planted_link_is_not_followed(tmp_path: Path, name: str) -> None:
    """What it points to stays as it is, and the checkpoint is written in its place."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    secret.chmod(0o600)
    folder = tmp_path / "saved"
    made = save(folder)
    (made / name).unlink(missing_ok=True)
    (made / name).symlink_to(secret)
    assert save(folder) == made
    assert secret.read_text() == "mine"
    assert not any(each.is_symlink() for each in made.iterdir())
    assert latest(folder, verify=True) is not None


def test_a_link_in_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """It would lead what is written elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made = save(tmp_path / "saved")
    for each in made.iterdir():
        each.unlink()
    made.rmdir()
    made.symlink_to(elsewhere)
    with pytest.raises(DistributedError, match=r"is a symbolic link\. Remove it"):
        save(tmp_path / "saved")
    assert not list(elsewhere.iterdir())


# -- what the system refuses -------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT]
)
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "replace"])
def test_what_the_system_refuses_is_our_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """A full or read-only disk: one error, nothing left behind, and the earlier one is there."""
    folder = tmp_path / "saved"
    save(folder, 1)
    original = getattr(os, call)

    def refuse(*arguments: Any, **options: Any) -> Any:
        if call != "open" or (len(arguments) > 2 and arguments[1] & os.O_CREAT):
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(IoError, match="could not be written") as failed:
            save(folder, 2)
    assert failed.value.cause == os.strerror(number)
    assert "Earlier checkpoints are untouched" in str(failed.value)
    assert [path.name[:17] for path in folder.iterdir()] == ["step-000000000001"]
    found = latest(folder, verify=True)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("written", [0, 1])
def test_the_first_checkpoint_that_fails_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """Neither an empty one, nor one with arrays and no manifest; a folder of the user's stays."""
    original, count = os.replace, 0

    def refuse(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count > written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*arguments, **options)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(IoError, match="The disk is full"):
        save(tmp_path / "saved", 1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "own").mkdir(mode=0o700)
    count = 0
    with pytest.raises(IoError, match="The disk is full"):
        save(tmp_path / "own", 1)
    assert list((tmp_path / "own").iterdir()) == []


def test_a_folder_that_is_read_only_raises_our_error(tmp_path: Path) -> None:
    """Really so, for a user who is not root: they may write anywhere."""
    folder = tmp_path / "saved"
    folder.mkdir()
    folder.chmod(0o500)
    script = (
        "import os, sys, tempfile, numpy\n"
        "from potluck import Checkpointer, IoError\n"
        "def save(folder):\n"
        "    Checkpointer(folder).save({'w': numpy.zeros(2)}, 1, wait=True)\n"
        "save(tempfile.mkdtemp())\n"  # everything is imported now
        "if os.geteuid() == 0:\n"
        "    os.chown(sys.argv[1], 12345, 12345)\n"
        "    os.chdir(sys.argv[1]); os.setgid(12345); os.setuid(12345)\n"
        "try:\n"
        "    save('below')\n"
        "except IoError as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert "could not be written: Permission denied" in ended.stdout, ended


# -- power cuts --------------------------------------------------------------------------------


class Record:
    """The calls that make files durable, in their order, by the names of the files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        for name in ("fsync", "replace", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if name == "fsync":
                what = Path(f"/proc/self/fd/{arguments[0]}").readlink().name
            else:
                what = " -> ".join(str(each) for each in arguments)
            result = original(*arguments, **options)
            self.calls.append((name, what))
            return result

        return noted


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of descriptors")
def test_every_file_and_every_name_is_forced_to_disk_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, name, folder: data before the manifest that vouches for it; a stale one goes first."""
    folder = tmp_path / "saved"
    name = save(tmp_path / "other").name
    record = Record(monkeypatch)
    data, manifest = f"{PART}.safetensors", f"{PART}.json"

    def written(file: str) -> list[tuple[str, str]]:
        return [
            ("fsync", f"{TEMPORARY}{file}"),
            ("replace", f"{TEMPORARY}{file} -> {file}"),
            ("fsync", name),
        ]

    save(folder)
    assert record.calls == [
        ("mkdir", "saved"),
        ("fsync", tmp_path.name),
        ("mkdir", name),
        ("fsync", "saved"),
        *written(data),
        *written(manifest),
    ]
    record.calls.clear()
    save(folder)  # the same step again
    assert record.calls == [
        ("unlink", manifest),
        ("fsync", name),
        *written(data),
        *written(manifest),
    ]


def test_a_file_is_whole_when_it_is_forced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still in a buffer then is lost in a power cut, and the name says it is there."""
    forced: list[int] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode):
            forced.append(status.st_size)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    made = save(tmp_path / "saved")
    assert sorted(forced) == sorted(path.stat().st_size for path in made.iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors")
def test_saving_leaves_no_folder_open(tmp_path: Path) -> None:
    """A long training would run out of descriptors: of new folders, old ones, and those refused."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    save(tmp_path / "saved", 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for step in range(2, 9):
        save(tmp_path / "saved", step)
        save(tmp_path / f"new{step}" / "saved")
        with pytest.raises(DistributedError):
            save(tmp_path / "open")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_data_that_is_replaced_has_no_manifest_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between the two leaves a checkpoint that is not complete, and the one before."""
    save(tmp_path / "saved", 1)
    made = save(tmp_path / "saved", 2)
    write = Folder.write

    def crash(folder: Folder, name: str, parts: Any) -> None:
        if name.endswith(".json"):
            raise KeyboardInterrupt
        write(folder, name, parts)

    monkeypatch.setattr(Folder, "write", crash)
    with Checkpointer(tmp_path / "saved") as saver, pytest.raises(KeyboardInterrupt):
        saver._write(saver._prepare({"weights": np.zeros(1000)}, None, ("", 0, 2), _history(2)))
    assert not (made / f"{PART}.json").exists()
    found = latest(tmp_path / "saved")
    assert found is not None
    assert found.step == 1


def _history(step: int) -> Any:
    from potluck.training.steps import Position, StepHistory

    return StepHistory(Position("", 0, step), samples=step)
