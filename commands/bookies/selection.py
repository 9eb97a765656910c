"""The bookies and ledgers that `bkctl bookies` works on, and options that its commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from bkctl.errors import UsageError
from bkctl.ids import LedgerId, check_bookie_id, parse_scope_id

from ..kit.ledger_options import LEDGERS_BY_OPTION
from ..kit.options import (
    Composite,
    duration_option,
    option,
    watch_option,
)


def some_ledgers(values: Mapping[str, Any]) -> list[LedgerId]:
    scope = None if values["ledger_scope_id"] is None else parse_scope_id(values["ledger_scope_id"])
    texts = values["some_ledgers"] or []
    if scope is not None and not texts:
        raise UsageError("--ledger-scope-id applies to --ledger, but no ledger is given", hint="add --ledger LEDGER")
    return list(dict.fromkeys(LedgerId.parse(text, scope) for text in texts))


#: `--ledger`, repeatable; none given: an empty list.
LedgersByOption = Annotated[
    list[LedgerId],
    Composite(
        (
            LEDGERS_BY_OPTION,
            option(
                "ledger_scope_id", str, "--ledger-scope-id", metavar="SCOPE", help="Ledger scope id of a bare --ledger."
            ),
        ),
        some_ledgers,
    ),
]
#: `--watch` of commands that end by themselves.
ProgressOption = Annotated[
    float | None,
    watch_option("Print the progress instead of each ledger; --watch=SECONDS sets the interval (default 2)."),
]
ManyBookies = Annotated[list[str], typer.Argument(metavar="BOOKIE", help="The bookies.")]
OneBookie = Annotated[str, typer.Argument(metavar="BOOKIE", help="The bookie.")]
Deadline = Annotated[
    float | None,
    duration_option(
        "--deadline", "Give up after this long (default: never; exit code 6). Ledgers that were moved stay moved."
    ),
]
SkipUnrecoverable = Annotated[
    bool,
    typer.Option(
        "--skip-unrecoverable",
        help="Report ledgers with entries that no bookie has, without counting them as failures.",
    ),
]


def bookie_ids(texts: Sequence[str]) -> list[str]:
    """Return the named bookies; commas separate several in one text, as in Apache's shell."""
    names = dict.fromkeys(name for text in texts for name in text.split(",") if name)
    if not names:
        raise UsageError("No bookie is named", hint="'bkctl bookies list' shows them")
    return [check_bookie_id(name) for name in names]
