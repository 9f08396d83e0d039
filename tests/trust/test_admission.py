"""Who may join a group: one process for each rank, and a sentence for everybody else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from potluck._types import NodeId
from potluck.trust.admission import (
    AdmissionRefused,
    Granted,
    JoinRequested,
    RosterExchange,
    digest,
    is_clone,
    judge_clone,
    judge_entry,
    judge_hello,
    judge_lane,
    judge_node,
    judge_ourselves,
    judge_peer,
    judge_sender,
    judge_start,
    judge_table,
    list_ranks,
)
from potluck.trust.roster import MergeOutcome
from potluck.wire_messages import Introduction, Join, OpenRequest, RankEndpoint
from support.toy_group import ToyGroup

SESSION, OTHER_SESSION = b"s" * 16, b"o" * 16


def peer(rank: int) -> RankEndpoint:
    """Where a rank is, told apart by its port."""
    return RankEndpoint(hosts=["10.0.0.5"], port=20_000 + rank, name=f"host{rank}")


def join(rank: int, world_size: int = 3) -> Join:
    """A request to join."""
    return Join(rank=rank, world_size=world_size, peer=peer(rank))


def sentence(answer: AdmissionRefused | None) -> str:
    """Why not."""
    assert answer is not None
    return answer.sentence


def test_ranks_are_listed_as_people_say_them() -> None:
    """One, several, in order."""
    assert list_ranks([3]) == "rank 3"
    assert list_ranks({2, 10, 1}) == "ranks 1, 2, 10"


def test_a_group_gathers_in_any_order() -> None:
    """The table lists everybody by rank, whoever came first."""
    book = JoinRequested(3)
    assert book.missing == [1, 2]
    assert book.join(70, join(2)) is None
    assert book.missing == [1]
    assert book.join(80, join(1)) is None
    assert book.missing == []
    assert book.waiting() == {70: 2, 80: 1}
    assert book.peers(peer(0)) == [peer(0), peer(1), peer(2)]


HERE = Introduction(machine="m1", boot="b1")


@pytest.mark.parametrize(
    ("other", "cloned"),
    [
        (Introduction(machine="m1", boot="b1", slot=3, incarnation=9), False),
        (Introduction(machine="m2", boot="b1"), True),
        (Introduction(machine="m1", boot="b2"), True),
        (Introduction(machine="m1"), False),
        (Introduction(), False),
    ],
)
def test_one_key_on_two_machines_is_a_clone(other: Introduction, cloned: bool) -> None:
    """Another machine, or another start of what looks the same; what is unknown proves nothing."""
    assert is_clone(HERE, other) is is_clone(other, HERE) is cloned
    refused = judge_clone("k" * 32, HERE, other, "desk")
    assert (refused is not None) is cloned
    if refused is not None:
        assert f"the node key {'k' * 32} is used on two machines, desk and" in refused.sentence


def from_node(rank: int, node: str, introduction: Introduction) -> Join:
    """A request to join by a node that has proved its key."""
    where = RankEndpoint(hosts=["10.0.0.5"], port=20_000 + rank, name=f"host{rank}", node=node)
    return Join(rank=rank, world_size=4, peer=where, introduction=introduction)


def test_a_clone_does_not_join() -> None:
    """Two ranks with one key on two machines; processes of one machine are welcome."""
    book = JoinRequested(4)
    assert book.join(1, from_node(1, "k", HERE)) is None
    elsewhere = Introduction(machine="m2", boot="b2")
    assert "used on two machines, host1 and" in sentence(book.join(2, from_node(2, "k", elsewhere)))
    assert book.join(3, from_node(2, "other", elsewhere)) is None
    assert book.join(4, from_node(3, "k", HERE)) is None
    assert book.missing == []


def test_where_nobody_proves_a_key_nobody_has_a_clone() -> None:
    """In clear."""
    book = JoinRequested(4)
    assert book.join(1, from_node(1, "", HERE)) is None
    assert book.join(2, from_node(2, "", Introduction(machine="m2"))) is None


def test_another_world_size_is_refused() -> None:
    """Both sizes are named: one of the two command lines is wrong."""
    text = sentence(JoinRequested(3).join(1, join(1, world_size=4)))
    assert "a group of 4" in text
    assert "rank 0 for a group of 3" in text


@pytest.mark.parametrize("rank", [0, 3, 2**31 - 1])
def test_a_rank_that_the_group_does_not_have_is_refused(rank: int) -> None:
    """Rank 0 is taken by the one who answers."""
    book = JoinRequested(3)
    assert "ranks 1 to 2 can" in sentence(book.join(1, join(rank)))
    assert book.missing == [1, 2]


def test_a_second_process_of_the_same_rank_is_refused() -> None:
    """The first one stays, and its machine is named."""
    book = JoinRequested(3)
    book.join(1, join(1))
    text = sentence(book.join(2, join(1)))
    assert "rank 1 is already here (on host1)" in text
    assert book.waiting() == {1: 1}


def test_a_rank_that_left_may_come_again() -> None:
    """A process that was restarted is welcome; a stranger's hanging up changes nothing."""
    book = JoinRequested(3)
    book.join(1, join(1))
    assert book.leave(9) is None
    assert book.leave(1) == 1
    assert book.missing == [1, 2]
    assert book.join(2, join(1)) is None


@pytest.mark.parametrize(
    ("loopback", "local", "remote"),
    [([10], "rank 1", "ranks 2, 3"), ([10, 30], "ranks 1, 3", "rank 2")],
)
def test_a_group_half_on_loopback_is_refused(loopback: list[int], local: str, remote: str) -> None:
    """Ranks that came through 127.0.0.1 gave an address that no other machine can dial."""
    book = JoinRequested(4)
    for rank in (1, 2, 3):
        book.join(rank * 10, join(rank, world_size=4))
    text = sentence(book.unreachable(loopback))
    assert text.startswith(f"{local} reached rank 0 through loopback while {remote} came")


@pytest.mark.parametrize("loopback", [[], [10, 20], [99]])
def test_a_group_on_one_side_is_welcome(loopback: list[int]) -> None:
    """All on this machine, or all elsewhere."""
    book = JoinRequested(3)
    for rank in (1, 2):
        book.join(rank * 10, join(rank))
    assert book.unreachable(loopback) is None


class Arrivals(RuleBasedStateMachine):
    """Ranks come, go, come twice and ask for nonsense; the book keeps one connection for each."""

    @initialize(world_size=st.integers(2, 6))
    def start(self, world_size: int) -> None:
        """Rank 0 begins to gather."""
        self.world_size = world_size
        self.book = JoinRequested(world_size)
        self.holders: dict[int, int] = {}  # rank -> connection
        self.connections = 0

    @rule(rank=st.integers(0, 7), size_error=st.sampled_from([0, 0, 0, 1]))
    def ask(self, rank: int, size_error: int) -> None:
        """Welcome exactly if the size is right and the rank is free."""
        self.connections += 1
        answer = self.book.join(self.connections, join(rank, self.world_size + size_error))
        free = 0 < rank < self.world_size and rank not in self.holders
        if free and not size_error:
            assert answer is None
            self.holders[rank] = self.connections
        else:
            assert str(rank) in sentence(answer)

    @rule(back=st.integers(0, 5))
    def hang_up(self, back: int) -> None:
        """A connection ends; its rank is free again if it had one."""
        connection = self.connections - back
        rank = next((rank for rank, known in self.holders.items() if known == connection), None)
        assert self.book.leave(connection) == rank
        if rank is not None:
            del self.holders[rank]

    @invariant()
    def the_book_is_right(self) -> None:
        """Those who wait and those who are missing are together everybody, once."""
        if not hasattr(self, "book"):
            return
        assert self.book.waiting() == {c: rank for rank, c in self.holders.items()}
        expected = [rank for rank in range(1, self.world_size) if rank not in self.holders]
        assert self.book.missing == expected
        if not expected:
            everybody = [peer(rank) for rank in range(self.world_size)]
            assert self.book.peers(peer(0)) == everybody


TestArrivals = Arrivals.TestCase
TestArrivals.settings = settings(stateful_step_count=25)


@given(
    session=st.sampled_from([SESSION, OTHER_SESSION]),
    rank=st.integers(0, 5),
    to=st.integers(0, 5),
    me=st.integers(0, 5),
    expected=st.sets(st.integers(0, 5)),
)
def test_a_connection_opens_exactly_when_it_is_expected(
    session: bytes, rank: int, to: int, me: int, expected: set[int]
) -> None:
    """Of this group, meant for this rank, from a rank that has not connected yet."""
    answer = judge_lane(OpenRequest(session=session, rank=rank, to=to), SESSION, me, expected)
    if session == SESSION and to == me and rank in expected:
        assert answer is None
    elif session != SESSION:
        assert "another group" in sentence(answer)
    elif to != me:
        assert f"this is rank {me}, not rank {to}" in sentence(answer)
    else:
        assert f"rank {rank} is not expected" in sentence(answer)


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        (["anna", "ben", "cleo"], None),
        (["anna", "ben"], "2 ranks instead of 3"),
        (["eve", "ben", "cleo"], "node for rank 0"),
        (["anna", "eve", "cleo"], "node for rank 1"),
        (["anna", "ben", ""], "any machine could pose as it"),
    ],
)
def test_a_table_must_fit_what_a_rank_knows_itself(nodes: list[str], problem: str | None) -> None:
    """Rank 0 can lie neither about itself nor about this rank, nor leave a rank to anybody."""
    found = judge_table(nodes, 1, 3, {0: "anna", 1: "ben"})
    assert found is None if problem is None else problem in (found or "")


def test_in_clear_a_table_names_nobody() -> None:
    """There is nothing to compare."""
    assert judge_table(["", "", ""], 1, 3, {0: "", 1: ""}) is None


def test_only_the_node_that_joined_as_a_rank_dials_as_that_rank() -> None:
    """Whoever else is a member and knows the session."""
    assert judge_node(2, "anna", "anna") is None
    assert "another node joined as rank 2" in sentence(judge_node(2, "anna", "ben"))


def test_only_the_start_that_was_taken_in_as_a_rank_dials_as_that_rank() -> None:
    """Processes of one machine share a node; the sentence says which of the two is older."""
    assert judge_start(2, 7, 7) is None
    assert "rank 2 is a later process" in sentence(judge_start(2, 7, 6))
    assert "rank 2 is an earlier process" in sentence(judge_start(2, 7, 8))


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        (("10.0.0.5", 20_001), None),
        (("0.0.0.0", 20_001), None),  # behind a port mapping, at any address
        (("10.0.0.5", 20_002), "peers[1] is 10.0.0.5, port 20002 on rank 0"),
        (("10.0.0.6", 20_001), "but rank 1 listens on 10.0.0.5, port 20001"),
    ],
)
def test_a_rank_listens_where_the_list_of_peers_says(
    listed: tuple[str, int], problem: str | None
) -> None:
    """Otherwise both say where they look for each other."""
    answer = judge_entry(1, peer(1), [("10.0.0.4", 20_000), listed])
    if problem is None:
        assert answer is None
    else:
        assert problem in sentence(answer)


def test_a_list_of_peers_says_nothing_of_ranks_that_are_not_on_it() -> None:
    """Of the first rank neither: it is where all have found it.  Without a list nothing is said."""
    peers = [("10.0.0.4", 1), ("10.0.0.4", 2)]
    assert judge_entry(0, peer(0), peers) is None
    assert judge_entry(2, peer(2), peers) is None
    assert judge_entry(1, peer(1), []) is None


def test_a_rank_without_addresses_is_named_without_them() -> None:
    """Its list is another one."""
    nowhere = RankEndpoint(hosts=[], port=5, name="host1")
    answer = judge_entry(1, nowhere, [("10.0.0.4", 1), ("10.0.0.5", 2)], me=3)
    assert "on rank 3, but rank 1 listens on an address of its own, port 5" in sentence(answer)


# --------------------------------------------------------------------------------------------------
# Who may open a connection: by the roster, and by nothing else where there is one.

STRANGER = NodeId("z" * 32)
OTHER_ROSTER = b"d" * 32


@pytest.fixture
def group() -> ToyGroup:
    """Three machines, of which ben has been revoked."""
    group = ToyGroup("anna", "ben", "cleo")
    name = group.revoke("anna", "ben")
    group.meet("anna", "cleo")
    group.sign("cleo", name)
    group.meet("anna", "cleo")
    return group


def introduction_sentence(answer: object) -> str:
    """Why not."""
    assert isinstance(answer, AdmissionRefused)
    return answer.sentence


def test_equal_rosters_have_equal_digests(group: ToyGroup) -> None:
    """Whatever a machine remembers for itself alone; another roster has another digest."""
    assert digest(group.rosters["anna"]) == digest(group.rosters["cleo"])
    assert digest(group.rosters["anna"]) != digest(group.rosters["ben"])


def test_where_both_agree_nothing_more_is_said(group: ToyGroup) -> None:
    """The usual case costs no further message."""
    mine = group.rosters["anna"]
    told = digest(group.rosters["cleo"])
    assert judge_hello(mine, group.id("cleo"), told, is_current=True) == Granted()
    assert judge_hello(mine, group.id("cleo"), b"", is_current=True) == Granted()


def test_where_they_do_not_agree_they_tell(group: ToyGroup) -> None:
    """A member with another roster, and somebody new that another member may have brought in."""
    mine = group.rosters["anna"]
    for caller in (group.id("cleo"), STRANGER, group.id("ben")):
        assert judge_hello(mine, caller, OTHER_ROSTER, is_current=True) == RosterExchange()


def test_an_earlier_secret_opens_the_exchange_for_members_alone(group: ToyGroup) -> None:
    """Also where both go by the same roster: what the caller lacks is the secret."""
    mine = group.rosters["anna"]
    for told in (b"", OTHER_ROSTER, digest(mine)):
        assert judge_hello(mine, group.id("cleo"), told, is_current=False) == RosterExchange()
        refused = judge_hello(mine, group.id("ben"), told, is_current=False)
        assert introduction_sentence(refused) == (
            "not a member: ben was revoked by anna; only pairing it again brings it back."
        )
        refused = judge_hello(mine, STRANGER, told, is_current=False)
        assert introduction_sentence(refused).startswith("not a member: No machine with the id")
        assert introduction_sentence(refused).endswith("Pair it first: `potluck pair`.")


def test_who_tells_nothing_must_be_known(group: ToyGroup) -> None:
    """A secret without a roster makes nobody a member."""
    refused = judge_hello(group.rosters["anna"], STRANGER, b"", is_current=True)
    assert introduction_sentence(refused).startswith("not a member")


@pytest.mark.parametrize("is_current", [True, False])
def test_where_there_is_no_roster_whoever_has_the_secret_belongs(is_current: bool) -> None:
    """A passphrase, the open namespace."""
    assert judge_hello(None, STRANGER, OTHER_ROSTER, is_current=is_current) == Granted()
    assert judge_peer(None, STRANGER) is None


def test_who_answers_must_be_a_member_too(group: ToyGroup) -> None:
    """By our own roster."""
    mine = group.rosters["anna"]
    assert judge_peer(mine, group.id("cleo")) is None
    assert "ben was revoked" in introduction_sentence(judge_peer(mine, group.id("ben")))


def test_what_was_told_decides(group: ToyGroup) -> None:
    """Who has no business with us, who is no member, and who is."""
    taken = group.tell("ben", "anna")
    assert taken.outcome is MergeOutcome.REFUSED
    assert "ben was revoked by anna" in introduction_sentence(judge_sender(taken, group.id("ben")))
    taken = group.tell("cleo", "anna")
    assert judge_sender(taken, group.id("cleo")) is None
    assert "No machine with the id" in introduction_sentence(judge_sender(taken, STRANGER))
    assert judge_ourselves(taken) is None


def test_who_could_follow_by_signing_says_where_to_look() -> None:
    """A person has to look at it first: a forged change would look just like that."""
    group = ToyGroup("anna", "emil")
    group.pair("anna", "ben")
    name = group.rotate("anna")
    group.meet("anna", "ben")
    group.sign("ben", name)
    group.meet("anna", "ben")
    refused = judge_ourselves(group.tell("anna", "emil"))
    assert introduction_sentence(refused).endswith(
        "this machine may sign it too. `potluck members` there shows the change."
    )


def test_who_cannot_follow_says_why(group: ToyGroup) -> None:
    """Ben hears that the others have gone on without him."""
    taken = group.tell("anna", "ben")
    assert judge_sender(taken, group.id("anna")) is None
    assert introduction_sentence(judge_ourselves(taken)) == (
        "the two machines have different member lists: "
        "anna and a majority of the machines revoked this machine."
    )
