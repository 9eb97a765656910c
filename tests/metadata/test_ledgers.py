"""Paths and listings of each ledger manager (over a store in a file), and the ledger object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bkctl.errors import IllegalOperation, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.backends.zookeeper.ledger_managers import (
    SHORT_ID_END,
    FlatLedgerManager,
    HierarchicalLedgerManager,
    LegacyHierarchicalLedgerManager,
    LongHierarchicalLedgerManager,
    ZooKeeperLedgerManager,
    _leaf_numbers,
)
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS, ledger_row
from bkctl.metadata.ledgers import QualifiedNameLedgerManager, VersionedMetadata
from bkctl.metadata.store import NEW

MANAGERS = [
    HierarchicalLedgerManager,
    LongHierarchicalLedgerManager,
    FlatLedgerManager,
    LegacyHierarchicalLedgerManager,
    QualifiedNameLedgerManager,
]
METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32, b"pw", (Fragment(0, ("bookie-1",)),))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(str(tmp_path / "metadata.db"), create=True) as opened:
        yield opened


@pytest.mark.parametrize(
    ("manager", "ledger", "path"),
    [
        (HierarchicalLedgerManager, LedgerId(0, 12345678), "00/1234/L5678"),
        (HierarchicalLedgerManager, LedgerId(0, 2147483646), "21/4748/L3646"),
        (HierarchicalLedgerManager, LedgerId(0, 2147483647), "000/0000/0021/4748/L3647"),
        (HierarchicalLedgerManager, LedgerId(0, I64_MAX), "922/3372/0368/5477/L5807"),
        (LongHierarchicalLedgerManager, LedgerId(0, 1), "000/0000/0000/0000/L0001"),
        (LongHierarchicalLedgerManager, LedgerId(0, 12345678), "000/0000/0000/1234/L5678"),
        (FlatLedgerManager, LedgerId(0, 12), "L0000000012"),
        (FlatLedgerManager, LedgerId(0, I64_MAX), "L9223372036854775807"),
        (LegacyHierarchicalLedgerManager, LedgerId(0, 9999999999), "99/9999/L9999"),
        (QualifiedNameLedgerManager, LedgerId(7, 12), "ledgers/0000000000000007000000000000000c"),
        (HierarchicalLedgerManager, LedgerId(7, 1), "scopes/0000/000000000007/0000/0000/0000/L0001"),
        (FlatLedgerManager, LedgerId(7, 1), "scopes/0000/000000000007/0000/0000/0000/L0001"),
        (
            LongHierarchicalLedgerManager,
            LedgerId(0x0123456789ABCDEF, 0xFEDCBA9876543210),
            "scopes/0123/456789abcdef/fedc/ba98/7654/L3210",
        ),
    ],
)
def test_paths_are_apaches_in_scope_0_and_in_the_scopes_tree_else(
    store: SqliteStore, manager: type[HierarchicalLedgerManager], ledger: LedgerId, path: str
) -> None:
    assert manager(store).path(ledger) == path


def test_a_legacy_layout_has_ten_digits(store: SqliteStore) -> None:
    manager = LegacyHierarchicalLedgerManager(store)
    with pytest.raises(UsageError):
        manager.create(LedgerId(0, 10**10), METADATA)
    manager.create(LedgerId(7, 10**10), METADATA)
    assert list(manager.ledgers(None)) == [LedgerId(7, 10**10)]


interesting = st.sampled_from([0, 1, 9999, 10_000, 99_999_999, SHORT_ID_END - 1, SHORT_ID_END, SHORT_ID_END + 1])
short_ids = interesting | st.integers(0, 10**10 - 1) | st.integers(0, 40_000)
ids_of_scope_0 = st.builds(LedgerId, st.just(0), short_ids | st.integers(0, I64_MAX))
scopes = st.sampled_from([1, 7, 1 << 48, 1 << 63, U64_MAX]) | st.integers(1, U64_MAX)
ids = ids_of_scope_0 | st.builds(LedgerId, scopes, short_ids | st.integers(0, U64_MAX))


@pytest.mark.parametrize("manager", MANAGERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_set_of_ledgers_is_listed_in_order_from_anywhere(
    tmp_path_factory: pytest.TempPathFactory, manager: type[HierarchicalLedgerManager], data: st.DataObject
) -> None:
    largest = 10**10 if manager is LegacyHierarchicalLedgerManager else 1 << 63
    fitting = ids.filter(lambda ledger: ledger.is_scoped or ledger.ledger_id < largest)
    expected = sorted(data.draw(st.sets(fitting, max_size=12)))
    after = data.draw(st.sampled_from(expected) | ids if expected else ids)
    directory = tmp_path_factory.mktemp("listing")
    with SqliteStore(str(directory / "metadata.db"), create=True) as store:
        ledgers = manager(store)
        store.put_all([("scopes", b"")])
        written: set[str] = set()
        for ledger in expected:
            store.put(ledgers.path(ledger), b"", NEW)
            written.add(ledgers.path(ledger))
        assert len(written) == len(expected)
        assert list(ledgers.ledgers(None)) == expected
        assert list(ledgers.ledgers(None, after)) == [ledger for ledger in expected if ledger > after]
        assert list(ledgers.scopes()) == sorted({ledger.scope_id for ledger in expected})
        for scope_id in {ledger.scope_id for ledger in expected} | {0, after.scope_id}:
            of_scope = [ledger for ledger in expected if ledger.scope_id == scope_id]
            assert list(ledgers.ledgers(scope_id)) == of_scope
            assert list(ledgers.ledgers(scope_id, after)) == [ledger for ledger in of_scope if ledger > after]


@pytest.mark.parametrize("manager", MANAGERS)
@given(ledger=ids_of_scope_0 | st.builds(LedgerId, scopes, st.integers(0, U64_MAX)))
def test_a_path_names_its_ledger(manager: type[HierarchicalLedgerManager], ledger: LedgerId) -> None:
    if manager is LegacyHierarchicalLedgerManager and not ledger.is_scoped and ledger.ledger_id >= 10**10:
        return
    path = manager.path(object.__new__(manager), ledger)
    if manager is QualifiedNameLedgerManager:
        assert path == f"ledgers/{ledger.qualified_name}"
    elif ledger.is_scoped:
        assert path.startswith("scopes/")
        digits = re.sub("[/L]", "", path[len("scopes/") :])
        assert LedgerId.from_value(int(digits, 16)) == ledger
    else:
        assert re.fullmatch(r"L\d{10,19}|\d\d/\d{4}/L\d{4}|\d{3}/\d{4}/\d{4}/\d{4}/L\d{4}", path)
        assert int(re.sub("[/L]", "", path)) == ledger.ledger_id


odd_names = st.text(alphabet="L0123456789\u0664", min_size=1, max_size=10)
leaf_names = st.from_regex(r"L[0-9]{4}", fullmatch=True) | odd_names


@given(names=st.lists(leaf_names, unique=True, max_size=6).map(sorted))
def test_leaf_numbers_at_once_equal_leaf_numbers_one_by_one(names: list[str]) -> None:
    matches = [re.fullmatch("L([0-9]{4})", name, re.ASCII) for name in names]
    assert _leaf_numbers(names) == [int(match[1]) for match in matches if match]


def test_removing_a_scoped_ledger_prunes_empty_parents_but_not_scopes(store: SqliteStore) -> None:
    ledgers = HierarchicalLedgerManager(store)
    for ledger in (LedgerId(7, 1), LedgerId(7, 1 << 40), LedgerId(8, 1), LedgerId(0, 1), LedgerId(0, 2)):
        ledgers.create(ledger, METADATA)
    ledgers.remove(LedgerId(7, 1 << 40))
    assert store.children("scopes/0000/000000000007") == ["0000"]
    assert store.children("scopes/0000/000000000007/0000") == ["0000"]
    ledgers.remove(LedgerId(7, 1))
    assert store.children("scopes/0000") == ["000000000008"]
    ledgers.remove(LedgerId(8, 1))
    assert store.children("scopes") == []
    ledgers.remove(LedgerId(0, 1))
    assert store.children("00/0000") == ["L0002"]
    ledgers.remove(LedgerId(0, 2))
    assert store.children("") == ["scopes"]


class Sequences:
    """A store whose sequences are about to end."""

    def __init__(self, store: SqliteStore, numbers: dict[str, int]) -> None:
        self._store = store
        self.numbers = numbers

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def sequence(self, path: str) -> int:
        number = self.numbers.setdefault(path, 0)
        self.numbers[path] += 1
        return number if number < 1 << 31 else number - (1 << 32)


def test_ids_continue_with_63_bits_after_the_31_bit_ones(store: SqliteStore) -> None:
    sequences = Sequences(store, {"idgen": SHORT_ID_END - 2})
    ledgers = HierarchicalLedgerManager(sequences)  # type: ignore[arg-type]
    taken = [ledgers.new_ledger_id().ledger_id for _ in range(4)]
    assert taken == [SHORT_ID_END - 2, SHORT_ID_END - 1, 1 << 32, (1 << 32) + 1]
    sequences.numbers["idgen-long/HOB-0000000001"] = SHORT_ID_END - 1
    taken = [ledgers.new_ledger_id().ledger_id for _ in range(3)]
    assert taken == [(1 << 32) + SHORT_ID_END - 1, 2 << 32, (2 << 32) + 1]
    for high in range(2, 6):
        sequences.numbers[f"idgen-long/HOB-{high:010d}"] = SHORT_ID_END + 5  # the store's own counter turned negative
        assert ledgers.new_ledger_id().ledger_id == (high + 1) << 32
    assert store.children("idgen-long") == [f"HOB-{high:010d}" for high in (4, 5, 6)]
    store.put(f"idgen-long/HOB-{SHORT_ID_END:010d}", b"", NEW)
    sequences.numbers[f"idgen-long/HOB-{SHORT_ID_END:010d}"] = SHORT_ID_END
    with pytest.raises(IllegalOperation):
        ledgers.new_ledger_id()


@pytest.mark.parametrize("manager", [FlatLedgerManager, LegacyHierarchicalLedgerManager])
def test_short_layouts_run_out_of_ids_after_31_bits(store: SqliteStore, manager: type[ZooKeeperLedgerManager]) -> None:
    path = "" if manager is FlatLedgerManager else "idgen"
    ledgers = manager(Sequences(store, {path: SHORT_ID_END - 1}))  # type: ignore[arg-type]
    assert ledgers.new_ledger_id() == LedgerId(0, SHORT_ID_END - 1)
    for _ in range(2):
        with pytest.raises(IllegalOperation):
            ledgers.new_ledger_id()


def test_a_new_id_in_a_scope_is_random(store: SqliteStore) -> None:
    made = {HierarchicalLedgerManager(store).new_ledger_id(7) for _ in range(100)}
    assert len(made) == 100
    assert {ledger.scope_id for ledger in made} == {7}


def ledger_object(ledger: LedgerId, found: VersionedMetadata) -> dict[str, Any]:
    return LEDGER_COLUMNS.object(ledger_row(ledger, found))


def test_the_ledger_object_has_every_field() -> None:
    metadata = LedgerMetadata(
        ensemble_size=2,
        write_quorum_size=2,
        ack_quorum_size=1,
        digest_type=DigestType.HMAC,
        password=b"secret",
        ensembles=(Fragment(0, ("b1", "b2")), Fragment(100, ("b1", "b3"))),
        state=LedgerState.CLOSED,
        length=4096,
        last_entry_id=120,
        custom_metadata={"z": b"\xff\x00", "a": b"x"},
    )
    found = VersionedMetadata(metadata, 3, 1_700_000_000_123)
    value = ledger_object(LedgerId(7, 12), found)
    expected = {
        "ledgerScopeId": "7",
        "ledgerId": "12",
        "ledgerQualifiedName": "0000000000000007000000000000000c",
        "metadataFormatVersion": 3,
        "state": "CLOSED",
        "ensembleSize": 2,
        "writeQuorumSize": 2,
        "ackQuorumSize": 1,
        "digestType": "HMAC",
        "length": 4096,
        "lastEntryId": 120,
        "ctime": "2023-11-14T22:13:20.123Z",
        "customMetadata": {"a": "eA==", "z": "/wA="},
        "ensembles": {"0": ["b1", "b2"], "100": ["b1", "b3"]},
    }
    assert {name: value[name] for name in expected} == expected
    assert list(value)[:3] == ["ledgerScopeId", "ledgerId", "ledgerQualifiedName"]


def test_unknown_fields_are_null_in_the_ledger_object() -> None:
    metadata = LedgerMetadata(1, 1, 1, None, None, (Fragment(0, ("b1",)),), format_version=1)
    value = ledger_object(LedgerId(0, 1), VersionedMetadata(metadata, 0, None))
    assert (value["digestType"], value["ctime"]) == (None, None)
    impossible = ledger_object(LedgerId(0, 1), VersionedMetadata(metadata, 0, I64_MAX))
    assert impossible["ctime"] is None


@pytest.mark.parametrize(
    ("custom", "expected"),
    [
        (
            {
                "application": b"pulsar",
                "component": b"managed-ledger",
                "pulsar/managed-ledger": b"public/default/persistent/t\xc3\xa4st",
                "pulsar/cursor": b"sub",
            },
            {
                "application": "pulsar",
                "component": "managed-ledger",
                "managedLedger": "public/default/persistent/täst",
                "topic": "persistent://public/default/täst",
                "cursor": "sub",
            },
        ),
        (
            {
                "application": b"pulsar",
                "component": b"compacted-ledger",
                "pulsar/compactedTopic": b"t",
                "pulsar/compactedTo": b"\x00\xff",
                "other": b"x",
            },
            {"application": "pulsar", "component": "compacted-ledger", "compactedTopic": "t", "compactedTo": "AP8="},
        ),
        (
            {
                "application": b"pulsar",
                "pulsar/compactedTo": b"\x08\xac\x02\x10\x07\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            },
            {"application": "pulsar", "compactedTo": "300:7"},
        ),
        (
            {"application": b"pulsar", "component": b"schema", "pulsar/schemaId": b"\xff"},
            {"application": "pulsar", "component": "schema", "schemaId": "\\xff"},
        ),
        ({"application": b"other", "component": b"managed-ledger"}, None),
        ({"pulsar/managed-ledger": b"x"}, None),
        ({}, None),
    ],
)
def test_pulsars_custom_metadata_is_decoded(custom: dict[str, bytes], expected: dict[str, str] | None) -> None:
    metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32, b"", (Fragment(0, ("b1",)),), custom_metadata=custom)
    assert ledger_object(LedgerId(0, 1), VersionedMetadata(metadata, 0, None)).get("pulsar") == expected
