"""`bkctl ledger write`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Annotated, Any

from bkctl.errors import UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.ledger_columns import ledger_row

from ..kit.command import Run, command, group, object_of
from ..kit.ledger_options import LedgerToCreate, NewLedger
from ..kit.options import CustomMetadata, LedgerPassword, LedgerShape, LedgerSizes, ProtocolOption, size_option, word
from .listing import LEDGER_COLUMNS

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.client.write_handle import WriteHandle

app = group()


async def create_ledger(
    bookkeeper: BookKeeper, target: NewLedger, shape: LedgerSizes, password: bytes, custom_metadata: dict[str, bytes]
) -> WriteHandle:
    settings: dict[str, Any] = {**shape._asdict(), "password": password, "custom_metadata": custom_metadata}
    if target.ledger is None and target.scope_id == 0:
        return await bookkeeper.create_ledger(**settings)
    ledger_id = None if target.ledger is None else target.ledger.ledger_id
    return await bookkeeper.create_ledger_adv(ledger_id, ledger_scope_id=target.scope_id, **settings)


@command(app, "write", connects=True, changes=True, prints=object_of(LEDGER_COLUMNS))
def write(
    run: Run,
    target: LedgerToCreate,
    shape: LedgerShape,
    custom_metadata: CustomMetadata,
    password: LedgerPassword,
    record_size: Annotated[int | None, size_option("--record-size", "Write entries of this size instead of lines.")],
    protocol: ProtocolOption,
    files: Annotated[list[str] | None, word("FILE", "Files to write (default and -: stdin), in this order.")] = None,
) -> None:
    """Write files or stdin into a new ledger, and close it.

    Each line becomes one entry, without its line end; an empty line becomes an empty entry. The ledger's id goes to
    stderr at once, the closed ledger to stdout. While stdin stays open, each line is acknowledged as it arrives and can
    be tailed.

    $ bkctl ledger write /etc/hosts
    $ seq 1000 | bkctl ledger write
    $ bkctl ledger write --uuid --record-size 64KiB /etc/services
    """
    from bkctl.client.streams import LineSplitter, RecordSplitter, write_ledger

    names = files or ["-"]
    if names.count("-") > 1:
        raise UsageError("- (stdin) is given twice")
    splitter: Callable[[], Any] = LineSplitter if record_size is None else partial(RecordSplitter, record_size)
    splitter()
    sizes = [None if name == "-" else _readable_size(name) for name in names]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    if "-" in names and sys.stdin is None:
        raise UsageError("stdin is closed, so there is nothing to write", hint="give files, or < /dev/null for none")

    create = partial(create_ledger, target=target, shape=shape, password=password, custom_metadata=custom_metadata)
    # A progress line would disturb a user who types.
    typed = "-" in names and sys.stdin.isatty()
    with run.job.working("Writing", total=total, unit="bytes", enabled=not typed) as activity:
        work = partial(
            write_ledger, create=create, names=names, splitter=splitter, progress=activity.advance,
            note=run.out.note, report=run.out.error,
        )  # fmt: skip
        ledger = run.job.ask(run.access.bookkeeper(run.cluster, protocol), work)
    run.out.show(ledger_row(ledger, run.cluster.ledgers.read(ledger)), LEDGER_COLUMNS)


def _readable_size(name: str) -> int | None:
    """Return the size of a readable file; problems with it are raised before a ledger is created."""
    try:
        status = os.stat(name)
    except FileNotFoundError as error:
        try:
            ledger = LedgerId.parse(name)
        except UsageError:
            raise error from None
        flag = "--ledger-qualified-name" if ledger.is_scoped else "--ledger-id"
        hint = f"{flag} {ledger if ':' in name or not ledger.is_scoped else name} writes stdin into a new ledger {name}"
        raise UsageError(f"No file {name} to write", hint=hint) from error
    if not (S_ISREG(status.st_mode) or S_ISDIR(status.st_mode)):
        return None  # a pipe is opened once only: its writer would not survive the first end
    with open(name, "rb"):
        return status.st_size
