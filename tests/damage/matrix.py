"""Damage to files, as one matrix of actions and places, and the required reaction of every reader.

    @pytest.mark.parametrize("damage", matrix.DAMAGE, ids=str)
    def test_…(damage):
        damaged = damage(data, lengths)            # `lengths`: where size fields are
        with matrix.bounded():
            answer = CommandLine(None)("journal", "read", path, "-o", "ndjson")
        matrix.check_answer(answer, path)
        assert rows[: matrix.rows_before(…)] == …

Everything is deterministic: the same file gives the same damage.
"""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from support.command_line import Answer

#: Exit codes with which a reader may end on damaged bytes: nothing wrong seen, findings, corrupt, unsupported version.
CODES: Final = frozenset({0, 3, 7, 8})
#: A file that went away may be missed, too.
CODES_REMOVED: Final = CODES | {4}
#: The most that a reader may allocate beyond its file; windows are 1 MiB, and an absurd length is 2 GiB.
MEMORY_BYTES_MAX: Final = 64 << 20

#: Places as fractions of the file.
PLACES: Final = {"start": 0.0, "quarter": 0.25, "middle": 0.5, "end": 1.0}
ABSURD_LENGTHS: Final = (0x7FFFFFFF, -1, -0x80000000, 0x7FFFFF00, 0, 1)


class Damage(NamedTuple):
    """One kind of damage to a file."""

    action: str
    place: str
    change: Callable[[bytes, Sequence[int]], bytes | None]

    def __str__(self) -> str:
        return f"{self.action}-{self.place}" if self.place else self.action

    def __call__(self, data: bytes, lengths: Sequence[int] = ()) -> bytes | None:
        """Return the damaged content, None for a removed file. `lengths` are offsets of 4-byte size fields."""
        return self.change(data, lengths)

    def do(self, path: Path, lengths: Sequence[int] = ()) -> int | None:
        """Damage the file `path`, and return the first changed byte, None if the file is unchanged."""
        data = path.read_bytes()
        damaged = self(data, lengths)
        if damaged is None:
            path.unlink()
            return 0
        path.write_bytes(damaged)
        return first_difference(data, damaged)


def first_difference(data: bytes, damaged: bytes | None) -> int | None:
    """Return the first byte that differs, None for equal contents."""
    if damaged is None:
        return 0
    if data == damaged:
        return None
    pairs = enumerate(zip(data, damaged, strict=False))
    return next((at for at, (old, new) in pairs if old != new), min(len(data), len(damaged)))


def _at(data: bytes, place: str, room: int = 0) -> int:
    return min(int(len(data) * PLACES[place]), max(0, len(data) - room))


def _span(data: bytes) -> int:
    return max(1, min(600, len(data) // 8))


def _truncate(place: str) -> Damage:
    def change(data: bytes, _: Sequence[int]) -> bytes:
        return data[: _at(data, place, room=1)]

    return Damage("truncate", place, change)


def _flip(place: str, bit: int) -> Damage:
    def change(data: bytes, _: Sequence[int]) -> bytes:
        at = _at(data, place, room=1)
        return data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :] if data else data

    return Damage(f"flip{bit}", place, change)


def _zero(place: str) -> Damage:
    def change(data: bytes, _: Sequence[int]) -> bytes:
        at, span = _at(data, place, room=_span(data)), _span(data)
        return data[:at] + bytes(len(data[at : at + span])) + data[at + span :]

    return Damage("zero", place, change)


def _zero_sector(place: str) -> Damage:
    """Lose a sector that never reached the disk."""

    def change(data: bytes, _: Sequence[int]) -> bytes:
        at = _at(data, place, room=1) // 512 * 512
        return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]

    return Damage("zero-sector", place, change)


def _cut(place: str) -> Damage:
    def change(data: bytes, _: Sequence[int]) -> bytes:
        at = _at(data, place, room=_span(data))
        return data[:at] + data[at + _span(data) :]

    return Damage("cut", place, change)


def _length(place: str, length: int) -> Damage:
    def change(data: bytes, lengths: Sequence[int]) -> bytes:
        at = lengths[int((len(lengths) - 1) * PLACES[place])] if lengths else _at(data, place, room=4)
        return data[:at] + length.to_bytes(4, "big", signed=True) + data[at + 4 :]

    return Damage(f"length{length:#x}", place, change)


def _swap(place: str) -> Damage:
    """Swap two neighbouring ranges."""

    def change(data: bytes, _: Sequence[int]) -> bytes:
        span = _span(data)
        at = _at(data, place, room=2 * span)
        return data[:at] + data[at + span : at + 2 * span] + data[at : at + span] + data[at + 2 * span :]

    return Damage("swap", place, change)


def _append(name: str, make: Callable[[bytes], bytes]) -> Damage:
    return Damage("append", name, lambda data, _: data + make(data))


def _noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


DAMAGE: Final = (
    *(_truncate(place) for place in PLACES),
    *(_flip(place, bit) for place in PLACES for bit in (0, 7)),
    *(_zero(place) for place in PLACES),
    *(_zero_sector(place) for place in PLACES),
    *(_cut(place) for place in PLACES),
    *(_length(place, length) for place in PLACES for length in ABSURD_LENGTHS),
    *(_swap(place) for place in PLACES),
    Damage("remove", "", lambda _data, _lengths: None),
    Damage("empty", "", lambda _data, _lengths: b""),
    _append("a-byte", lambda _: b"\x01"),
    _append("garbage", lambda _: _noise(777)),
    _append("much-garbage", lambda _: _noise(3_000_000)),
    _append("zeros", lambda _: bytes(5000)),
    _append("itself", lambda data: data),
)


@contextmanager
def bounded(memory_bytes: int = MEMORY_BYTES_MAX) -> Iterator[None]:
    """Fail if Python allocates more than `memory_bytes` at once; the tests' timeout covers hangs."""
    tracemalloc.start(1)
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= memory_bytes, f"{peak:,} bytes allocated"


def check_answer(answer: Answer, path: Path, *, removed: bool = False, offset: bool = True) -> list[dict[str, Any]]:
    """Assert that a command (`-o ndjson`) gave a result or one clear error, and return its rows.

    The error is one line naming `path`, and a byte in it where `offset` says that there is one to name.
    """
    assert answer.code in (CODES_REMOVED if removed else CODES), answer.err
    rows = [json.loads(line) for line in answer.out.splitlines()]
    if answer.code == 0:
        # Reads of records say that a file is cut.
        assert re.fullmatch(rf"(.*{re.escape(path.name)} ends within a record at byte \d+: .*\n)?", answer.err)
        return rows
    problem = answer.problem
    if answer.code != 3:
        assert path.name in problem
    if answer.code == 7 and offset:
        assert re.search(r"at byte \d", problem), problem
    return rows


def undamaged(rows: Sequence[dict[str, Any]], difference: int | None) -> list[dict[str, Any]]:
    """Return the records (rows with `offset` and `recordSize`) that end before the first changed byte."""
    if difference is None:
        return list(rows)
    return [row for row in rows if row["offset"] + 4 + row["recordSize"] <= difference]
