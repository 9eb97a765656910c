"""The bookies and ledgers that `bkctl bookies` works on, and options that its commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from bkctl.errors import UsageError
from bkctl.ids import LedgerId, check_bookie_id

from ..kit.ledger_options import LEDGERS_BY_OPTION, scope_option
from ..kit.options import combined, duration_option, watch_option


def _some_ledgers(texts: list[str] | None, scope: int | None) -> list[LedgerId]:
    if scope is not None and not texts:
        raise UsageError("--ledger-scope-id applies to --ledger, but no ledger is given", hint="add --ledger LEDGER")
    return list(dict.fromkeys(LedgerId.parse(text, scope) for text in texts or ()))


#: `--ledger`, repeatable; none given: an empty list.
LedgersByOption = Annotated[
    list[LedgerId], combined(_some_ledgers, LEDGERS_BY_OPTION, scope_option("Ledger scope id of a bare --ledger."))
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
        help="Report ledgers whose entries every other bookie answers to lack, without counting them as failures.",
    ),
]


def bookie_ids(texts: Sequence[str]) -> list[str]:
    """Return the named bookies; commas separate several in one text, as in Apache's shell."""
    names = dict.fromkeys(name for text in texts for name in text.split(",") if name)
    if not names:
        raise UsageError("No bookie is named", hint="'bkctl bookies list' shows them")
    return [check_bookie_id(name) for name in names]
