"""The checker of histories finds each kind of bad history, and nothing in a good one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.history import History


def good() -> History:
    """Three acknowledged entries and one that is not, which a recovery kept; a reader before and after the close."""
    history = History()
    for entry_id in range(4):
        history.add(entry_id, b"%d" % entry_id)
    history.acknowledge(0)
    history.acknowledge(1)
    history.confirm("tail", 0)
    history.read(history.now(), 0, [(0, b"0")])
    history.acknowledge(2)
    history.confirm("tail", 1)
    history.close(3)
    history.confirm("tail", 3)
    history.read(history.now(), 3, [(entry_id, b"%d" % entry_id) for entry_id in range(4)], closed=True)
    return history


def lose_an_acknowledged_entry(history: History) -> None:
    history.closes = [(history.now(), 1)]
    history.confirmed = {}
    history.reads = [history.reads[0]]


def read_too_little_of_a_closed_ledger(history: History) -> None:
    history.read(history.now(), 1, [(0, b"0"), (1, b"1")], closed=True)


def skip_an_entry(history: History) -> None:
    del history.reads[-1].entries[1]


def repeat_an_entry(history: History) -> None:
    history.reads[-1].entries.insert(1, history.reads[-1].entries[0])


def swap_entries(history: History) -> None:
    entries = history.reads[-1].entries
    entries[1], entries[2] = entries[2], entries[1]


def read_other_bytes(history: History) -> None:
    history.reads[-1].entries[1] = (1, b"other")


def read_what_was_never_written(history: History) -> None:
    del history.sent[3]


def move_back(history: History) -> None:
    history.confirm("tail", 2)


def append_after_the_close(history: History) -> None:
    history.add(4, b"4")
    history.acknowledge(3)
    history.acknowledge(4)


def confirm_after_the_close(history: History) -> None:
    history.add(4, b"4")
    history.confirm("tail", 4)


def close_twice(history: History) -> None:
    history.close(2)


def acknowledge_with_a_gap(history: History) -> None:
    del history.acknowledged[1]


def test_a_good_history_has_no_problem() -> None:
    assert good().problems() == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lose_an_acknowledged_entry, "closed at entry 1, and entry 2 is acknowledged"),
        (read_too_little_of_a_closed_ledger, "ends at entry 1, and entry 2 was acknowledged"),
        (skip_an_entry, "not each once and in order"),
        (repeat_an_entry, "not each once and in order"),
        (swap_entries, "not each once and in order"),
        (read_other_bytes, "entry 1 of a read was written otherwise"),
        (read_what_was_never_written, "entry 3 of a read was never written"),
        (move_back, "moves back from 3 to 2"),
        (append_after_the_close, "closed at entry 3, and entry 4 is acknowledged"),
        (confirm_after_the_close, "saw entry 4 confirmed, closed at 3"),
        (close_twice, "closed at several entries"),
        (acknowledge_with_a_gap, "entry 2 is acknowledged where entry 1 is due"),
    ],
)
def test_a_bad_history_is_found(spoil: Callable[[History], None], problem: str) -> None:
    history = good()
    spoil(history)
    assert any(problem in found for found in history.problems()), history.problems()
