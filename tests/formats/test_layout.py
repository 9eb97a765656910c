"""Fixed-width records: one declaration gives size, offsets, bytes and values."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import pytest

from bkctl.errors import TruncatedRecord
from bkctl.formats.layout import Layout


class Sample(NamedTuple):
    magic: Annotated[bytes, "4s"]
    version: Annotated[int, "i"]
    offset: Annotated[int, "q"]


SAMPLE = Layout(Sample, size=64)


def test_size_and_offsets_follow_the_declaration() -> None:
    assert SAMPLE.size == 64
    assert SAMPLE.offsets == {"magic": 0, "version": 4, "offset": 8}


def test_values_become_padded_bytes_and_come_back() -> None:
    record = Sample(b"BKLO", 1, -2)
    data = SAMPLE.pack(record)
    assert data == b"BKLO" + bytes.fromhex("00000001fffffffffffffffe") + bytes(48)
    assert SAMPLE.unpack_from(b"xx" + data, 2) == record


def test_short_buffer_error_has_offset_needed_and_present() -> None:
    with pytest.raises(TruncatedRecord) as caught:
        SAMPLE.unpack_from(bytes(70), 10, where="7.log")
    assert (caught.value.offset, caught.value.needed, caught.value.present) == (10, 64, 60)
    assert "7.log" in str(caught.value)


def test_field_without_a_struct_code_raises_type_error() -> None:
    class Bare(NamedTuple):
        version: int

    with pytest.raises(TypeError, match="version"):
        Layout(Bare)
