"""`bkctl why`: the chain of facts from what is seen to the cause, and the ways out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind

from .kit.columns import Output
from .kit.command import Run, command, group
from .kit.documents import object_of
from .kit.ledger_options import OneLedger
from .kit.next_steps import pasted
from .kit.options import LedgerShape

if TYPE_CHECKING:
    from bkctl.http.why import Explanation, Inquiry

app = group()

WHY_COLUMNS = Columns(
    Column("SUBJECT", "subject", "subject"),
    Column("VERDICT", "verdict", "verdict"),
    Column("FACTS", "facts", lambda row: [each._asdict() for each in row.facts], Kind.NESTED),
    Column("WAYS", "ways", lambda row: [each._asdict() for each in row.ways], Kind.NESTED),
    key="subject",
)

Bookie = Annotated[str, typer.Argument(metavar="BOOKIE", help="The bookie.")]


def _explain(run: Run, ask: Callable[[Inquiry], Awaitable[Explanation]]) -> None:
    from bkctl.http.why import Inquiry

    from .cluster import find_vitals, metrics_api

    async def asked() -> Explanation:
        async with run.access.bookkeeper(cluster) as bookkeeper:
            placement = bookkeeper.pool.placement(cluster.bookies.list())
            return await ask(Inquiry(bookkeeper, placement, partial(find_vitals, run), partial(metrics_api, run)))

    with run.access.cluster() as cluster, run.job.working("Asking the bookies"):
        why = run.job.complete(asked())
    why.ways = [each._replace(command=pasted(each.command)) for each in why.ways]
    if run.out.output is not Output.TABLE:
        run.out.show(why, WHY_COLUMNS)
        return
    lines = [f"{why.subject}: {why.verdict}", "", "What is seen:"]
    lines += [f"  {number}. {each.what}\n     ({each.evidence})" for number, each in enumerate(why.facts, 1)]
    lines += ["", "Ways out:" if why.ways else "Nothing is to be done."]
    lines += [f"  {each.command}\n     {each.effect}" for each in why.ways]
    run.out.text("\n".join(lines) + "\n")


@command(app, "ledger", connects=True, examples=("bkctl why ledger 12",), prints=object_of(WHY_COLUMNS))
def why_ledger(run: Run, ledger: OneLedger) -> None:
    """Explain why a ledger is not readable, closed or whole.

    Reads its metadata, mark and published failures, and some entries from each of its bookies. Each fact names its
    evidence, each way out its cost; the first way loses least.
    """
    _explain(run, lambda inquiry: inquiry.ledger(ledger))


@command(app, "bookie", connects=True, examples=("bkctl why bookie 10.0.0.1:3181",), prints=object_of(WHY_COLUMNS))
def why_bookie(run: Run, bookie: Bookie) -> None:
    """Explain why a bookie is down, hung, slow or read-only.

    Also why its decommission or drain does not end: the ledgers that stay on it, by reason. Looks at registration,
    cookie, answers, metrics and ledgers; of a local cluster also at process and log.
    """
    _explain(run, lambda inquiry: inquiry.bookie(bookie))


@command(app, "create", connects=True, examples=("bkctl why create",), prints=object_of(WHY_COLUMNS))
def why_create(
    run: Run,
    shape: LedgerShape,
    scoped: Annotated[bool, typer.Option("--scoped", help="A ledger of a scope other than 0.")] = False,
) -> None:
    """Explain why a new ledger finds too few bookies.

    Shows the writable bookies rack by rack, and why the others are not chosen.
    """
    _explain(run, partial(_ask_create, shape, scoped))


async def _ask_create(shape: LedgerShape, scoped: bool, inquiry: Inquiry) -> Explanation:
    return inquiry.create(shape.ensemble_size, shape.write_quorum_size, scoped=scoped)


@command(app, "space", connects=True, examples=("bkctl why space 10.0.0.1:3181",), prints=object_of(WHY_COLUMNS))
def why_space(run: Run, bookie: Bookie) -> None:
    """Explain what fills a bookie's disks, and why it stays."""
    _explain(run, lambda inquiry: inquiry.space(bookie))
