"""Hides from this process what some platform lacks.

A folder for ``PYTHONPATH``: every interpreter that is started with it, ranks of the tests included,
finds no fork, no local sockets, no gathering writes, no epoll and no signals beyond those of
Windows.  ``make test-bare`` runs the tests of messages, collectives, calls and clusters like that.
Python's own library keeps what it needs: it has its own ways on those platforms.
"""

import mmap
import os
import select
import selectors
import signal
import socket
import subprocess

HIDDEN = {
    os: (
        *("fork", "forkpty", "killpg", "getpgid", "geteuid"),
        *("eventfd", "eventfd_read", "eventfd_write", "memfd_create"),
        *("sched_yield", "sched_getaffinity", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK"),
    ),
    select: ("epoll", "poll", "kqueue"),
    signal: ("SIGKILL", "SIGHUP", "SIGUSR2"),
    socket: ("SO_PEERCRED", "SCM_RIGHTS"),
    mmap: ("MADV_HUGEPAGE", "MADV_DONTNEED"),
}

# Packages built for this platform use these whenever they like, so they are hidden only while
# potluck._platform looks what there is.
HIDDEN_AT_FIRST = {
    os: ("register_at_fork",),
    socket: ("AF_UNIX",),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS"),
}

_KILL = int(getattr(signal, "SIGKILL", signal.SIGTERM))


def _socketpair(
    family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
) -> tuple[socket.socket, socket.socket]:
    """What Windows has instead: two ends of a TCP connection within the machine."""
    with socket.create_server(("127.0.0.1", 0), family=family) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


def _without_sendmsg(_: socket.socket) -> None:
    raise AttributeError("sendmsg is hidden")


def hide() -> None:
    """Take away what some platform lacks."""
    others = {
        module: {name: vars(module).pop(name) for name in names if name in vars(module)}
        for module, names in HIDDEN_AT_FIRST.items()
    }
    for module, names in HIDDEN.items():
        for name in names:
            vars(module).pop(name, None)
    os.supports_dir_fd.clear()
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[misc, assignment]
    socket.socketpair = _socketpair  # type: ignore[assignment]
    for name in ("sendmsg", "recvmsg", "recvmsg_into"):
        setattr(socket.socket, name, property(_without_sendmsg))
    subprocess.Popen.kill = lambda process: process.send_signal(_KILL)  # type: ignore[assignment, method-assign]
    import potluck._platform  # noqa: F401 - it decides once, now

    for module, attributes in others.items():
        vars(module).update(attributes)


hide()
