"""What the operating system has, decided in one place.

Linux, macOS and Windows differ.  No other module asks which of them this is, or looks whether a
module of Python has a name: it uses what is here.  A constant says whether a feature exists; a
function does what it says as well as the platform can.  ``make test-bare`` hides every feature that
some platform lacks, and runs the tests of messages, collectives, calls and clusters without them.

The type checker knows a platform by ``sys.platform`` alone, so that is what is compared where it
has to follow.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

_Buffer: TypeAlias = bytes | bytearray | memoryview

IS_LINUX = sys.platform == "linux"
IS_MACOS = sys.platform == "darwin"
IS_WINDOWS = sys.platform == "win32"

# --------------------------------------------------------------------------------------------------
# Files.

BINARY: int = getattr(os, "O_BINARY", 0)
"""Without it Windows changes line ends inside a key."""

NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
FOLDERS_ONLY: int = getattr(os, "O_DIRECTORY", 0)

AT_ONCE: int = getattr(os, "O_NONBLOCK", 0)
"""Opens a pipe without waiting for its writer; Windows has no pipes among its files."""

HAS_FOLDER_HANDLES = os.open in os.supports_dir_fd
"""Whether names can be used within an open folder, whatever becomes of the path that led to it."""


def user_id() -> int | None:
    """The user this process acts for; None where files have access lists instead of owners."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def is_private_group(number: int) -> bool:
    """Whether a group is this user's alone, as many systems make one for each user."""
    if sys.platform == "win32":
        return True
    import grp
    import pwd

    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:  # unknown here, as in a container
        return False
    is_mine = number == me.pw_gid and group.gr_name == me.pw_name
    return is_mine and set(group.gr_mem) <= {me.pw_name}


def lock_file(descriptor: int) -> bool:
    """Take the lock of an open file; False if another process or another thread has it.

    ``flock`` rather than ``lockf``: it also excludes another thread of this process, and closing an
    unrelated descriptor of the same file does not drop it.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # PermissionError is what Windows says
        return False
    return True


def unlock_file(descriptor: int) -> None:
    """Give the lock back."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


def windows_machine_id() -> str:
    """The identifier that Windows gave this machine when it was installed."""
    if sys.platform != "win32":
        raise OSError("only Windows has a registry")
    import winreg

    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SOFTWARE\Microsoft\Cryptography") as key:
        return str(winreg.QueryValueEx(key, "MachineGuid")[0])


# --------------------------------------------------------------------------------------------------
# Radios.

_WINDOWS_WIRELESS = re.compile(r"wi-?fi|wlan|wireless", re.IGNORECASE)

_GET_ACCESS_POINT = 0x8B15  # SIOCGIWAP of Linux
_NO_ACCESS_POINTS = {bytes(6), bytes([0xFF] * 6), bytes([0x44] * 6)}  # what drivers say without one


def wireless_among(names: Iterable[str], root: Path = Path("/")) -> list[str]:
    """The network interfaces that are radios, as far as the system says so."""
    if IS_LINUX:
        return [name for name in names if (root / "sys/class/net" / name / "wireless").exists()]
    if IS_MACOS:
        import subprocess

        command = ["/usr/sbin/networksetup", "-listallhardwareports"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)  # noqa: S603
        radios = re.findall(r"Hardware Port: (?:Wi-Fi|AirPort)\s+Device: (\S+)", told.stdout)
        return [name for name in names if name in radios]
    return [name for name in names if _WINDOWS_WIRELESS.search(name)]


def access_point_of(name: str) -> bytes:
    """The hardware address of the access point of a radio; empty where the system does not tell."""
    if sys.platform != "linux":
        return b""
    import fcntl

    request = struct.pack("16s16x", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer: bytes = fcntl.ioctl(sock.fileno(), _GET_ACCESS_POINT, request)
    except OSError:
        return b""
    address = answer[18:24]
    return b"" if address in _NO_ACCESS_POINTS else address


# --------------------------------------------------------------------------------------------------
# Processes and signals.

HAS_FORK = hasattr(os, "fork")
HAS_PROCESS_GROUPS = hasattr(os, "killpg")

SIGKILL: int | None = getattr(signal, "SIGKILL", None)
SIGUSR2: int | None = getattr(signal, "SIGUSR2", None)


def signals(*names: str) -> list[int]:
    """The numbers of those signals that exist here.

    >>> signals("SIGINT", "SIGPERHAPS") == [signal.SIGINT]
    True
    """
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def call_in_children(action: Callable[[], None]) -> None:
    """Have something done in every child that this process forks from now on, before all else."""
    if sys.platform != "win32" and HAS_FORK:
        os.register_at_fork(after_in_child=action)


def fork() -> int:
    """Like :func:`os.fork`."""
    if sys.platform == "win32":
        raise OSError("Windows cannot fork")
    return os.fork()


def kill_process_group(leader: int) -> None:
    """End a process and everything it has started, without a word."""
    if sys.platform == "win32":
        raise OSError("Windows has no process groups")
    os.killpg(leader, signal.SIGKILL)


def shares_process_group(process: int) -> bool:
    """Whether a process is in the group of this one."""
    if sys.platform == "win32":
        return False
    return os.getpgid(process) == os.getpgrp()


def is_in_foreground() -> bool:
    """Whether Ctrl-C in our terminal reaches us and our children, wherever the input is from."""
    if sys.platform == "win32":
        return sys.stdin.isatty()
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return sys.stdin.isatty()
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def peak_memory_of_children() -> int:
    """The most bytes that one of our children used that have ended; 0 if unknown."""
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit


def usable_cores() -> int:
    """The processor cores that this process may use; 0 if that is not known."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0


def _sleep_a_moment() -> None:
    time.sleep(0)


yield_processor: Callable[[], None] = getattr(os, "sched_yield", _sleep_a_moment)
"""Let other threads and processes run."""


def sleepless_clock(platform: str = sys.platform) -> Callable[[], float]:
    """The clock of a platform that counts while the machine sleeps and is never set.

    >>> sleepless_clock("an unknown one") is time.monotonic
    True
    """
    name = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC"}.get(platform)
    number: int | None = getattr(time, name, None) if name else None
    if number is None or sys.platform == "win32":
        return time.monotonic  # on Windows it counts sleep
    try:
        time.clock_gettime(number)
    except OSError:  # an old kernel, or a sandbox
        return time.monotonic
    return lambda: time.clock_gettime(number)


# --------------------------------------------------------------------------------------------------
# Memory.

_PRIVATE: int | None = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) or None


def mapped_memory(size: int) -> mmap.mmap | None:
    """Memory that is mapped on its own, in large pages where there are some; None without."""
    if sys.platform == "win32" or _PRIVATE is None:
        return None
    mapped = mmap.mmap(-1, size, flags=_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


CAN_RETURN_PAGES = hasattr(mmap, "MADV_DONTNEED")
"""Whether pages of mapped memory can be given back one by one."""


def return_pages(mapped: mmap.mmap, start: int, size: int) -> None:
    """Give the pages of a part of mapped memory back, if :data:`CAN_RETURN_PAGES`."""
    if sys.platform != "win32":
        mapped.madvise(mmap.MADV_DONTNEED, start, size)


def memory_file(name: str) -> int | None:
    """A descriptor of a file that is only in memory; None where that cannot be."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    try:
        return os.memfd_create(name)
    except OSError:  # forbidden in some sandboxes
        return None


_SEAL_FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE`` of Linux since 5.1, which the fcntl module does not name."""


def sealed_memory(size: int) -> tuple[int, mmap.mmap]:
    """Memory to share, and its descriptor.  Only this mapping can write; it cannot shrink.

    Raises ``OSError`` where that does not exist; see :data:`CAN_SHARE_MEMORY`.
    """
    if sys.platform != "linux":
        raise OSError("only Linux can seal memory")
    import fcntl

    descriptor = os.memfd_create("potluck", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def map_sealed_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map what another process made with :func:`sealed_memory`, for reading.

    Raises ``OSError`` for everything that could do harm.  A process that reads a page that does not
    exist is killed: so the memory must be sealed against shrinking, and must not be of huge pages,
    of which the system may have none left.
    """
    if sys.platform != "linux":
        raise OSError("only Linux can seal memory")
    import fcntl

    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # fails for everything that is not memory
    facts = os.fstat(descriptor)
    if not seals & fcntl.F_SEAL_SHRINK or facts.st_size != size or facts.st_uid != os.geteuid():
        raise OSError("the memory is not sealed, or has another size or owner")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        raise OSError("the memory is of huge pages")
    return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)


# --------------------------------------------------------------------------------------------------
# Sockets.

HAS_EPOLL = hasattr(select, "epoll") and hasattr(os, "eventfd")

REUSES_ADDRESSES = not IS_WINDOWS
"""Whether ``SO_REUSEADDR`` means that a port can be used again soon; on Windows it means theft."""

PACING_RATE: int | None = 47 if IS_LINUX else None
"""``SO_MAX_PACING_RATE`` of Linux, which the socket module does not name."""

HAS_LOCAL_SOCKETS = IS_LINUX and hasattr(socket, "AF_UNIX") and hasattr(socket, "SO_PEERCRED")
"""Whether there are local sockets with abstract names, and the kernel says who is at their end."""

CAN_SHARE_MEMORY = HAS_LOCAL_SOCKETS and hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
"""Whether memory can be made that is safe to share, and given away through a local socket."""

DONT_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)
"""Lets one call on a socket not block, whatever the mode of the socket; 0 where that is missing."""

_CREDENTIALS = struct.Struct("3i")  # Linux's ``ucred``: process, user and group


def local_socket() -> socket.socket:
    """A socket between processes of this machine, if :data:`HAS_LOCAL_SOCKETS`."""
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this platform has no local sockets")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def is_of_same_user(sock: socket.socket) -> bool:
    """Whether a process of the same user is at the other end of a local socket."""
    if sys.platform != "linux":
        raise OSError("only Linux says who is at the other end of a local socket")
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())


def is_local_stream(sock: socket.socket) -> bool:
    """Whether a socket carries a stream of bytes within this machine."""
    return hasattr(socket, "AF_UNIX") and (sock.family, sock.type) == (
        socket.AF_UNIX,
        socket.SOCK_STREAM,
    )


def send_descriptors(sock: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send bytes and descriptors on a local socket, at once or not at all."""
    if sys.platform == "win32":
        raise OSError("Windows cannot send descriptors")
    socket.send_fds(sock, [data], list(descriptors), DONT_WAIT)


def receive_descriptors(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """What has come on a local socket: at most ``size`` bytes and ``most`` descriptors.

    The kernel closes what comes beyond them.
    """
    if sys.platform != "linux":
        raise OSError("only Linux receives descriptors that no child inherits")
    flags = DONT_WAIT | socket.MSG_CMSG_CLOEXEC
    data, descriptors, _, _ = socket.recv_fds(sock, size, most, flags)
    return data, descriptors


def keep_alive(sock: socket.socket, *, idle: int, interval: int, count: int) -> None:
    """Have the kernel ask an idle peer for a sign of life; after ``count`` in vain it is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPALIVE", idle),  # macOS's name for the same
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", count),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def gathering_send(
    sock: socket.socket,
) -> Callable[[Sequence[_Buffer]], int]:
    """Send several buffers at once; where that does not exist, they are joined before."""
    if sys.platform != "win32" and hasattr(sock, "sendmsg"):
        return sock.sendmsg
    return lambda buffers: sock.send(b"".join(buffers))


def unacknowledged(sock: socket.socket) -> int:
    """Bytes written that the peer's kernel has not acknowledged; -1 if the system cannot tell."""
    if sys.platform == "linux":
        import fcntl
        import termios

        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    if sys.platform == "darwin":
        so_nwrite = 0x1024  # from <sys/socket.h>; the socket module does not name it
        return sock.getsockopt(socket.SOL_SOCKET, so_nwrite)
    return -1
