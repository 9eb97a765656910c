"""The documented tables of facts equal the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import source_rows  # noqa: F401 (skips where there is no PyArrow)

from bkctl.spark.facts.tables import TABLES, VERSION, arrow_schema, conform

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "facts.md"


def test_documented_tables_have_the_columns_of_the_code() -> None:
    text = DOCUMENT.read_text()
    documented = {
        name: dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", section, re.MULTILINE))
        for name, section in re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL)
    }
    assert documented == {
        name: {column: each.type for column, each in columns.items()} for name, columns in TABLES.items()
    }
    for columns in TABLES.values():
        for column, each in columns.items():
            assert f"| `{column}` | {each.type} | {each.meaning} |" in text
    assert f"`v{VERSION}`" in text


@pytest.mark.parametrize("table", [name for name in TABLES if name != "parts"])
def test_rows_get_all_columns_of_their_table(table: str) -> None:
    import pyarrow as pa

    found = conform(pa.table({"bookieId": ["b"]}), table, {"part": "a part"})
    assert found.schema == arrow_schema(table)
    assert found.to_pylist() == [{**dict.fromkeys(TABLES[table]), "bookieId": "b", "part": "a part"}]


def test_ids_are_numbers_up_to_their_largest() -> None:
    import pyarrow as pa

    rows = pa.table({"ledgerId": [str(2**64 - 1), None, "7", "7"], "ledgerScopeId": ["0", None, "0", "1"]})
    found = conform(rows, "records", {"part": "a part"}).to_pylist()
    assert [row["ledgerId"] and int(row["ledgerId"]) for row in found] == [2**64 - 1, None, 7, 7]
