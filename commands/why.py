"""`bkctl why`: the chain of facts from what is seen to the cause, and the ways out."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError
from bkctl.ids import LedgerId

from .kit.columns import Output, fields, object_of
from .kit.command import Run, command, group
from .kit.ledger_options import OneLedger
from .kit.next_steps import pasted
from .kit.options import LedgerShape, flag, word
from .kit.texts import plain_lines

if TYPE_CHECKING:
    from bkctl.http.why import Explanation, Inquiry

app = group()

WHY_COLUMNS = Columns(
    *fields(Kind.TEXT, subject="SUBJECT", verdict="VERDICT"),
    Column("FACTS", "facts", lambda row: [each._asdict() for each in row.facts], Kind.NESTED),
    Column("WAYS", "ways", lambda row: [each._asdict() for each in row.ways], Kind.NESTED),
    key="subject",
)

Bookie = Annotated[str, word("BOOKIE", "The bookie.")]

#: A question to the inquiry, asynchronous or not.
Ask = Callable[["Inquiry"], "Awaitable[Explanation] | Explanation"]
#: Explanations that a bundle holds.
EXPLANATIONS_MAX: Final = 50


async def _asked(run: Run, ask: Ask, *, asks_bookies: bool = True) -> Explanation:
    from bkctl.client.ledger import BookKeeper
    from bkctl.http.why import Explanation, Inquiry

    cluster = run.cluster
    client = run.access.bookkeeper(cluster) if asks_bookies else BookKeeper(cluster, config=run.access.client_config())
    async with client as bookkeeper:
        placement = bookkeeper.pool.placement(cluster.bookies.list())
        found = ask(Inquiry(bookkeeper, placement, run.access.vitals, run.access.metrics_api))
        return found if isinstance(found, Explanation) else await found


def explain_all(run: Run, commands: Iterable[str]) -> dict[str, Explanation]:
    """Return the explanations for commands of this group, for a bundle; those that fail are left out."""
    asks: dict[str, Callable[[str, Inquiry], Awaitable[Explanation]]] = {
        "ledger": lambda subject, inquiry: inquiry.ledger(LedgerId.parse(subject)),
        "bookie": lambda subject, inquiry: inquiry.bookie(subject),
        "space": lambda subject, inquiry: inquiry.space(subject),
    }
    found: dict[str, Explanation] = {}
    for line in islice(dict.fromkeys(commands), EXPLANATIONS_MAX):
        words = shlex.split(line)
        if words[:2] == ["bkctl", "why"] and len(words) == 4 and words[2] in asks:
            with suppress(BkctlError):
                ask = partial(asks[words[2]], words[3])
                found[line] = run.job.complete(_asked(run, ask))
    return found


def _explain(run: Run, words: str, ask: Ask, *, asks_bookies: bool = True) -> None:
    if run.bundled is not None and asks_bookies:
        why = run.bundled.explanation(f"bkctl why {words}")
    else:
        with run.job.working("Asking the bookies", enabled=asks_bookies):
            why = run.job.complete(_asked(run, ask, asks_bookies=asks_bookies))
    why.ways = [each._replace(command=pasted(each.command)) for each in why.ways]
    if run.out.output is not Output.TABLE:
        run.out.show(why, WHY_COLUMNS)
        return
    lines = [f"{why.subject}: {why.verdict}", "", "What is seen:"]
    lines += [f"  {number}. {each.what}\n     ({each.evidence})" for number, each in enumerate(why.facts, 1)]
    lines += ["", "Ways out:" if why.ways else "Nothing is to be done."]
    lines += [f"  {each.command}\n     {each.effect}" for each in why.ways]
    run.out.text(plain_lines("\n".join(lines)) + "\n")


@command(app, "ledger", connects=True, prints=object_of(WHY_COLUMNS))
def why_ledger(run: Run, ledger: OneLedger) -> None:
    """Explain why a ledger is not readable, closed or whole.

    Reads its metadata, mark and published failures, and some entries from each of its bookies. Each fact names its
    evidence, each way out its cost; the first way loses least.

    $ bkctl why ledger 12
    """
    _explain(run, f"ledger {ledger}", lambda inquiry: inquiry.ledger(ledger))


@command(app, "bookie", connects=True, prints=object_of(WHY_COLUMNS))
def why_bookie(run: Run, bookie: Bookie) -> None:
    """Explain why a bookie is down, hung, slow or read-only.

    Also why its decommission or drain does not end: the ledgers that stay on it, by reason. Looks at registration,
    cookie, answers, metrics and ledgers; of a local cluster also at process and log.

    $ bkctl why bookie 10.0.0.1:3181
    """
    _explain(run, f"bookie {shlex.quote(bookie)}", lambda inquiry: inquiry.bookie(bookie))


@command(app, "create", connects=True, prints=object_of(WHY_COLUMNS))
def why_create(
    run: Run, shape: LedgerShape, scoped: Annotated[bool, flag("--scoped", "A ledger of a scope other than 0.")] = False
) -> None:
    """Explain why a new ledger finds too few bookies.

    Shows the writable bookies rack by rack, and why the others are not chosen.

    $ bkctl why create
    """
    _explain(
        run, "create", lambda why: why.create(shape.ensemble_size, shape.write_quorum_size, scoped=scoped),
        asks_bookies=False,
    )  # fmt: skip


@command(app, "space", connects=True, prints=object_of(WHY_COLUMNS))
def why_space(run: Run, bookie: Bookie) -> None:
    """Explain what fills a bookie's disks, and why it stays.

    $ bkctl why space 10.0.0.1:3181
    """
    _explain(run, f"space {shlex.quote(bookie)}", lambda inquiry: inquiry.space(bookie))
