"""The long work of a run: its progress, its pace, its interrupts, its log."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bkctl.errors import is_interrupt

from . import interrupts
from .activity import Activity
from .printer import Printer
from .settings import Session
from .terminal import wants_color
from .texts import plain

if TYPE_CHECKING:
    import logging

    from bkctl.pace import Pace

#: Python looks for reference cycles this seldom while asynchronous work runs, which takes a tenth less time.
_GC_THRESHOLDS: Final = (20_000, 20, 100)
#: A run that ends sooner is not listed by `bkctl progress`.
LISTED_S: Final = 2.0

C = TypeVar("C")
T = TypeVar("T")


class LongWork:
    """Runs the long work of a command."""

    def __init__(self, session: Session, out: Printer) -> None:
        self._session, self._out = session, out

    @contextmanager
    def working(
        self,
        label: str,
        *,
        total: int | None = None,
        unit: str = "",
        enabled: bool = True,
        left: str | None = None,
        pace: Pace | None = None,
        listed: bool = True,
    ) -> Iterator[Activity]:
        """Show the progress of a stage of work: on a terminal's stderr, while nothing else is printed, and elsewhere.

        `bkctl progress` lists it from another terminal (`listed`), and with a `pace` pauses it and changes its rate. An
        interrupt of the work is reported with the progress and with `left`: the state that the work leaves, and how
        to continue or to go back.
        """
        outer, session = self._out.activity, self._session
        if outer is not None:
            outer.is_covered = True
            outer.clear()
        color = wants_color(sys.stderr, no_color=session.no_color)
        with Activity(
            label, total=total, unit=unit, enabled=enabled and not self._out.quiet, color=color, pace=pace,
            work=session.work_of_run if enabled and listed else None, due_at=session.began_at + LISTED_S,
        ) as activity:  # fmt: skip
            self._out.activity = activity
            try:
                yield activity
            except BaseException as error:
                if session.interrupted is None and is_interrupt(error):
                    stage = ", ".join(filter(None, [label, activity.amount()]))
                    session.interrupted = "; ".join(filter(None, [stage, left]))
                raise
            finally:
                self._out.activity = outer
                if outer is not None:
                    outer.is_covered = False

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run asynchronous work to its end. A signal cancels it once, and is raised as KeyboardInterrupt at its end."""
        from asyncio import CancelledError

        from bkctl.protocol.connection import run

        # Ledgers and entries allocate much, and hardly anything of it in reference cycles.
        thresholds = gc.get_threshold()
        gc.set_threshold(*_GC_THRESHOLDS)
        try:
            return run(interrupts.cancelled(work))
        except CancelledError:
            if interrupts.has_come():
                raise KeyboardInterrupt from None
            raise
        finally:
            gc.set_threshold(*thresholds)

    def ask(self, client: AbstractAsyncContextManager[C], work: Callable[[C], Awaitable[T]]) -> T:
        """Return the result of `work` with a client, which is closed then, as `complete`."""

        async def opened() -> T:
            async with client as found:
                return await work(found)

        return self.complete(opened())

    def take_each(
        self,
        client: AbstractAsyncContextManager[C],
        rows: Callable[[C], AsyncGenerator[T]],
        take: Callable[[T], object],
    ) -> None:
        """Call `take` with each of the rows for a client as it comes; the client is closed at the end."""

        async def take_rows(opened: C) -> None:
            async with aclosing(rows(opened)) as found:
                async for row in found:
                    take(row)

        self.ask(client, take_rows)

    def log(self) -> None:
        """Log to stderr, with times, and outlive stdout; for commands that serve in the foreground."""
        import logging

        from bkctl.bookie.log_limit import RepeatLimit

        self._out.outlive_stdout()
        level = logging.WARNING if self._out.quiet else logging.INFO
        log_to_stderr(level, "%(asctime)s %(levelname)s %(message)s", RepeatLimit())
        logging.getLogger("kazoo").setLevel(logging.INFO if self._out.verbose else logging.CRITICAL)

    def quiet_libraries(self) -> None:
        """Let libraries log to stderr only with --verbose; failures are reported as one error."""
        import logging

        log_to_stderr(logging.INFO if self._out.verbose else logging.CRITICAL, "%(name)s: %(message)s")


def log_to_stderr(level: int, form: str, *filters: logging.Filter) -> None:
    import logging

    logging.basicConfig(level=level, format=form, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            for each in filters:
                handler.addFilter(each)
            handler.addFilter(_make_plain)


def _make_plain(record: logging.LogRecord) -> bool:
    """Let a record be one line without control characters: messages name what the network sent."""
    with suppress(Exception):  # logging reports a message that cannot be made
        record.msg, record.args = plain(record.getMessage()), ()
    return True
