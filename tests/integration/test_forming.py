"""A group forms: in any order, by any kind of address, with any number of ranks."""

import contextlib
import os
import resource
import socket

from support.place import Place
from support.ports import free_port
from support.ranks import Ranks, new_master
from support.threads import PATIENCE


def greet_everybody(place: Place) -> list[str]:
    """Send every other rank a message of its own; what came back."""
    with place.join() as backend:
        sends = [
            backend.post_send(f"{place.rank:03} to {other:03}".encode(), other)
            for other in place.others
        ]
        heard = []
        for other in place.others:
            greeting = bytearray(10)
            backend.recv(greeting, other, timeout=PATIENCE)
            heard.append(greeting.decode())
        for send in sends:
            send.wait(PATIENCE)
        backend.barrier(PATIENCE)
        return heard


def assert_all_greeted(heard: list[list[str]]) -> None:
    """Everybody got what everybody else sent to it."""
    world_size = len(heard)
    for me, greetings in enumerate(heard):
        others = [rank for rank in range(world_size) if rank != me]
        assert greetings == [f"{other:03} to {me:03}" for other in others]


def test_every_rank_has_a_direct_connection_to_every_other(ranks: Ranks) -> None:
    """A full mesh, for the smallest group and for larger ones."""
    for world_size in (2, 3, 4, 8):
        assert_all_greeted(ranks.run(greet_everybody, world_size))


def connections(place: Place) -> list[str]:
    """Where the other ranks are connected."""
    with place.join() as backend:
        backend.barrier(PATIENCE)
        names = [backend.peer_name(other) for other in place.others]
        backend.barrier(PATIENCE)
        return names


def test_the_ranks_of_one_machine_talk_through_loopback_only(ranks: Ranks) -> None:
    """A group at 127.0.0.1 opens no port that another machine could reach."""
    for names in ranks.run(connections, 3):
        assert all(" at 127.0.0.1:" in name for name in names)


def test_rank_0_may_come_last(ranks: Ranks) -> None:
    """The others dial until it is there, also when something else answers there first."""
    port = free_port()
    master = f"127.0.0.1:{port}"
    with contextlib.closing(socket.create_server(("127.0.0.1", port))) as something_else:
        something_else.settimeout(PATIENCE)
        early = ranks.start(greet_everybody, 4, ranks=[3, 1, 2], master=master)
        for _ in early:  # each of them has dialled once, in vain
            something_else.accept()[0].close()
    (last,) = ranks.start(greet_everybody, 4, ranks=[0], master=master)
    late, first, second = (process.value() for process in early)
    assert_all_greeted([last.value(), first, second, late])


def test_the_others_may_come_one_after_the_other(ranks: Ranks) -> None:
    """Nobody is disturbed by one who comes much later."""
    master = new_master()
    started = []
    for rank in (0, 2, 1):
        started += ranks.start(announce_and_greet, 3, ranks=[rank], master=master)
        started[-1].expect("here")
    zero, two, one = (process.value() for process in started)
    assert_all_greeted([zero, one, two])


def announce_and_greet(place: Place) -> list[str]:
    """Say that this process is up, then take part."""
    place.say("here")
    return greet_everybody(place)


def test_the_master_may_be_given_by_name(ranks: Ranks) -> None:
    """The name of this very machine is looked up like any other."""
    for name in ("localhost", socket.gethostname()):
        heard = ranks.start(greet_everybody, 3, master=f"{name}:{free_port()}")
        assert_all_greeted([process.value() for process in heard])


def test_the_master_may_be_an_ipv6_address(ranks: Ranks) -> None:
    """Written in brackets, as in a URL."""
    started = ranks.start(connections, 3, master=f"[::1]:{free_port()}")
    for process in started:
        assert all(" at [::1]:" in name for name in process.value())


def test_a_port_may_be_used_again_at_once(ranks: Ranks) -> None:
    """A script that is restarted does not wait for the system to forget its last connections."""
    master = new_master()
    for _ in range(5):
        heard = ranks.start(greet_everybody, 3, master=master)
        assert_all_greeted([process.value() for process in heard])


def join_and_leave(place: Place) -> list[int]:
    """How many descriptors are open before and after."""
    place.join().close()  # what stays open for good, the claim of this process, is open now
    before = count_descriptors()
    place.join().close()
    return [before, count_descriptors()]


def count_descriptors() -> int:
    """How many descriptors this process has open."""
    found = 0
    for number in range(256):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found += 1
    return found


def test_a_closed_group_leaves_nothing_open(ranks: Ranks) -> None:
    """Groups may come and go in one process, as they do in a notebook."""
    for before, after in ranks.run(join_and_leave, 3):
        assert after == before


def join_with_many_files(place: Place) -> list[str]:
    """Take part in a group while a thousand files are open, as a data set may have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        return greet_everybody(place)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_may_have_large_numbers(ranks: Ranks) -> None:
    """Above 1023 the oldest of the system's ways to wait for a socket gives up."""
    assert_all_greeted(ranks.run(join_with_many_files, 3))
