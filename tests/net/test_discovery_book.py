"""The book of sightings: sources merged, one event for each process, however long nobody reads."""

from __future__ import annotations

from potluck.net.addresses import Address
from potluck.net.discovery_book import MAX_ADDRESSES, MAX_PER_SOURCE, Book, own_addresses
from potluck.net.discovery_records import Changed, Found, Gone
from support.discovering import sighting


class Bell:
    """Counts how often it was rung."""

    def __init__(self) -> None:
        self.rung = 0

    def __call__(self) -> None:
        """Ring."""
        self.rung += 1


def test_what_comes_changes_and_goes_is_told_in_turn() -> None:
    """Found, changed, gone with its reason; and nothing twice."""
    book = Book(Bell())
    first, moved = sighting("a", "10.0.0.1"), sighting("a", "10.0.0.2")
    book.report("mdns", first)
    assert book.drain() == [Found(first)]
    assert book.drain() == []
    book.report("mdns", first)
    assert book.drain() == []
    book.report("mdns", moved)
    assert book.drain() == [Changed(moved)]
    book.withdraw("mdns", moved.key, "it said goodbye")
    assert book.drain() == [Gone(moved, "it said goodbye")]
    book.withdraw("mdns", moved.key, "again")
    assert book.drain() == []


def test_what_nobody_reads_does_not_pile_up() -> None:
    """Ten thousand changes are one event, and one call; whoever came and went was never there."""
    bell = Bell()
    book = Book(bell)
    for number in range(10_000):
        book.report("mdns", sighting("a", f"10.0.{number % 200}.1"))
        book.report("mdns", sighting("b"))
        book.withdraw("mdns", sighting("b").key, "gone")
    assert bell.rung == 1
    assert book.drain() == [Found(sighting("a", "10.0.199.1"))]
    book.report("mdns", sighting("b"))
    assert bell.rung == 2


def test_several_sources_of_one_process_are_one_sighting() -> None:
    """With everybody's addresses, the shortest way first; it is gone when the last one says so."""
    book = Book(Bell())
    book.report("mdns", sighting("a", "10.0.0.1", "fd00::1"))
    book.report("neighbour", sighting("a", "127.0.0.1", source="neighbour", name="desk"))
    (event,) = book.drain()
    assert event.sighting.sources == ("mdns", "neighbour")
    hosts = [address.host for address in event.sighting.addresses]
    assert hosts == ["127.0.0.1", "10.0.0.1", "fd00::1"]
    assert event.sighting.name == "desk"
    book.withdraw("mdns", event.sighting.key, "it said goodbye")
    assert [type(each) for each in book.drain()] == [Changed]
    book.withdraw("neighbour", event.sighting.key, "it ended")
    (gone,) = book.drain()
    assert isinstance(gone, Gone)
    assert gone.reason == "it ended"


def test_a_bare_address_makes_way_for_the_process_that_has_it() -> None:
    """And comes back when that is gone: whoever gave it wants it tried."""
    book = Book(Bell())
    bare = sighting("", "10.0.0.1", source="given")
    book.report("given", bare)
    assert book.drain() == [Found(bare)]
    process = sighting("a", "10.0.0.1", "10.0.0.2")
    book.report("mdns", process)
    assert book.drain() == [Gone(bare, "it was found under its own name"), Found(process)]
    book.withdraw("mdns", process.key, "it said goodbye")
    assert book.drain() == [Gone(process, "it said goodbye"), Found(bare)]


def test_an_address_of_our_own_is_nobody() -> None:
    """The same list of peers can be given to all machines."""
    book = Book(Bell())
    book.exclude(own_addresses(["10.0.0.1"], 4711))
    for host in ("10.0.0.1", "localhost", "127.0.0.1"):
        book.report("given", sighting("", host, source="given"))
    book.report("given", sighting("", "10.0.0.2", source="given"))
    book.report("given", sighting("", "10.0.0.1", port=4712, source="given"))
    found = {event.sighting.addresses[0] for event in book.drain()}
    assert found == {Address("10.0.0.2", 4711), Address("10.0.0.1", 4712)}


def test_a_known_peer_makes_way_for_a_living_process_of_its_machine() -> None:
    """Its port of the last run is of no use once it is heard itself."""
    book = Book(Bell())
    known = sighting("a", "10.0.0.1", incarnation=0, port=1, source="known")
    other = sighting("b", "10.0.0.2", incarnation=0, port=1, source="known")
    book.replace("known", [known, other], "")
    assert len(book.drain()) == 2
    book.report("mdns", sighting("a", "10.0.0.1"))
    assert {each.node for each in book.sightings()} == {known.node, other.node}
    assert book.drain()[0] == Gone(known, "it was found under its own name")


def test_a_source_is_bounded_and_pushes_out_only_its_own() -> None:
    """A flood of forged records costs memory for three hundred, and hides no neighbour."""
    book = Book(Bell())
    book.report("neighbour", sighting("b", source="neighbour"))
    for number in range(1, 5 * MAX_PER_SOURCE):
        book.report("mdns", sighting("a", incarnation=number))
    seen = book.sightings()
    assert len(seen) == MAX_PER_SOURCE + 1
    assert sighting("b", source="neighbour") in seen
    assert sighting("a", incarnation=5 * MAX_PER_SOURCE - 1) in seen


def test_one_process_has_a_bounded_number_of_addresses() -> None:
    """Of all sources together."""
    book = Book(Bell())
    for source in ("mdns", "known"):
        hosts = [f"{len(source)}.0.0.{number}" for number in range(10)]
        book.report(source, sighting("a", *hosts, source=source))
    (seen,) = book.sightings()
    assert len(seen.addresses) == MAX_ADDRESSES


def test_replacing_what_a_source_sees_tells_the_difference() -> None:
    """Those who stay are not mentioned."""
    book = Book(Bell())
    one, two, three = (sighting(letter, source="neighbour") for letter in "abc")
    book.replace("neighbour", [one, two], "")
    assert len(book.drain()) == 2
    book.replace("neighbour", [two, three], "its process has ended")
    assert book.drain() == [Gone(one, "its process has ended"), Found(three)]
