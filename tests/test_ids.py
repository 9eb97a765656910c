"""Every text form of a ledger id, in and out (BP-35; the forms that the command line accepts)."""

from __future__ import annotations

import tracemalloc
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import UsageError
from bkctl.ids import (
    U64_MAX,
    LedgerId,
    LedgerIdSet,
    check_bookie_id,
    ledger_ids,
    parse_scope_id,
    resolve_ledger,
    to_signed,
    to_unsigned,
)

u64 = st.integers(0, U64_MAX)


@pytest.mark.parametrize(
    ("text", "scope", "ledger"),
    [
        ("0", 0, 0),
        ("12", 0, 12),
        ("18446744073709551615", 0, U64_MAX),
        ("0x1f", 0, 31),
        ("0XfFfFfFfFfFfFfFfF", 0, U64_MAX),
        ("-5", 0, U64_MAX - 4),
        ("7:1", 7, 1),
        ("0x7:0x1f", 7, 31),
        ("00000000000000070000000000000001", 7, 1),
        ("0x00000000000000070000000000000001", 7, 1),
        ("ABCDEF00000000070000000000000001", 0xABCDEF0000000007, 1),
        ("00000000-0000-0007-0000-000000000001", 7, 1),
        # 32 digits are a qualified name even when all of them are decimal
        ("00000000000000000000000000000012", 0, 0x12),
        ("11111111111111112222222222222222", 0x1111111111111111, 0x2222222222222222),
    ],
)
def test_a_text_form_is_read_as_its_two_halves(text: str, scope: int, ledger: int) -> None:
    assert LedgerId.parse(text) == (scope, ledger)


@pytest.mark.parametrize(
    "text",
    [
        "", " 1", "1 ", "x", "0x", "abc", "1.0", "1e3", "1:", ":1", "1:2:3", "-1:2", "1:-2", "+1", "١", "1_000",
        "18446744073709551616", "0x11111111111111111", "-9223372036854775809", "18446744073709551616:1",
        "000000000000000700000000000000a", "00000000000000070000000000000000a",
        "00000000-0000-0007-0000-00000000001", "00000000-000000070000-000000000001", "--5", "1\n",
    ],
)  # fmt: skip
def test_anything_else_is_a_usage_error_that_names_the_forms(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        LedgerId.parse(text)
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code == 2


@given(u64, u64)
def test_every_printed_form_reads_back(scope: int, ledger: int) -> None:
    name = LedgerId(scope, ledger)
    for text in (str(name), name.qualified_name, name.uuid, f"{scope}:{ledger}", "0x" + name.qualified_name):
        assert LedgerId.parse(text) == name
    assert LedgerId(*(half & U64_MAX for half in map(to_signed, name))) == name
    assert LedgerId.from_value(name.value) == name
    assert uuid.UUID(name.uuid).int == name.value
    fields = name.to_json()
    assert LedgerId(int(fields["ledgerScopeId"]), int(fields["ledgerId"])) == name
    assert LedgerId.parse(fields["ledgerQualifiedName"]) == name


@given(u64, u64, u64, u64)
def test_ids_order_as_unsigned_128_bit_numbers(a: int, b: int, c: int, d: int) -> None:
    left, right = LedgerId(a, b), LedgerId(c, d)
    assert (left < right) == (left.value < right.value)
    assert (left < right) == (left.qualified_name < right.qualified_name)


def test_scope_zero_prints_decimal_and_any_other_scope_the_qualified_name() -> None:
    assert str(LedgerId(0, 1 << 63)) == "9223372036854775808"
    assert str(LedgerId(7, 1)) == "00000000000000070000000000000001"


@pytest.mark.parametrize(("scope", "ledger"), [(-1, 0), (0, -1), (U64_MAX + 1, 0), (0, U64_MAX + 1)])
def test_a_half_outside_64_bits_is_refused(scope: int, ledger: int) -> None:
    with pytest.raises(UsageError):
        LedgerId(scope, ledger)


@given(u64)
def test_int64_boundaries_carry_twos_complement(value: int) -> None:
    assert -(1 << 63) <= to_signed(value) < 1 << 63
    assert to_unsigned(to_signed(value)) == value


def test_a_bare_id_takes_the_scope_given_and_a_full_one_must_agree_with_it() -> None:
    assert LedgerId.parse("5", 7) == (7, 5)
    assert LedgerId.parse("7:5", 7) == (7, 5)
    for text in ("8:5", LedgerId(8, 5).qualified_name, LedgerId(0, 5).qualified_name):
        with pytest.raises(UsageError, match="scope"):
            LedgerId.parse(text, 7)


def test_the_forms_given_together_must_name_one_ledger() -> None:
    name = LedgerId(7, 5).qualified_name
    assert resolve_ledger() is None
    assert resolve_ledger("5") == (0, 5)
    assert resolve_ledger("5", ledger_scope_id="7") == (7, 5)
    assert resolve_ledger(ledger_id="-5") == (0, U64_MAX - 4)
    assert resolve_ledger(ledger_id="5", ledger_scope_id="0x7", ledger_qualified_name=name) == (7, 5)
    assert resolve_ledger("7:5", ledger_qualified_name=name.upper()) == (7, 5)
    for arguments in (
        {"argument": "5", "ledger_id": "6"},
        {"argument": "5", "ledger_qualified_name": LedgerId(7, 6).qualified_name},
        {"argument": "7:5", "ledger_scope_id": "8"},
        {"ledger_qualified_name": name, "ledger_scope_id": "8"},
        {"ledger_qualified_name": "5"},
        {"ledger_scope_id": "7"},
        {"argument": "5", "ledger_scope_id": "seven"},
    ):
        with pytest.raises(UsageError):
            resolve_ledger(**arguments)


def test_random_ids_are_version_4_uuids() -> None:
    first, second = LedgerId.random(), LedgerId.random()
    assert first != second
    assert uuid.UUID(first.uuid).version == 4


def test_scope_ids_are_read_in_decimal_and_hex() -> None:
    assert [parse_scope_id(text) for text in ("7", "0x7", "-1")] == [7, 7, U64_MAX]
    with pytest.raises(UsageError):
        parse_scope_id("7:1")


@pytest.mark.parametrize("text", ["127.0.0.1:3181", "bookie-1", "a@b"])
def test_bookie_ids_follow_the_released_rule(text: str) -> None:
    assert check_bookie_id(text) == text


@pytest.mark.parametrize("text", ["", "a b", "a/b", "readonly", "ReadOnly", "ü"])
def test_malformed_bookie_ids_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        check_bookie_id(text)


def test_many_ids_of_a_scope_are_the_same_as_each_made_alone() -> None:
    made = ledger_ids(7, range(3))
    assert made == [LedgerId(7, 0), LedgerId(7, 1), LedgerId(7, 2)]
    assert {type(ledger) for ledger in made} == {LedgerId}
    assert made[1].qualified_name == "00000000000000070000000000000001"
    assert ledger_ids(7, []) == []


@given(st.lists(st.builds(LedgerId, u64 | st.integers(0, 3), u64 | st.integers(0, 3))), st.builds(LedgerId, u64, u64))
def test_id_sets_are_sets_in_ascending_order(ids: list[LedgerId], other: LedgerId) -> None:
    found = LedgerIdSet(ids)
    assert list(found) == sorted(set(ids))
    assert found == set(ids)
    assert len(found) == len(set(ids))
    assert all(ledger in found for ledger in ids)
    assert (other in found) == (other in ids)
    assert "x" not in found
    assert [found[index] for index in range(-len(found), len(found))] == sorted(set(ids)) * 2
    assert {type(each) for each in found} <= {LedgerId}
    with pytest.raises(IndexError):
        found[len(found)]


def test_id_sets_take_16_bytes_an_id() -> None:
    count = 50_000
    tracemalloc.start()
    try:
        found = LedgerIdSet(LedgerId(U64_MAX - count + number, U64_MAX) for number in range(count))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == count
    assert size_bytes < 20 * count
