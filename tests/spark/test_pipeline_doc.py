"""docs/pipeline.md names every column and option of the sources, and its SQL runs."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from support import golden
from support.source_rows import rows_of

from bkctl.errors import UsageError
from bkctl.spark.sources import indexes, ledger_source, metadata, records
from bkctl.spark.sources.columns import DAMAGE, TYPES
from bkctl.spark.sources.entry_logs import EntryLogSource
from bkctl.spark.sources.journals import JournalSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.live_ledgers import Live

TEXT: Final = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
SOURCES: Final[dict[str, Any]] = {
    "entrylog": EntryLogSource,
    "entrylog/ledgers": EntryLogSource,
    "journal": JournalSource,
    "journal/ledgers": JournalSource,
    "index": indexes.IndexSource,
    "index/ledgers": indexes.IndexSource,
    "metadata": metadata.MetadataSource,
    "ledger": ledger_source.LedgerSource,
}
FILES: Final = ("path", "paths")
OPTIONS: Final = {
    "entrylog": {*FILES, *records.OPTIONS},
    "journal": {*FILES, *records.OPTIONS},
    "index": {*FILES, *indexes.OPTIONS},
    "metadata": {"path", *metadata._OPTIONS},
    "ledger": set(ledger_source._OPTIONS),
}


def table(head: str) -> list[list[str]]:
    """Return the cells of the table with this head."""
    lines = TEXT.split(f"{head}\n", 1)[1].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[: lines.index("")]]


def columns_of(name: str) -> dict[str, bool]:
    """Return the columns of a source, and whether each comes on request only."""
    options = {"metadataUri": "sqlite:///x"} if name == "ledger" else {"path": "x"}
    options |= {"mode": "permissive", **({"rows": "ledgers"} if name.endswith("/ledgers") else {})}
    default = re.findall(r"`(\w+)` ", SOURCES[name](options).schema())
    with pytest.raises(UsageError) as error:
        SOURCES[name]({**options, "columns": "?"}).schema()
    known = re.search(r"among (.*) is needed", str(error.value))
    assert known is not None
    return {column: column not in default for column in (*known[1].split(", "), DAMAGE)}


def test_document_names_every_column_of_every_source() -> None:
    found: dict[str, dict[str, bool]] = {name: {} for name in SOURCES}
    for column, kind, sources, _ in table("| column | type | sources | meaning |"):
        name = column.strip("` ")
        assert kind == f"`{TYPES[name]}`"
        for source in sources.split(", "):
            found[source.strip("()")][name] = source.startswith("(")
    assert found == {name: columns_of(name) for name in SOURCES}


def test_document_names_every_option_of_every_source() -> None:
    found: dict[str, set[str]] = {name: set() for name in OPTIONS}
    for option, sources, _ in table("| option | sources | meaning |"):
        for source in sources.split(", "):
            found[source].add(option.strip("` "))
    assert found == OPTIONS


@pytest.mark.timeout(900)
def test_streams_of_the_document_run(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    section = TEXT.split("### Streams", 1)[1].split("\n### ", 1)[0]
    stream, committed = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {"spark": spark}
    places = {
        '"zk://zk1:2181/ledgers"': repr(live.uri), '"7"': repr("52301"), '"8"': repr("52302"),
        '"/checkpoints/copy"': repr(str(tmp_path / "checkpoint")),
    }  # fmt: skip
    for old, new in places.items():
        assert old in stream
        stream, committed = stream.replace(old, new), committed.replace(old, new)
    live.write([b"a", b"b"], scope_id=52301)
    exec(stream, names)  # noqa: S102
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    exec(committed, names)  # noqa: S102
    assert [live.read(each.ledger) for each in names["ledgers"]] == [[b"a", b"b"]]


def test_sql_of_the_document_runs(spark: SparkSession) -> None:
    bookie = golden.GoldenBookie("4.18.0", "sorted")
    section = TEXT.split("### SQL", 1)[1].split("\n## ", 1)[0]
    (views,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(views.replace("/bookies/*/", str(bookie.ledger_dir.parent)), {"spark": spark})  # noqa: S102
    largest, unlogged, journaled = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    sizes: dict[Decimal, int] = {}
    for row in rows_of(EntryLogSource, path=bookie.ledger_dir, rows="ledgers"):
        sizes[row["ledgerId"]] = sizes.get(row["ledgerId"], 0) + row["size"]
    rows = spark.sql(largest).collect()
    assert [row["size"] for row in rows] == sorted(sizes.values(), reverse=True)[:10]
    assert {row["ledgerId"]: row["size"] for row in rows}.items() <= sizes.items()
    assert spark.sql(unlogged).collect() == []
    logged = {(row["ledgerId"], row["entryId"]) for row in rows_of(EntryLogSource, path=bookie.ledger_dir)}
    only: dict[str, set[int]] = {}
    for row in rows_of(JournalSource, path=bookie.journal_dir, types="entry"):
        if (row["ledgerId"], row["entryId"]) not in logged:
            only.setdefault(row["ledgerQualifiedName"], set()).add(row["entryId"])
    found = {row["ledgerQualifiedName"]: row["entryCount"] for row in spark.sql(journaled).collect()}
    assert found == {name: len(entry_ids) for name, entry_ids in only.items()}
