"""How many calls at a time, for how long, where they run, and to whom."""

import pytest

from potluck import RpcNoConnection
from potluck.core.calls import (
    Pace,
    Stall,
    Whereabouts,
    Window,
    find_rank,
    milliseconds,
    name_in_bytes,
    reply_by,
)
from potluck.vocabulary import NodeId, ProcessId


def test_a_window_bounds_calls_and_bytes() -> None:
    """And lets a single message of any size through."""
    window = Window(2, 100)
    window.add(60)
    assert window.admits(40)
    assert not window.admits(41)
    window.add(40)
    assert not window.admits(0)
    window.remove(60)
    window.remove(40)
    assert (window.calls, window.octets) == (0, 0)
    assert window.admits(1 << 40)


def test_long_messages_have_a_budget_beside_the_short_ones() -> None:
    """What has ended makes room again, of either kind."""
    window = Window(10, 100_000)
    window.add(100_000)
    assert not window.admits(90_000)
    assert window.admits(10)
    window.add(10)
    window.remove(100_000)
    assert window.admits(90_000)
    window.add(1 << 30)
    assert window.admits(90_000)
    assert not window.admits(1 << 30)
    window.remove(1 << 30)
    assert window.admits(1 << 30)


def test_a_function_earns_trust_by_quick_runs() -> None:
    """One slow run after many quick ones is forgiven, two are not."""
    pace = Pace()
    assert not pace.is_quick
    for _ in range(20):
        pace.observe(1e-6)
    assert pace.is_quick
    pace.observe(1.0)
    assert pace.is_quick
    pace.observe(1.0)
    pace.observe(1.0)
    assert not pace.is_quick
    for _ in range(Pace.ENOUGH):
        pace.observe(1e-6)
    assert pace.is_quick


def test_all_workers_waiting_for_long_is_a_stall() -> None:
    """Not if one of them works, nor if one got its answer meanwhile."""
    stall = Stall(workers=2, after=0.5)
    stall.begin_waiting(10.0)
    assert not stall.is_stalled(20.0)
    stall.begin_waiting(20.0)
    assert not stall.is_stalled(20.4)
    assert stall.is_stalled(20.5)
    stall.end_waiting()
    assert not stall.is_stalled(30.0)
    stall.begin_waiting(30.0)
    assert not stall.is_stalled(30.1)
    assert stall.is_stalled(30.5)


def test_a_reason_arrives_before_the_caller_gives_up() -> None:
    """A tenth earlier, or a tenth of a second."""
    assert reply_by(5.0, milliseconds(0.5)) == pytest.approx(5.45)
    assert reply_by(5.0, milliseconds(60)) == pytest.approx(64.9)


def test_a_node_is_found_by_its_name() -> None:
    """In short or in full; several ranks on one machine need a number."""
    names = ["kitchen at 10.0.0.2:1", "attic at 10.0.0.3:1", "attic at 10.0.0.3:2"]
    ranks = {rank: Whereabouts(name) for rank, name in enumerate(names)}
    assert find_rank("kitchen", ranks) == 0
    assert find_rank("attic at 10.0.0.3:2", ranks) == 2
    with pytest.raises(RpcNoConnection, match=r"several ranks: 1, 2 \(attic at 10.0.0.3:1, attic"):
        find_rank("attic", ranks)
    with pytest.raises(RpcNoConnection, match=r"'kitchn': no rank .*\. Did you mean kitchen\?"):
        find_rank("kitchn", ranks)
    with pytest.raises(RpcNoConnection, match=r"The machines here: attic, kitchen\.$"):
        find_rank("zzz", ranks)


def test_a_node_is_found_by_its_id_or_the_beginning_of_it() -> None:
    """A process by the id of its node and its start; too few characters stand for nobody."""
    ranks = {
        0: Whereabouts("kitchen", "a" * 32, 7),
        1: Whereabouts("attic", "a" * 31 + "b", 7),
        2: Whereabouts("attic", "b" * 32, 7),
        3: Whereabouts("attic", "b" * 32, 71),
        4: Whereabouts("shed"),
        5: Whereabouts("cellar", "c" * 32, 1_731_700_004_711),
        6: Whereabouts("cellar", "c" * 32),
    }
    assert find_rank("cccccccc/1731700004711", ranks) == 5
    assert find_rank(str(ProcessId(NodeId("c" * 32), 1_731_700_004_711)), ranks) == 5
    assert find_rank("a" * 32, ranks) == 0
    assert find_rank("a" * 31 + "b", ranks) == 1
    assert find_rank("bbbb/71", ranks) == 3
    assert find_rank("b" * 32 + "/7", ranks) == 2
    with pytest.raises(RpcNoConnection, match=r"several ranks: 0, 1 \(kitchen, attic\)"):
        find_rank("aaaaaaaa/7", ranks)
    for stranger in ("aaa", "bbbb/8", "bbbb/", ""):
        with pytest.raises(RpcNoConnection, match="no rank runs there"):
            find_rank(stranger, ranks)


def test_a_name_that_cannot_travel_is_refused() -> None:
    """Before anything is sent, and in words."""
    assert name_in_bytes("süß") == b"s\xc3\xbc\xc3\x9f"
    for name, words in (
        ("", "1 to 1024 bytes, not 0"),
        ("x" * 1025, "1 to 1024 bytes, not 1025"),
        ("\ud800", "cannot travel"),
    ):
        with pytest.raises(ValueError, match=words):
            name_in_bytes(name)
    with pytest.raises(TypeError, match="a str, not by 5"):
        name_in_bytes(5)  # type: ignore[arg-type]
