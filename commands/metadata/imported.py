"""The counts of imported metadata, for `bkctl metadata import` and `migrate`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ..kit.columns import Column, Columns, Kind
from ..kit.command import Run

if TYPE_CHECKING:
    from bkctl.metadata.admin.dump import DumpHeader, ImportSummary, TargetPlan


class ImportRow(NamedTuple):
    """The outcome for the records of one kind."""

    kind: str
    created: int
    replaced: int
    same: int


IMPORTED_COLUMNS = Columns(
    Column("KIND", "kind", "kind"),
    Column("CREATED", "created", "created", Kind.INTEGER),
    Column("REPLACED", "replaced", "replaced", Kind.INTEGER),
    Column("THERE ALREADY", "same", "same", Kind.INTEGER),
    key="kind",
)
#: Kinds of records but how far the ids got, which has no node of its own.
_SHOWN_KINDS = ("node", "cookie", "mark", "ledger")
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace records that have another value; the undo file keeps the old ones.")
]


def show_planned(run: Run, counts: Counter[str]) -> None:
    run.render((ImportRow(kind, counts[kind], 0, 0) for kind in _SHOWN_KINDS), IMPORTED_COLUMNS)


def show_imported(run: Run, imported: ImportSummary) -> None:
    run.render(
        (
            ImportRow(kind, imported.created[kind], imported.replaced[kind], imported.same[kind])
            for kind in _SHOWN_KINDS
        ),
        IMPORTED_COLUMNS,
    )


def say_conflicts(run: Run, imported: ImportSummary) -> None:
    for name in imported.conflicts[:NAMES_SHOWN_MAX]:
        run.note(f"{name} exists with another value, and was left unchanged")


def note_layout(run: Run, header: DumpHeader, plan: TargetPlan) -> None:
    """Say that the target has another ledger manager than the source."""
    from bkctl.formats.metadata import LedgerLayout

    if header.layout is None:
        return
    names = [each.factory_class.rpartition(".")[2] for each in (LedgerLayout.parse(header.layout), plan.layout)]
    if names[0] != names[1]:
        run.note(f"The layout of ledgers changes from {names[0]} to {names[1]}")


def note_ids(run: Run, imported: ImportSummary) -> None:
    if imported.unskipped_position is not None:
        run.note(
            f"Ids below {imported.unskipped_position:,} may be generated again there, also for deleted ledgers whose "
            "entries bookies still hold"
        )


NAMES_SHOWN_MAX = 10
