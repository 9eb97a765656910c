"""The matrix does what its names say."""

from __future__ import annotations

import pytest
from damage import matrix

DATA = bytes(range(1, 251)) * 20
LENGTHS = [100, 1000, 2000]


def test_damages_have_unique_names() -> None:
    names = list(map(str, matrix.DAMAGE))
    assert len(set(names)) == len(names)
    assert {name.partition("-")[0].rstrip("07") for name in names} >= {
        "truncate", "flip", "zero", "cut", "swap", "remove", "append",
    }  # fmt: skip


@pytest.mark.parametrize("damage", matrix.DAMAGE, ids=str)
def test_every_damage_changes_a_file(damage: matrix.Damage) -> None:
    damaged = damage(DATA, LENGTHS)
    assert damaged != DATA
    assert damaged == damage(DATA, LENGTHS)
    if damaged is not None and damage.action.startswith("length"):
        assert matrix.first_difference(DATA, damaged) in range(100, 2004)
    for tiny in (b"", b"x"):
        assert isinstance(damage(tiny), bytes | None)


def test_memory_limit_is_enforced() -> None:
    with pytest.raises(AssertionError, match="bytes allocated"), matrix.bounded(1 << 20):
        bytearray(2 << 20)
