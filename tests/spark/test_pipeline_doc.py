"""The documents of the pipeline name every column and option of the sources; their examples and recipes are sound."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from support import golden
from support.source_rows import rows_of

from bkctl.commands.kit.settings import Session
from bkctl.commands.main import root
from bkctl.errors import UsageError
from bkctl.spark.sources import indexes, ledger_source, metadata, records
from bkctl.spark.sources.columns import DAMAGE, TYPES
from bkctl.spark.sources.records import EntryLogSource, JournalSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.live_ledgers import Live

_DOCUMENTS: Final = ("pipeline.md", "pipeline-python.md", "pipeline-deployments.md")
TEXT: Final = "\n".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in _DOCUMENTS)
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
    "entrylog": {*FILES, *records.RecordSource.known},
    "journal": {*FILES, *records.RecordSource.known},
    "index": {*FILES, *indexes.IndexSource.known},
    "metadata": {"path", *metadata.MetadataSource.known},
    "ledger": set(ledger_source.LedgerSource.known),
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
    section = TEXT.split("### SQL", 1)[1].split("\n### ", 1)[0]
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


def test_python_of_the_document_runs(spark: SparkSession, live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", TEXT.split("\n## Sources and jobs", 1)[1].split("\n### ", 1)[0], re.DOTALL
    )
    places = {
        '["/bookies/0", "/bookies/1", "/bookies/2"]': repr([str(Path(live.uri.removeprefix("sqlite://")).parent)]),
        '"zk://zk1:2181/ledgers"': repr(live.uri),
    }
    for old, new in places.items():
        assert old in example
        example = example.replace(old, new)
    live.write([b"a", b"b"])
    exec(example, {})  # noqa: S102 (`spark_session` takes the session that is active)
    assert re.search(r"\|entryCount\|.*\|problem *\|", capsys.readouterr().out, re.DOTALL)


# --- recipes --------------------------------------------------------------------------------------------------------


class Operator:
    """Stands in for an operator of Airflow."""

    made: list[Operator]

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.upstream: list[Operator] = []
        self.made.append(self)

    def __rrshift__(self, others: list[Operator]) -> Operator:
        self.upstream += others
        return self

    def __rshift__(self, other: Operator) -> Operator:
        other.upstream.append(self)
        return other


def operators(monkeypatch: pytest.MonkeyPatch) -> dict[str, Operator]:
    """Return the operators of the document's DAG by their ids."""
    Operator.made = []
    for name, word, value in (
        ("airflow.providers.ssh.operators.ssh", "SSHOperator", Operator),
        ("airflow.providers.standard.operators.bash", "BashOperator", Operator),
        ("airflow.sdk", "DAG", lambda *names, **settings: nullcontext()),
    ):
        module = ModuleType(name)
        setattr(module, word, value)
        monkeypatch.setitem(sys.modules, name, module)
    (dag,) = re.findall(r"```python\n(.*?)```", TEXT.split("### Airflow", 1)[1], re.DOTALL)
    exec(dag, {})  # noqa: S102
    return {operator.settings["task_id"]: operator for operator in Operator.made}


def texts_of(value: Any) -> Iterator[str]:
    """Yield the command lines in a document of YAML."""
    if isinstance(value, dict):
        if "command" in value:
            yield (
                "\n".join(value["args"])
                if value["command"][0] == "sh"
                else shlex.join(value["command"] + value["args"])
            )
        for name, each in value.items():
            if name not in ("command", "args"):
                yield from texts_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)
    elif isinstance(value, str):
        yield value


def parse(line: str) -> str | None:
    """Return the command of `bkctl pipeline` in a line, whose words its parser takes; None without one."""
    words = shlex.split(line)
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "bkctl"), None)
    if at is None or words[at + 1 : at + 2] != ["pipeline"]:
        return None
    name, *rest = words[at + 2 :]
    root().get_command(None, "pipeline").commands[name].make_context(name, rest, obj=Session())
    return name


def test_commands_of_the_document_are_parsed() -> None:
    blocks = re.findall(r"(?:^    .*\n)+", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL), re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [parse(re.sub(r"\s{3,}(to|by|for|on) .*", "", line)) for line in lines if "bkctl pipeline" in line]
    assert {"inventory", "integrity", "report", "extract", "export"} <= set(found)
    (cron,) = re.findall(r"```cron\n(.*?)```", TEXT, re.DOTALL)
    assert [parse(line) for line in cron.splitlines()] == ["extract"]


def test_recipes_in_yaml_run_known_commands() -> None:
    documents = [
        document
        for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
        for document in yaml.safe_load_all(block)
    ]
    lines = [line for document in documents for text in texts_of(document) for line in text.splitlines()]
    assert [parse(line) for line in lines if "bkctl pipeline" in line] == ["extract", "extract", "integrity"]
    kinds = [document["kind"] for document in documents if isinstance(document, dict)]
    assert kinds == ["DaemonSet", "ServiceAccount", "Role", "RoleBinding", "CronJob"]
    daemons = next(document for document in documents if isinstance(document, dict) and document["kind"] == "DaemonSet")
    template = daemons["spec"]["template"]
    assert daemons["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    mounts = {mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


def test_dag_extracts_before_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = operators(monkeypatch)
    commands = {
        name: parse(each.settings.get("command") or each.settings["bash_command"]) for name, each in found.items()
    }
    extracts = [name for name, command in commands.items() if command == "extract"]
    assert len(extracts) == 3
    assert [commands[name] for name in ("inventory", "integrity", "export")] == ["inventory", "integrity", "export"]
    assert found["inventory"].upstream == [found[name] for name in extracts]
    assert found["integrity"].upstream == [found["inventory"]]
    assert "{{ ds }}" in found["export"].settings["bash_command"]
