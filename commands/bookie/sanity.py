"""`bkctl bookie sanity`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import FindingsError, TimedOut, Unreachable, UsageError

from ..kit.columns import Row
from ..kit.command import Run, command, group, object_of
from ..kit.ledger_options import scope_option
from ..kit.options import count_option, duration_option
from ..kit.texts import GREEN, RED, YELLOW
from .server import BookieServerOption, ServerChoice, registered_bookie, server

if TYPE_CHECKING:
    from bkctl.client.trials import RoundTrip

app = group()


#: The outcome of a bookie's test; `result` is None if the bookie tested itself.
SANITY_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("URL", "url", "url"),
    Column("PASSED", "passed", "passed", Kind.BOOLEAN, style={"yes": GREEN, "no": RED}),
    Column("READ ONLY", "readOnly", "read_only", Kind.BOOLEAN, style={"yes": YELLOW}),
    Column("ENTRIES", "entryCount", value_at("result.entry_count"), Kind.INTEGER, optional=True),
    Column(
        "WRITTEN IN", "writeMilliseconds", lambda row: row.result and round(row.result.write_s * 1000), Kind.INTEGER,
        optional=True, text="{:,} ms".format,
    ),
    Column(
        "READ IN", "readMilliseconds", lambda row: row.result and round(row.result.read_s * 1000), Kind.INTEGER,
        optional=True, text="{:,} ms".format,
    ),
)  # fmt: skip


@command(app, "sanity", connects=True, changes=None, prints=object_of(SANITY_COLUMNS))
def sanity(
    run: Run,
    which: BookieServerOption,
    count: Annotated[int | None, count_option("--entries", "Entries to write (default 10).", short="-e")],
    deadline: Annotated[
        float | None, duration_option("--deadline", "Give up after this long (exit code 6).", short="-t")
    ],
    scope_id: Annotated[int | None, scope_option("Scope of the ledger (default 0).")],
) -> None:
    """Test a bookie with a temporary ledger.

    Writes a ledger on this bookie alone, reads it open and closed, compares, and deletes it. With --bookie the test
    runs over the wire. With --bookie-url, or --conf alone, the bookie tests itself, as Apache's bookies can, too: 10
    entries in scope 0. Exit code 3 if the bookie did not pass, or is read-only and so accepts no entries.

    $ bkctl bookie sanity --bookie-url http://127.0.0.1:8080
    """
    if which.bookie_id is None or which.url is not None:
        if count is not None or scope_id is not None:
            raise UsageError(
                f"{'--ledger-scope-id' if count is None else '--entries'} requires --bookie without --bookie-url",
                hint="a bookie tests itself with 10 entries in scope 0",
            )
        row = _sanity_of_itself(run, which, deadline)
    else:
        from bkctl.client.trials import SANITY_ENTRY_COUNT

        row = _sanity_over_the_wire(run, which.bookie_id, count or SANITY_ENTRY_COUNT, scope_id or 0, deadline)
    run.out.show(row, SANITY_COLUMNS)
    if not row.passed:
        name = f"Bookie {row.bookie_id}" if row.bookie_id else f"The bookie at {row.url}"
        if row.read_only:
            raise FindingsError(f"{name} is read-only, so no entry was written")
        raise FindingsError(f"{name} did not pass its test", hint="its log says why")


def _sanity_of_itself(run: Run, which: ServerChoice, deadline: float | None) -> Row:
    if deadline is not None:
        run.access.timeout_s, run.access.connect_timeout_s = deadline, min(run.access.connect_timeout_s, deadline)
    with server(run, which, changes=True) as found, run.job.working("The bookie tests itself"):
        try:
            answer = found.api.sanity()
        except TimedOut as error:
            if deadline is None:
                raise
            raise TimedOut(f"{found.name} did not end its test within {deadline:g} s") from error
    return Row(bookie_id=which.bookie_id, url=found.url, passed=answer.passed, read_only=answer.read_only, result=None)


def _sanity_over_the_wire(run: Run, bookie_id: str, count: int, scope_id: int, deadline: float | None) -> Row:
    async def work() -> RoundTrip:
        import asyncio

        from bkctl.client.trials import sanity_test

        try:
            async with asyncio.timeout(deadline), run.access.bookkeeper(cluster, only={bookie_id}) as bookkeeper:
                return await sanity_test(
                    bookkeeper, ledger_scope_id=scope_id, entry_count=count, progress=activity.update,
                    report=run.out.error,
                )  # fmt: skip
        except TimeoutError as error:
            raise TimedOut(f"The test of bookie {bookie_id} did not end within {deadline:g} s") from error

    run.consent.start_audit(begun=False)
    with (
        run.access.cluster() as cluster,
        run.job.working("Writing and reading", total=count, unit="entries") as activity,
    ):
        bookie = registered_bookie(cluster, bookie_id)
        if bookie.state == "down":
            raise Unreachable(f"Bookie {bookie_id} is down", hint="'bkctl bookies list' shows which bookies are up")
        read_only = bookie.state == "ro"
        result = None if read_only else run.job.complete(work())
        return Row(bookie_id=bookie_id, url=None, passed=not read_only, read_only=read_only, result=result)
