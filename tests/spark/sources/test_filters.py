"""Filters that Spark pushes down, against the same filters applied to rows one by one."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from support.source_rows import Planned, cuts

from bkctl.errors import UsageError
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import write_header
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.options import Mode, SourceOptions
from bkctl.spark.sources.records import EntryLogSource

LEDGERS = (LedgerId(0, 5), LedgerId(0, 6), LedgerId(7, 5), LedgerId(7, 2**63 + 9), LedgerId(2**64 - 1, 0))


@pytest.fixture(scope="module")
def bookie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bookie's directory with two plain logs and a scoped one."""
    current = tmp_path_factory.mktemp("bookie") / "current"
    (current / "scoped").mkdir(parents=True)
    for name, version in (("0", 1), ("1f", 1), ("scoped/0", 2)):
        data = write_header(version)
        for at in range(60):
            ledger = LEDGERS[at % 2] if version == 1 else LEDGERS[2 + at % 3]
            entry_id = at // 3 + (2**40 if at % 7 == 0 else 0)
            sealed = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, -1, 5, b"hello")
            data += RECORD_SIZE.pack(len(sealed) + 5) + sealed + b"hello"
        (current / f"{name}.log").write_bytes(data)
    return current.parent


@pytest.fixture(scope="module")
def rows(bookie: Path) -> list[dict[str, Any]]:
    return Planned(EntryLogSource, path=bookie).rows()


def keeps(each: Filter, row: dict[str, Any]) -> bool:
    """Return the result of a filter in SQL: true, false or null."""
    if isinstance(each, IsNotNull):
        return row[each.attribute[0]] is not None
    value: Any = row[each.attribute[0]]
    if value is None:
        return False
    if isinstance(each, In):
        return value in each.value
    return bool(
        {
            EqualTo: lambda: value == each.value,
            EqualNullSafe: lambda: value == each.value,
            GreaterThan: lambda: value > each.value,
            GreaterThanOrEqual: lambda: value >= each.value,
            LessThan: lambda: value < each.value,
            LessThanOrEqual: lambda: value <= each.value,
        }[type(each)]()
    )


numbers = st.one_of(st.integers(-2, 25), st.sampled_from([2**40, 2**63 - 1, -(2**63), 2**40 + 5]))
whole = [0, 5, 6, 7, 2**63 + 9, 2**64 - 1, 2**64, -1]
halves = st.sampled_from([*whole, *map(Decimal, whole)])
names = st.sampled_from([ledger.qualified_name for ledger in LEDGERS] + ["0" * 32, "x" * 32, "5"])
values = {
    "ledgerId": halves,
    "ledgerScopeId": halves,
    "ledgerQualifiedName": names,
    "entryId": numbers,
    "offset": st.integers(1000, 4000),
    "logId": st.integers(0, 40),
    "logIdHex": st.sampled_from(["0", "1f", "1F", "2"]),
    "type": st.sampled_from(["entry", "fence"]),
}


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    name = draw(st.sampled_from(sorted(values)))
    kinds: list[Any] = [EqualTo, EqualNullSafe, In, IsNotNull]
    if name in ("entryId", "offset", "logId", "ledgerId", "ledgerScopeId"):
        kinds += [GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual] * 2
    kind = draw(st.sampled_from(kinds))
    if kind is IsNotNull:
        return IsNotNull((name,))
    if kind is In:
        return In((name,), tuple(draw(st.lists(values[name], min_size=1, max_size=3))))
    made: Filter = kind((name,), draw(values[name]))
    return made


@given(st.lists(filters(), max_size=4), st.sampled_from([200, None]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_filters_match_spark(bookie: Path, rows: list[dict[str, Any]], chosen: list[Filter], size: int | None) -> None:
    options = {} if size is None else {"borders": cuts(size, *sorted(bookie.glob("**/*.log")))}
    planned = Planned(EntryLogSource, chosen, path=bookie, **options)
    found = [row for row in planned.rows() if all(keeps(each, row) for each in planned.left)]
    assert found == [row for row in rows if all(keeps(each, row) for each in chosen)]
    assert all(isinstance(each, IsNotNull) or (isinstance(each, In) and not each.value) for each in planned.left)


def test_unsupported_filters_are_left_to_spark(bookie: Path) -> None:
    others: list[Filter] = [
        Not(EqualTo(("ledgerId",), 5)),
        StringStartsWith(("ledgerId",), "5"),
        GreaterThan(("ledgerQualifiedName",), "5"),
        EqualTo(("ledgerId",), "5"),
        EqualTo(("ledgerId",), Decimal("5.5")),
        EqualTo(("ledgerId", "field"), 5),
        EqualTo(("recordSize",), 41),
        EqualTo(("entryId",), "5"),
        EqualTo(("entryId",), True),
        EqualNullSafe(("ledgerId",), None),
        In(("ledgerId",), (5, None)),
        IsNotNull(("lastAddConfirmed",)),
    ]
    planned = Planned(EntryLogSource, others, path=bookie)
    assert planned.left == others
    assert len(planned.rows()) == 180


def test_permissive_mode_leaves_all_filters_to_spark(bookie: Path) -> None:
    chosen: list[Filter] = [IsNotNull(("ledgerId",)), EqualTo(("ledgerId",), 6)]
    planned = Planned(EntryLogSource, chosen, path=bookie, mode="permissive")
    assert planned.left == chosen
    assert {row["ledgerId"] for row in planned.rows()} == {6}


def test_files_that_a_filter_excludes_are_not_opened(bookie: Path, tmp_path: Path) -> None:
    current = tmp_path / "current"
    current.mkdir()
    (current / "0.log").write_bytes((bookie / "current" / "0.log").read_bytes())
    (current / "1.log").write_bytes(b"no log at all")
    assert len(Planned(EntryLogSource, [EqualTo(("logId",), 0)], path=tmp_path).rows()) == 60


def test_conditions_list_ledgers_if_finite() -> None:
    def conditions(*filters: Filter) -> Conditions:
        made = Conditions()
        assert not list(made.push(filters, integers=("entryId",)))
        return made

    assert conditions().wanted_ledgers() is None
    assert conditions(EqualTo(("ledgerId",), 5)).wanted_ledgers() is None
    assert conditions(EqualTo(("ledgerScopeId",), 7)).ids_of("ledgerScopeId") == {7}
    both = conditions(In(("ledgerScopeId",), (7, 0)), EqualTo(("ledgerId",), 5))
    assert both.wanted_ledgers() == [LedgerId(0, 5), LedgerId(7, 5)]
    named = conditions(EqualTo(("ledgerQualifiedName",), LedgerId(7, 5).qualified_name), EqualTo(("ledgerId",), 5))
    assert named.wanted_ledgers() == [LedgerId(7, 5)]
    assert conditions(EqualTo(("ledgerId",), -1), EqualTo(("ledgerScopeId",), 0)).wanted_ledgers() == []
    above = conditions(
        GreaterThan(("ledgerId",), Decimal(5)), In(("ledgerId",), (5, 6)), EqualTo(("ledgerScopeId",), 0)
    )
    assert above.wanted_ledgers() == [LedgerId(0, 6)]
    assert conditions(GreaterThan(("ledgerId",), 5)).about_ledgers
    assert conditions(GreaterThan(("entryId",), 4), LessThan(("entryId",), 9)).entry_range() == (5, 8)
    assert conditions(In(("entryId",), (9, 3))).entry_range() == (3, 9)
    first, last = conditions(EqualTo(("entryId",), 3), EqualTo(("entryId",), 4)).entry_range()
    assert first > last


# --- options ----------------------------------------------------------------------------------------------------------


def options(**given_options: str) -> SourceOptions:
    return SourceOptions("source", given_options, ("mode", "columns", "size", "flag", "count", "keyFile", "keyEnv"))


def test_option_names_are_case_insensitive() -> None:
    assert options(MODE="Permissive").choice("mode", Mode.FAILFAST) is Mode.PERMISSIVE
    assert options().choice("mode", Mode.FAILFAST) is Mode.FAILFAST
    assert options(columns="B, *").columns(["a", "c"], ["b"]) == ["b", "a", "c"]
    assert options().columns(["a", "c"], ["b"]) == ["a", "c"]
    assert options(path="x", paths='["y", "x,z"]').paths() == ["x", "y", "x,z"]
    with pytest.raises(UsageError, match="did you mean columns"):
        options(column="a")


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("10b", 10), ("2k", 2048), ("2KiB", 2048), ("128MiB", 128 << 20), ("1GB", 1 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert options(size=text).size_bytes("size", 7) == size
    assert options().size_bytes("size", 7) == 7


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "kib", "1 x", "9999999t"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        options(size=text).size_bytes("size", 7)


def test_flags_and_numbers() -> None:
    assert options(flag="TRUE").flag("flag")
    assert not options().flag("flag")
    assert options(count="12").integer("count", 3, 1) == 12
    for name, text in (("flag", "yes"), ("count", "0"), ("count", "1e3")):
        with pytest.raises(UsageError, match=name):
            options(**{name: text}).flag("flag") if name == "flag" else options(**{name: text}).integer("count", 3, 1)


def test_secrets_are_read_from_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"se cret\n")
    assert options(keyFile=str(file)).secret("key") == b"se cret"
    monkeypatch.setenv("BKCTL_TEST_KEY", "other")
    assert options(keyEnv="BKCTL_TEST_KEY").secret("key") == b"other"
    assert options().secret("key") is None
    for given_options in (
        {"keyFile": str(file), "keyEnv": "BKCTL_TEST_KEY"}, {"keyEnv": "BKCTL_TEST_NONE"}, {"keyFile": f"{file}x"}
    ):  # fmt: skip
        with pytest.raises(UsageError):
            options(**given_options).secret("key")
    with pytest.raises(UsageError):
        options(key="secret")
