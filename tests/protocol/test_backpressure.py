"""Clients that read slowly while unread answers fill their memory: who loses the connection, by a clock of our own."""

from __future__ import annotations

import types
from collections import Counter
from typing import cast

import pytest

from bkctl.protocol import backpressure
from bkctl.protocol.backpressure import UnreadAnswers
from bkctl.protocol.flow import ControlledConnection

MIB = 1 << 20


class Reader:
    """Stands for the connection of a client that is behind with reading."""

    def __init__(self, unsent_bytes: int) -> None:
        self.unsent_bytes = unsent_bytes
        self.is_ended = False

    def abort(self) -> None:
        self.is_ended = True


class Readers:
    """A server's unread answers, whose clients are looked at once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_max: int, sizes: list[int]) -> None:
        self._clock = types.SimpleNamespace(now_s=0.0)
        self._clock.monotonic = lambda: self._clock.now_s
        monkeypatch.setattr(backpressure, "time", self._clock)
        self.ended: Counter[str] = Counter()
        self.unread = UnreadAnswers(bytes_max, self.ended)
        self.readers = [Reader(size) for size in sizes]
        for reader in self.readers:
            self.unread.update(cast("ControlledConnection", reader), reader.unsent_bytes)

    def pass_time(self, seconds: int, *, read_bytes: int, every_s: int) -> None:
        for second in range(seconds):
            self._clock.now_s += 1
            if second % every_s == 0:
                for reader in self.readers:
                    reader.unsent_bytes = max(1, reader.unsent_bytes - read_bytes)
            self.unread.look()


def test_clients_that_read_by_the_byte_lose_their_connections_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = Readers(monkeypatch, 256 * MIB, [6 * MIB] * 60)
    assert clients.unread.is_full
    clients.pass_time(10, read_bytes=1, every_s=4)
    assert not clients.unread.is_full
    assert clients.ended == {"unread": 18}
    assert sum(reader.is_ended for reader in clients.readers) == 18, "and the others keep theirs"


def test_the_largest_of_those_that_read_nothing_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Readers(monkeypatch, 16 * MIB, [2 * MIB, 9 * MIB, 3 * MIB, 8 * MIB])
    clients.pass_time(10, read_bytes=0, every_s=1)
    assert [reader.is_ended for reader in clients.readers] == [False, True, False, False]


@pytest.mark.parametrize(("size", "read_bytes"), [(64 * MIB, 4 * MIB), (MIB // 2, MIB // 16)])
def test_clients_that_read_slowly_but_steadily_keep_their_connections(
    monkeypatch: pytest.MonkeyPatch, size: int, read_bytes: int
) -> None:
    clients = Readers(monkeypatch, size // 2, [size])
    clients.pass_time(28, read_bytes=read_bytes, every_s=4)
    assert not clients.ended
    was_full = clients.unread.is_full
    clients.pass_time(10, read_bytes=0, every_s=1)
    assert clients.ended == ({"unread": 1} if was_full else {}), "once it no longer reads"
