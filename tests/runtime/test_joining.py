"""``potluck.join()`` with what people may give it by mistake."""

from __future__ import annotations

from typing import Any

import pytest

import potluck
from support.clusters import join, new_job


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5"])
def test_a_node_does_not_wait_for_a_time_that_is_none(timeout: Any) -> None:
    """It is refused at once, whether or not there is anything to wait for."""
    with pytest.raises((TypeError, ValueError), match="A timeout"):
        potluck.join(job="nobody", multicast=False, timeout=timeout)


def test_an_interface_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A name that is spelled wrongly would leave this machine alone, and nobody would know why."""
    with join(1, new_job(), interfaces=["nosuch0"]) as alone:
        assert alone.world_size == 1
    assert "the interface nosuch0 is not there" in caplog.text
    assert ", lo" in caplog.text or ": lo" in caplog.text


def test_a_thread_that_joins_a_job_again_leaves_it_first(caplog: pytest.LogCaptureFixture) -> None:
    """As a notebook cell does that is run twice: the first cluster must not stay a member."""
    job = new_job()
    options: dict[str, Any] = {"multicast": False, "solo_delay": 0.0, "timeout": 30}
    first = potluck.join(1, job=job, **options)
    with (
        potluck.join(1, job=job, **options) as second,
        potluck.join(1, job=new_job(), **options) as other,
    ):
        assert first.world_size == second.world_size == other.world_size == 1
        assert second.all_reduce(2.0) == 2.0
        with pytest.raises(potluck.DistributedError, match="closed"):
            first.barrier()
    assert caplog.text.count("join() was called again") == 1
