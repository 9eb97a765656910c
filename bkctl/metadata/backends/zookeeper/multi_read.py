"""ZooKeeper's multiRead, many reads in one request, and the answers to it, which need no client to be parsed.

    multiRead, in both directions: type:int32 done:bool error:int32 … for each read; -1, true, -1 ends them

Source: ZooKeeper's zookeeper.jute, ZooDefs.OpCode, KeeperException.Code, MultiOperationRecord, MultiResponse.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from bkctl.metadata.store import Versioned

_ERROR: Final = -1
_NO_NODE: Final = -101
_INT = struct.Struct(">i")
_MULTI_HEADER = struct.Struct(">i?i")  # type, done, error
_READ = struct.Struct(">i?ii")  # a multi header, and the first number behind it
_MULTI_END: Final = _MULTI_HEADER.pack(-1, True, -1)
_STAT = struct.Struct(">qqqqiiiqiiq")
_TIME_VERSION = struct.Struct(">16xq8xi")  # the first fields of a stat
#: The server gave no answer, or an error other than a missing node.
NO_ANSWER: Final = object()


class Origin(NamedTuple):
    """The transaction that created a node, and the session that owns an ephemeral node (0: not ephemeral)."""

    czxid: int
    session_id: int


class MultiRead:
    """A request of kazoo's for many reads of one operation; its result is the answer's bytes, and where they begin."""

    type = 22

    def __init__(self, operation: int, paths: Sequence[str]) -> None:
        self.operation, self.paths = operation, paths

    def serialize(self) -> bytes:
        """Return the body of the request."""
        paths = [path.encode() for path in self.paths]
        # Paths mostly have one length, so all have the same header.
        headers = {size: _READ.pack(self.operation, False, -1, size) for size in set(map(len, paths))}
        return b"".join([*[headers[len(path)] + path + b"\0" for path in paths], _MULTI_END])

    def deserialize(self, data: bytes, offset: int) -> tuple[bytes, int]:
        """Return the answer as it is, for `parse_answers` on the thread that asked."""
        return data, offset


def parse_answers(data: bytes, at: int, operation: str, count: int) -> list[Any]:
    """Return the answers to `count` reads, as Answers has them, which begin at the byte `at`.

    Raises ValueError or struct.error for malformed bytes.
    """
    code, parse = OPERATIONS[operation][:2]
    answers: list[Any] = []
    for _ in range(count):
        kind, _, error, number = _READ.unpack_from(data, at)
        at += _READ.size
        if kind == code:
            answer, at = parse(data, at, number)
            answers.append(answer)
        elif kind == _ERROR:
            answers.append(None if error == _NO_NODE else NO_ANSWER)
        else:
            raise ValueError("an answer to another request")
    return answers


def _value(data: bytes, start: int, size: int) -> tuple[Versioned[bytes], int]:
    at = start + size if size > 0 else start  # -1: null
    ctime_ms, version = _TIME_VERSION.unpack_from(data, at)
    # A call of the class takes twice as long.
    return tuple.__new__(Versioned, (data[start:at], version, ctime_ms)), at + _STAT.size


def _origin(data: bytes, start: int, size: int) -> tuple[Origin, int]:
    at = start + max(size, 0)
    stat = _STAT.unpack_from(data, at)
    return Origin(stat[0], stat[7]), at + _STAT.size


def _names(data: bytes, at: int, count: int) -> tuple[list[str], int]:
    if count <= 0:
        return [], at
    # Names mostly have one length. Then the length before each name is one separator, and no name contains its zeros.
    end = at + count * (4 + _INT.unpack_from(data, at)[0])
    if at < end <= len(data) and (block := data[at:end]).isascii():
        text = block.decode("ascii")
        names = text.split(text[:4])
        if len(names) == count + 1 and text.count("\0") == count * text.count("\0", 0, 4):
            del names[0]
            return sorted(names), end
    names = []
    for _ in range(count):
        size = _INT.unpack_from(data, at)[0]
        if not 0 <= size <= len(data) - at - 4:
            raise ValueError("a malformed answer")
        names.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return sorted(names), at


class Operation(NamedTuple):
    """A kind of read: its code and parser in a multiRead, the conversion of kazoo's answer, and sizes of batches.

    The first batch has `first_size` reads; a batch grows where its answers have fewer bytes than `grow_below`, and
    shrinks above `shrink_above`.
    """

    code: int
    parse: Callable[[bytes, int, int], tuple[Any, int]]
    convert: Callable[[Any], Any]
    first_size: int
    grow_below: int
    shrink_above: int


OPERATIONS: Final = {
    "get": Operation(
        4, _value, lambda found: Versioned(found[0], found[1].version, found[1].ctime), 64, 1 << 19, 1 << 21
    ),
    "children": Operation(8, _names, sorted, 4, 40_000, 400_000),
    "origin": Operation(4, _origin, lambda found: Origin(found[1].czxid, found[1].ephemeralOwner), 256, 0, 1 << 21),
}


class Answers(Collection[Any]):
    """The answers to `count` reads, parsed where they are looked at: here, or in the process that unpickles them.

    Each is a Versioned, sorted names or an Origin, or None for a missing node. A read without an answer is repeated by
    `repeat`, with its number and the seconds that it waited; in another process NO_ANSWER stands for it.
    """

    def __init__(self, operation: str, count: int, found: tuple[bytes, int] | list[Any]) -> None:
        """`found` is the answer to a multiRead, with the place where it begins, or what it would be parsed to."""
        self._operation, self._count, self._found = operation, count, found
        self.repeat: Callable[[int, float], Any] | None = None
        self.waited_s = 0.0

    def __reduce__(self) -> tuple[type[Answers], tuple[Any, ...]]:
        return Answers, (self._operation, self._count, self._found)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, answer: object) -> bool:
        return answer in list(self)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._found, tuple):
            try:
                self._found = parse_answers(*self._found, self._operation, self._count)
            except (struct.error, ValueError):
                self._found = [NO_ANSWER] * self._count
        while self.repeat is not None and NO_ANSWER in self._found:
            index = self._found.index(NO_ANSWER)
            self._found[index] = self.repeat(index, self.waited_s)
            self.waited_s = 0.0
        return iter(self._found)

    def size_bytes(self) -> int:
        """Return the bytes of the answers, about: of names, what short ones have."""
        if isinstance(self._found, tuple):
            return len(self._found[0])
        return sum(len(each.value) for each in self._found if isinstance(each, Versioned)) + sum(
            10 * len(each) for each in self._found if isinstance(each, list)
        )
