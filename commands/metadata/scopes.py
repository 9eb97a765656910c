"""`bkctl metadata scopes` and `bkctl metadata idgen`."""

from __future__ import annotations

from typing import Annotated

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError
from bkctl.ids import LedgerId, random_u64

from ..kit.columns import hex_column
from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import scope_option
from ..kit.options import count_option

app = group()


SCOPE_COLUMNS = Columns(
    Column("SCOPE", "ledgerScopeId", lambda row: str(row.scope_id)),
    hex_column("ledgerScopeIdHex", lambda row: f"{row.scope_id:016x}"),
    Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER),
    key="ledgerScopeId",
)


@command(app, "scopes", connects=True, examples=("bkctl metadata scopes",), prints=rows_of(SCOPE_COLUMNS))
def scopes(run: Run) -> None:
    """List the ledger scopes, with the number of ledgers.

    Scope 0 is always listed.
    """

    from bkctl.metadata.admin.overview import scope_counts

    with run.access.cluster() as cluster, run.job.working("Counting ledgers"):
        if cluster.ledgers.scopes_state() == "foreign":
            run.out.note("The scopes tree of a formatted cluster is left out; 'metadata orphans' lists it")
        run.out.render(scope_counts(cluster), SCOPE_COLUMNS)


NEW_ID_COLUMNS = Columns(Column("LEDGER", "ledger", lambda ledger: ledger, Kind.LEDGER), key="ledger")


@command(app, "idgen", connects=True, changes="sequence", prints=rows_of(NEW_ID_COLUMNS))
def idgen(
    run: Run,
    limit: Annotated[int | None, count_option("--limit", "Number of ids (default 1).", old="--count")],
    scope: Annotated[int | None, scope_option("Random ids of this scope.")],
    sequence: Annotated[
        bool,
        typer.Option("--sequence", help="Take ids of scope 0 from the cluster's generator, which gives no id twice."),
    ] = False,
) -> None:
    """Print new ledger ids.

    Without options, prints UUIDs, whose high half is the scope. --ledger-scope-id prints random ids of one scope.
    --sequence takes ids from the cluster's generator; only that needs a cluster.

    $ bkctl metadata idgen --limit 3
    $ bkctl metadata idgen --ledger-scope-id 7
    """
    if sequence and scope:
        raise UsageError("--sequence applies to scope 0; ids of other scopes are random")
    if not sequence:
        if scope == 0:
            raise UsageError("Ids of scope 0 come from the cluster's generator", hint="add --sequence")
        ids = (LedgerId.random() if scope is None else LedgerId(scope, random_u64()) for _ in range(limit or 1))
        run.out.render(ids, NEW_ID_COLUMNS)
        return
    with run.access.cluster() as cluster:
        run.out.render((cluster.ledgers.new_ledger_id() for _ in range(limit or 1)), NEW_ID_COLUMNS)
