"""The documents that commands print with `-o json`: their columns, and the JSON schemas of `docs/schemas/`.

A schema describes the document of one command; `$defs/row` in it describes a line of `-o ndjson`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from .kit.columns import LEDGER_FIELDS, Column, Columns, Kind, Output, applied_column


class DocumentSource(NamedTuple):
    """The columns of a document; `place` is a module below this package, a colon and a name in it.

    `is_list`: the document is an array of such rows, else one of them.
    """

    place: str
    is_list: bool

    def columns(self) -> list[Columns]:
        """Return the columns: of each value where the source is a mapping, else of what it is or returns."""
        module, _, name = self.place.partition(":")
        found: Any = getattr(import_module(f".{module}", __package__), name)
        if isinstance(found, Mapping):
            return list(found.values())
        if isinstance(found, Columns):
            return [found]
        made: list[Columns] = found()
        return made


def _rows(*places: str) -> tuple[DocumentSource, ...]:
    return tuple(DocumentSource(place, is_list=True) for place in places)


def _one(*places: str) -> tuple[DocumentSource, ...]:
    return tuple(DocumentSource(place, is_list=False) for place in places)


#: Command → the documents that it may print. `api get`, `put` and `delete` print what the server answers, or the
#: request that a dry run does not send.
DOCUMENTS: Final[dict[str, tuple[DocumentSource, ...]]] = {
    "api serve": _one("api.serve:GATEWAY_COLUMNS"),
    "audit list": _rows("audit:AUDIT_COLUMNS"),
    "audit show": _one("audit:AUDIT_COLUMNS"),
    "autorecovery run": _one("autorecovery:RUNNING_COLUMNS"),
    "autorecovery status": _one("autorecovery:STATUS_COLUMNS"),
    "autorecovery enable": _one("autorecovery:SWITCH_COLUMNS"),
    "autorecovery disable": _one("autorecovery:SWITCH_COLUMNS"),
    "autorecovery list": _rows("autorecovery:MARK_COLUMNS") + _one("autorecovery:COUNT_COLUMNS"),
    "autorecovery workers": _rows("autorecovery:LOCK_COLUMNS"),
    "autorecovery mark": _rows("autorecovery:MARKED_COLUMNS"),
    "autorecovery unmark": _rows("autorecovery:MARKED_COLUMNS"),
    "autorecovery auditor": _rows("autorecovery:VOTE_COLUMNS"),
    "autorecovery audit": _one("autorecovery:AUDITED_COLUMNS") + _rows("autorecovery:CLOCK_COLUMNS"),
    "autorecovery delay": _one("autorecovery:DELAY_COLUMNS"),
    "bench adds": _rows("bench:BENCH_COLUMNS"),
    "bench reads": _rows("bench:BENCH_COLUMNS"),
    "bench mixed": _rows("bench:BENCH_COLUMNS"),
    "bookie check": _rows("bookie.check:FINDING_COLUMNS"),
    "bookie index check": _rows("bookie.check:FINDING_COLUMNS"),
    "bookie gc": _rows("bookie.collection:COLLECTOR_COLUMNS"),
    "bookie compact-locations": _rows("bookie.collection:LOCATIONS_COLUMNS"),
    "bookie start": _one("bookie.files:STARTED_COLUMNS"),
    "bookie files": _rows("bookie.files:FILE_COLUMNS"),
    "bookie index show": _rows(
        "bookie.files:LOCATION_COLUMNS", "bookie.files:GAP_COLUMNS", "documents:index_meta_columns"
    ),
    "bookie metrics": _rows("bookie.metrics:METRIC_COLUMNS"),
    "bookie index rebuild": _rows("bookie.repair:REBUILT_COLUMNS"),
    "bookie index regenerate": _rows("bookie.repair:REGENERATED_COLUMNS"),
    "bookie downgrade": _rows("bookie.repair:DOWNGRADED_COLUMNS"),
    "bookie convert": _rows("bookie.repair:CONVERTED_COLUMNS"),
    "bookie format": _rows("bookie.repair:CONTENTS_COLUMNS"),
    "bookie init": _rows("bookie.repair:INIT_COLUMNS") + _one("bookie.repair:NEW_BOOKIE_COLUMNS"),
    "bookie sanity": _one("bookie.sanity:SANITY_COLUMNS"),
    "bookie config": _rows("bookie.settings:SETTING_COLUMNS"),
    "bookie state": _one("bookie.state:STATE_COLUMNS"),
    "bookie ready": _one("bookie.state:READY_COLUMNS"),
    "bookie info": _one("bookie.state:INFO_COLUMNS"),
    "bookie readonly": _one("bookie.state:READ_ONLY_COLUMNS"),
    "bookies decommission": _rows("bookies.departure:STEP_COLUMNS"),
    "bookies drain": _rows("bookies.departure:STEP_COLUMNS"),
    "bookies list": _rows("bookies.members:BOOKIE_COLUMNS"),
    "bookies show": _one("bookies.members:SHOW_COLUMNS") + _rows("bookies.members:SHOW_COLUMNS"),
    "bookies usage": _rows("bookies.members:USAGE_COLUMNS"),
    "bookies racks list": _rows("bookies.racks:RACK_COLUMNS"),
    "bookies racks set": _rows("bookies.racks:CHANGE_COLUMNS"),
    "bookies racks unset": _rows("bookies.racks:CHANGE_COLUMNS"),
    "bookies recover": _rows("documents:recover_columns"),
    "bookies ok-to-stop": _rows("bookies.stop:RISK_COLUMNS", "bookies.stop:TOGETHER_COLUMNS"),
    "cluster info": _one("cluster:INFO_COLUMNS"),
    "cluster health show": _rows("cluster:HEALTH_COLUMNS"),
    "cluster health detail": _rows("cluster:DETAIL_COLUMNS"),
    "cluster health mute": _one("cluster:MUTE_COLUMNS"),
    "cluster health unmute": _one("cluster:MUTE_COLUMNS"),
    "cluster health mutes": _rows("cluster:MUTE_COLUMNS"),
    "cluster healthcheck status": _one("cluster:CHECK_COLUMNS"),
    "cluster healthcheck enable": _one("cluster:CHECK_COLUMNS"),
    "cluster healthcheck disable": _one("cluster:CHECK_COLUMNS"),
    "cluster status": _rows("cluster:STATUS_COLUMNS"),
    "cluster id": _one("cluster:ID_COLUMNS"),
    "cluster init": _one("cluster:ID_COLUMNS"),
    "cluster nuke": _one("cluster:NUKE_COLUMNS"),
    "local up": _rows("local:LOCAL_COLUMNS"),
    "local down": _rows("local:LOCAL_COLUMNS"),
    "local status": _rows("local:LOCAL_COLUMNS"),
    "context list": _rows("context:LIST_COLUMNS"),
    "context show": _one("context:CONTEXT_COLUMNS"),
    "context add": _one("context:CONTEXT_COLUMNS"),
    "context use": _one("context:CONTEXT_COLUMNS"),
    "context rename": _one("context:CONTEXT_COLUMNS"),
    "context delete": _one("context:CONTEXT_COLUMNS"),
    "cookie list": _rows("cookie:LIST_COLUMNS"),
    "cookie show": _one("cookie:COOKIE_COLUMNS") + _rows("cookie:COOKIE_COLUMNS"),
    "cookie create": _one("cookie:COOKIE_COLUMNS"),
    "cookie update": _rows("cookie:CHANGE_COLUMNS"),
    "cookie delete": _rows("cookie:COOKIE_COLUMNS"),
    "cookie generate": _one("cookie:COOKIE_COLUMNS"),
    "cookie expand": _rows("cookie:EXPANDED_COLUMNS"),
    "cookie rename": _rows("cookie:RENAMED_COLUMNS"),
    "cookie verify": _rows("cookie:FINDING_COLUMNS"),
    "entrylog extract": _one("entrylog.extract:REPORT_COLUMNS"),
    "entrylog active": _rows("entrylog.garbage:ACTIVE_COLUMNS"),
    "entrylog garbage": _rows("entrylog.garbage:GARBAGE_COLUMNS"),
    "entrylog list": _rows("entrylog.listing:LOG_COLUMNS", "entrylog.listing:LOG_GARBAGE_COLUMNS"),
    "entrylog show": _rows("entrylog.listing:SHARE_COLUMNS"),
    "entrylog read": _rows("documents:log_record_columns"),
    "entrylog verify": _rows("entrylog.verify:CHECK_COLUMNS"),
    "journal list": _rows("journal:JOURNAL_COLUMNS"),
    "journal read": _rows("documents:journal_record_columns"),
    "journal lastmark": _rows("journal:MARK_COLUMNS"),
    "journal verify": _rows("journal:VERIFY_COLUMNS"),
    "journal stats": _rows("journal:STATS_COLUMNS", "journal:SUM_COLUMNS"),
    "ledger copy": _rows("ledger.copy:COPY_COLUMNS"),
    "ledger delete": _rows("ledger.delete:DELETED_COLUMNS"),
    "ledger list": _rows("ledger.columns:LEDGER_COLUMNS") + _one("ledger.listing:COUNT_COLUMNS"),
    "ledger show": _one("documents:ledger_columns") + _rows("documents:ledger_columns"),
    "ledger locate": _rows("documents:locate_columns"),
    "ledger read": _rows("documents:entry_columns"),
    "ledger tail": _rows("documents:entry_columns"),
    "ledger recover": _rows("ledger.columns:LEDGER_COLUMNS", "ledger.recover:RECOVERY_PLAN_COLUMNS"),
    "ledger verify": _rows("ledger.verify:FINDING_COLUMNS"),
    "ledger test": _one("ledger.verify:TRIAL_COLUMNS"),
    "ledger write": _one("ledger.columns:LEDGER_COLUMNS"),
    "metadata check": _rows("metadata.check:FINDING_COLUMNS"),
    "metadata orphans": _rows("metadata.check:ORPHAN_COLUMNS"),
    "metadata export": _one("metadata.export:EXPORTED_COLUMNS"),
    "metadata import": _rows("metadata.export:IMPORTED_COLUMNS"),
    "metadata layout": _one("metadata.nodes:LAYOUT_COLUMNS"),
    "metadata get": _one("metadata.nodes:NODE_COLUMNS"),
    "metadata tree": _rows("metadata.nodes:TREE_COLUMNS", "metadata.nodes:TOTAL_COLUMNS"),
    "metadata undo": _rows("metadata.nodes:UNDONE_COLUMNS", "metadata.nodes:UNDO_FILE_COLUMNS"),
    "metadata replace-bookie": _rows("metadata.replacement:REPLACEMENT_COLUMNS"),
    "metadata scopes": _rows("metadata.scopes:SCOPE_COLUMNS"),
    "metadata idgen": _rows("metadata.scopes:NEW_ID_COLUMNS"),
    "metadata diff": _rows("metadata.stores:DIFFERENCE_COLUMNS"),
    "metadata migrate": _rows("metadata.export:IMPORTED_COLUMNS"),
    "pipeline extract": _rows("pipeline.extract:EXTRACT_COLUMNS"),
    "pipeline garbage": _rows("pipeline.garbage:GARBAGE_COLUMNS"),
    "pipeline integrity": _rows("pipeline.integrity:INTEGRITY_COLUMNS"),
    "pipeline inventory": _rows("pipeline.inventory:INVENTORY_COLUMNS"),
    "pipeline journal-audit": _rows("pipeline.journals:AUDIT_COLUMNS"),
    "pipeline export": _rows("pipeline.ledgers:EXPORT_COLUMNS"),
    "pipeline import": _rows("pipeline.ledgers:COPY_COLUMNS"),
    "pipeline migrate-scope": _rows("pipeline.ledgers:COPY_COLUMNS"),
    "pipeline report": _rows("pipeline.report:REPORT_COLUMNS"),
    "progress show": _rows("progress:WORK_COLUMNS") + _one("progress:WORK_COLUMNS"),
    "progress pause": _one("progress:WORK_COLUMNS"),
    "progress resume": _one("progress:WORK_COLUMNS"),
    "progress rate": _one("progress:WORK_COLUMNS"),
    "top": _rows("top:LOAD_COLUMNS"),
    "version": _one("program:VERSION_COLUMNS"),
}  # fmt: skip

#: Commands whose tables have names or titles of columns that their documents lack.
TABLES: Final[dict[str, str]] = {
    "bookie gc": "bookie.collection:COLLECTOR_TABLE_COLUMNS",
    **dict.fromkeys(("ledger list", "ledger recover", "ledger show"), "ledger.columns:LEDGER_TABLE_COLUMNS"),
}

#: Commands with --dry-run. Their rows have `applied`: false in a dry run, true in a run that changes something.
DRY_RUNS: Final = frozenset((
    "autorecovery audit", "autorecovery delay", "autorecovery mark", "autorecovery unmark", "bookie compact-locations",
    "bookie config", "bookie convert", "bookie downgrade", "bookie format", "bookie gc", "bookie index rebuild",
    "bookie index regenerate", "bookie init", "bookie readonly", "bookies decommission", "bookies drain",
    "bookies racks set", "bookies racks unset", "bookies recover", "cluster init", "cluster nuke", "cookie create",
    "cookie delete", "cookie expand", "cookie rename", "cookie update", "ledger delete", "ledger recover",
    "metadata import", "metadata migrate", "metadata orphans", "metadata replace-bookie", "metadata undo",
    "pipeline import", "pipeline migrate-scope",
))  # fmt: skip

# --- columns that depend on options ---------------------------------------------------------------------------------


def _union(*variants: Columns) -> list[Columns]:
    """Return the columns of all `variants` as one; a column that one of them lacks is optional."""
    names = [{column.name for column in each.columns} for each in variants]
    found: dict[str, Column] = {}
    for each in variants:
        for column in each.columns:
            in_all = all(column.name in known for known in names)
            found.setdefault(column.name, column if in_all else column.replaced(optional=True))
    return [Columns(*found.values(), key=variants[0].key)]


def ledger_columns() -> list[Columns]:
    """Return the columns of `ledger show`, with and without --show-secrets."""
    from .ledger.columns import LEDGER_COLUMNS, SECRET_COLUMNS

    return _union(LEDGER_COLUMNS, SECRET_COLUMNS)


def entry_columns() -> list[Columns]:
    """Return the columns of `ledger read`, with and without --body."""
    from bkctl.ids import LedgerId

    from .ledger.read import entry_columns

    return _union(*(entry_columns(LedgerId(0, 0), body, None) for body in (False, True)))


def locate_columns() -> list[Columns]:
    """Return the columns of `ledger locate`, with and without --entry, --check and --every-entry."""
    from .ledger.locate import (
        ANSWER_COLUMNS,
        ENTRY_PLACE_COLUMNS,
        MISSING_COLUMN,
        PLACE_COLUMNS,
        PLACE_RACK_COLUMNS,
    )

    checked = PLACE_COLUMNS.and_also(*ANSWER_COLUMNS, MISSING_COLUMN, *PLACE_RACK_COLUMNS)
    return _union(PLACE_COLUMNS, checked, ENTRY_PLACE_COLUMNS)


def index_meta_columns() -> list[Columns]:
    """Return the columns of `bookie index show --meta`, with and without --show-secrets."""
    from .bookie.files import MASTER_KEY, META_COLUMNS

    return _union(META_COLUMNS, META_COLUMNS.and_also(MASTER_KEY))


def recover_columns() -> list[Columns]:
    """Return the columns of `bookies recover`: of --query and --dry-run, and of the recovery."""
    from bkctl.replication.move_plan import MovePlan

    from .bookies.recover import fragment_columns, move_columns

    return [fragment_columns((), planned=False), fragment_columns((), planned=True), move_columns(MovePlan())]


def _record_columns(id_name: str) -> list[Columns]:
    from pathlib import Path

    from .kit.records import RecordOptions, record_columns

    plain = RecordOptions(None, None, None, None, 0, None, None, False, None, None)
    variants = (plain, False), (plain._replace(body=True), True)
    return _union(*(record_columns(Path(), None, id_name, options, secrets=secrets) for options, secrets in variants))


def log_record_columns() -> list[Columns]:
    """Return the columns of `entrylog read`, with and without --body."""
    return _record_columns("logId")


def journal_record_columns() -> list[Columns]:
    """Return the columns of `journal read`, with and without --body and --show-secrets."""
    return _record_columns("journalId")


# --- schemas --------------------------------------------------------------------------------------------------------

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_TEXTS: Final = {"type": "array", "items": {"type": "string"}}
#: The values of nested columns whose form is the same wherever they are.
_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "customMetadata": {
        "type": "object",
        "additionalProperties": {"type": "string", "contentEncoding": "base64"},
    },
    "ensembles": {"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": _TEXTS},
    "pulsar": {"type": "object", "additionalProperties": {"type": ["string", "object"]}},
    "missingReplicas": _TEXTS,
    "ensemble": _TEXTS,
    "newEnsemble": _TEXTS,
    "bookies": _TEXTS,
}
_TYPES: Final[dict[Kind, dict[str, Any]]] = {
    Kind.INTEGER: {"type": "number"},
    Kind.SIZE: {"type": "integer", "minimum": 0},
    Kind.TEXT: {"type": "string"},
    Kind.WORD: {"type": "string"},
    Kind.BOOLEAN: {"type": "boolean"},
    Kind.TIME: {"type": "string", "format": "date-time"},
    Kind.BINARY: {"type": "string", "contentEncoding": "base64"},
    Kind.NESTED: {},
}
#: An error on stderr with `-o json`.
ERROR_SCHEMA: Final[dict[str, Any]] = {
    "$schema": _DIALECT,
    "title": "An error, as one line on stderr with -o json",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The kind of error: ledgerNotFound, usage, ENOENT"},
                "exitCode": {"type": "integer"},
                "message": {"type": "string", "description": "What failed, on what, and why"},
                "hint": {"type": ["string", "null"], "description": "What to do"},
            },
            "required": ["code", "exitCode", "message", "hint"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


def _properties(column: Column) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON fields of a column with their schemas."""
    if column.kind is Kind.LEDGER:
        for name in LEDGER_FIELDS:
            yield name, {"type": ["string", "null"]}
        return
    shape = _SHAPES.get(column.name, {}) if column.kind is Kind.NESTED else _TYPES[column.kind]
    if shape:
        shape = {**shape, "type": [shape["type"], "null"]}
    title = (column.title or "").strip()
    yield column.name, {"title": title, **shape} if title else shape


def row_schema(columns: Columns) -> dict[str, Any]:
    """Return the schema of one row. A row of `--watch -o ndjson` that went has `removed`."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for column in columns.columns:
        for name, shape in _properties(column):
            properties[name] = shape
            if not column.optional:
                required.append(name)
    properties["removed"] = {"const": True}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _applied(name: str) -> tuple[Column, ...]:
    """Return the column `applied` for a command with --dry-run."""
    return (applied_column(is_applied=True),) if name in DRY_RUNS else ()


def document_schema(name: str) -> dict[str, Any]:
    """Return the schema of what the command `name` prints with `-o json`."""
    rows: list[dict[str, Any]] = []
    forms: list[dict[str, Any]] = []
    for source in DOCUMENTS[name]:
        for columns in source.columns():
            row = row_schema(columns.and_also(*_applied(name)))
            if row not in rows:
                rows.append(row)
            pointer = {"$ref": f"#/$defs/row{rows.index(row) + 1}"}
            forms.append({"type": "array", "items": pointer} if source.is_list else pointer)
    definitions = {f"row{number}": row for number, row in enumerate(rows, 1)}
    return {
        "$schema": _DIALECT,
        "title": f"bkctl {name} -o json",
        **(forms[0] if len(forms) == 1 else {"anyOf": forms}),
        "$defs": {"row": {"anyOf": [{"$ref": f"#/$defs/{each}"} for each in definitions]}, **definitions},
    }


def known_columns(name: str, output: Output) -> list[Columns]:
    """Return the columns of each form of the rows that the command `name` may print as `output`."""
    sources = DOCUMENTS.get(name, ())
    found = [columns.and_also(*_applied(name)) for source in sources for columns in source.columns()]
    if output is Output.TABLE and name in TABLES:
        (table,) = DocumentSource(TABLES[name], is_list=True).columns()
        found.insert(0, table.with_hidden(found[0]))
    return found
