"""`bkctl entrylog list`, `show` and `read`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, NotFound

from ..kit.columns import Row, with_hex
from ..kit.command import Run, command, group, rows_of
from ..kit.records import DirOption, Records, collect_errors, directories_argument, print_records, shown_record_columns
from ..kit.texts import YELLOW
from .logs import (
    LogNames,
    LogOrder,
    SortOption,
    file_column,
    find_logs,
    log_key,
    log_order,
    open_liveness,
    ratio_text,
)

if TYPE_CHECKING:
    from bkctl.files.record_filter import RecordFilter
    from bkctl.files.scan import RecordBatch

app = group()


LOG_COLUMNS = Columns(
    *with_hex("LOG", "logId", "summary.file.id"),
    Column("SCOPED", "scoped", "summary.file.scoped", Kind.BOOLEAN),
    Column("VERSION", "version", "summary.version", Kind.INTEGER),
    Column("STATE", "state", "summary.state", style={"compacting": YELLOW, "compacted": YELLOW}),
    Column(None, "sourceLogId", "summary.source_id", Kind.INTEGER),
    Column("LEDGERS", "ledgerCount", "summary.ledgers_count", Kind.INTEGER),
    Column(None, "ledgersMapOffset", "summary.ledgers_map_offset", Kind.INTEGER),
    Column("SIZE", "size", "summary.file.size", Kind.SIZE),
    Column("MODIFIED", "mtime", "summary.file.mtime_ms", Kind.TIME),
    file_column(lambda row: row.summary.file.path),
    key=Column("LOG", "logId", lambda row: log_key(row.summary.file.path)),
)


LOG_GARBAGE_COLUMNS = LOG_COLUMNS.and_also(
    Column("REMAINING", "remainingSize", value_at("use.remaining_size_bytes"), Kind.SIZE),
    Column("GARBAGE", "garbageSize", value_at("use.garbage_size_bytes"), Kind.SIZE),
    Column("USAGE", "usage", value_at("use.usage"), Kind.INTEGER, text=ratio_text),
)


@command(app, "list", connects=True, prints=rows_of(LOG_COLUMNS, LOG_GARBAGE_COLUMNS))
def list_logs(
    run: Run,
    directories: Annotated[Sequence[Path], directories_argument("Ledger directories (default: as in --conf).")] = (),
    sort: SortOption = LogOrder.ID,
) -> None:
    """List the entry logs: id, version, state, ledgers, size.

    An open log has no ledgers map, and so no count of ledgers. Logs of an unfinished compaction have the state
    compacting or compacted. --sort garbage asks the cluster which ledgers are alive, and shows what remains of each
    log; otherwise no cluster is needed.

    $ bkctl entrylog list --conf bk_server.conf
    $ bkctl entrylog list --conf bk_server.conf --sort size
    """
    from bkctl.files.listing import entry_log_summaries

    order = log_order(run, sort)
    given = run.access.directories(directories)
    errors: list[BkctlError] = []
    summaries = collect_errors(entry_log_summaries(given), errors)
    if order is LogOrder.GARBAGE:
        from bkctl.checks.garbage import log_uses

        found = {summary.file.path: summary for summary in summaries}
        good = [path for path, summary in found.items() if summary.error is None]
        with open_liveness(run, good, errors) as liveness, run.job.working("Reading entry logs"):
            uses = {use.path: use for use in collect_errors(log_uses(good, liveness.states), errors)}
        rows = [Row(summary=summary, use=uses.get(path)) for path, summary in found.items()]
        rows.sort(key=lambda row: 0 if row.use is None else -row.use.garbage_size_bytes)
        run.out.render(rows, LOG_GARBAGE_COLUMNS)
    elif order is LogOrder.ID:
        run.out.render((Row(summary=each) for each in summaries), LOG_COLUMNS)
    else:
        ordered = sorted(summaries, key=lambda each: -each.file.size if order is LogOrder.SIZE else each.file.mtime_ms)
        run.out.render((Row(summary=each) for each in ordered), LOG_COLUMNS)
    run.out.raise_first(errors)


SHARE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("BYTES", "size", "size_bytes", Kind.INTEGER),
    *with_hex("LOG", "logId", "log_id"),
    Column("FROM MAP", "fromLedgersMap", "contents.from_map", Kind.BOOLEAN),
    Column(None, "complete", "contents.complete", Kind.BOOLEAN),
    file_column(lambda row: row.path),
    key="ledger",
)


@command(app, "show", examples=("bkctl entrylog show 0 --conf bk_server.conf",), prints=rows_of(SHARE_COLUMNS))
def show(run: Run, names: LogNames = None, directories: DirOption = None) -> None:
    """Show the ledgers in entry logs, and their bytes.

    Reads the ledgers map, or scans a log that has none. A damaged ledgers map is replaced by a scan, and reported (exit
    code 7). If records are damaged, the rows count those before the damage, and are not complete.
    """
    errors: list[BkctlError] = []
    with run.job.working("Reading entry logs"):
        run.out.render(_shares(find_logs(run, names, directories), errors), SHARE_COLUMNS)
    run.out.raise_first(errors)


def _shares(paths: Iterable[Path], errors: list[BkctlError]) -> Iterator[Row]:
    """Yield the ledgers' shares of each log; errors of logs go to `errors`."""
    from bkctl.files.entry_log import EntryLogReader
    from bkctl.files.listing import log_contents
    from bkctl.formats.entry_log import content_id_of

    for path in paths:
        try:
            with EntryLogReader.open(path) as reader:
                contents = log_contents(reader)
        except NotFound:
            continue  # A running bookie deleted it meanwhile.
        except BkctlError as error:
            errors.append(error)
            continue
        for ledger, size_bytes in contents.sizes.items():
            yield Row(
                path=path, log_id=content_id_of(path.name), ledger=ledger, size_bytes=size_bytes, contents=contents
            )
        if contents.error is not None:
            errors.append(contents.error)


@command(app, "read", prints=rows_of(lambda: shown_record_columns("logId")))
def read(run: Run, records: Records, names: LogNames = None, directories: DirOption = None) -> None:
    """Print the records of entry logs.

    The records before damage are printed, then the damage is reported (exit code 7).

    $ bkctl entrylog read 0 --conf bk_server.conf
    $ bkctl entrylog read 0 --conf bk_server.conf --ledger 12 --body
    """
    with run.job.working("Reading entry logs"):
        files = _files(find_logs(run, names, directories), records.filter())
        print_records(run, files, "logId", records)


def _files(paths: list[Path], chosen: RecordFilter) -> Iterator[tuple[Path, int | None, Iterator[RecordBatch]]]:
    from bkctl.formats.entry_log import content_id_of

    for path in paths:
        yield path, content_id_of(path.name), _records(path, chosen)


def _records(path: Path, chosen: RecordFilter) -> Iterator[RecordBatch]:
    from bkctl.files.entry_log import EntryLogReader

    try:
        reader = EntryLogReader.open(path)
    except NotFound:
        return  # A running bookie deleted it meanwhile.
    with reader:
        yield from chosen.of_entry_log(reader)
