"""Changes to the bytes of a frame, as a hostile client or a broken network makes them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

from hypothesis import strategies as st

FRAME_SIZE_BYTES_MAX: Final = 5 << 20
NUMBERS: Final = (
    0, 1, 2, 3, 5, 127, 128, 255, 256, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 40) - 1, 1 << 40,
    (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2, (1 << 64) - 1,
)  # fmt: skip
LENGTHS: Final = (
    -(1 << 31), -1, 0, 1, 3, 4, 23, 24, 44, FRAME_SIZE_BYTES_MAX - 4, FRAME_SIZE_BYTES_MAX, FRAME_SIZE_BYTES_MAX + 1,
    1 << 30, (1 << 31) - 1,
)  # fmt: skip


def mutated(frame: bytes, other: Callable[[], bytes], chance: random.Random) -> bytes:
    """Return `frame` with some of its bits, bytes, numbers or its length changed, or with parts of `other` frames."""
    data = bytearray(frame)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 5))):
        at = chance.randrange(len(data)) if data else 0
        match chance.randrange(9):
            case 0 if data:
                data[at] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at] = chance.choice((0, 0x7F, 0x80, 0xA0, 0xA3, 0xFF, chance.randrange(256)))
            case 2:
                del data[at : at + chance.choice((1, 4, 8, 100))]
            case 3:
                data[at:at] = chance.randbytes(chance.choice((1, 4, 8, 100)))
            case 4:
                data[at : at + 8] = struct.pack(">Q", chance.choice(NUMBERS))
            case 5:
                foreign = other()
                data[at:] = foreign[chance.randrange(len(foreign)) :]
            case 6:
                data[:4] = struct.pack(">i", chance.choice(LENGTHS))
            case 7:
                data[at:at] = data[max(0, at - chance.randrange(1, 200)) : at]
            case _:
                data = data[:at]
    if chance.random() < 0.7 and len(data) >= 4:
        data[:4] = struct.pack(">i", len(data) - 4)  # so that what is wrong is behind the length
    return bytes(data)


#: Bytes that `changed` replaces: where (of 1,000), and by what.
changes = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), max_size=3)


def changed(data: bytes, where: list[tuple[int, int]]) -> bytes:
    """Return `data` with the bytes replaced that an example of `changes` names."""
    mutable = bytearray(data)
    for at, value in where:
        if mutable:
            mutable[at * len(mutable) // 1000] = value
    return bytes(mutable)
