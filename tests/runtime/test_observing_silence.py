"""Silence: questions are counted, not seconds."""

from potluck.runtime.observing_silence import SILENT_AFTER, Silence


def test_who_does_not_answer_falls_silent_once() -> None:
    """It is told when that happens, not again with every question; others go on."""
    silence = Silence[str]()
    told = []
    for _ in range(3 * SILENT_AFTER):
        told += silence.asked(["attic", "desk"])
        silence.answered("desk")
    assert told == ["attic"]


def test_an_answer_begins_anew_and_who_is_gone_is_forgotten() -> None:
    """The count is of questions in a row."""
    silence = Silence[str]()
    for _ in range(SILENT_AFTER - 1):
        assert silence.asked(["attic"]) == []
    silence.answered("attic")
    assert silence.asked(["attic"]) == []
    assert silence.asked([]) == []
    for _ in range(SILENT_AFTER - 1):
        assert silence.asked(["attic"]) == []
    assert silence.asked(["attic"]) == ["attic"]
