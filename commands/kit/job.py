"""The long work of a run: its progress on the terminal and for other terminals, its pace, interrupts and log."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

from bkctl.errors import is_interrupt

from . import interrupts
from .settings import Session
from .terminal import draw, wants_color
from .texts import plain, size_text, time_text

if TYPE_CHECKING:
    import logging

    from bkctl.pace import Pace

    from .printer import Printer
    from .work import WorkFile

#: Python looks for reference cycles this seldom while asynchronous work runs, which takes a tenth less time.
_GC_THRESHOLDS: Final = (20_000, 20, 100)
#: A run that ends sooner is not listed by `bkctl progress`.
LISTED_S: Final = 2.0

C = TypeVar("C")
T = TypeVar("T")


class Activity:
    """The progress of one stage of long work: a line on a terminal's stderr, and a state that other terminals see.

    A context manager. The line appears when nothing was printed for `DELAY_S`; `clear` removes it before other output.
    With a `total` it has a bar, a percentage and the time left; the percentage of a stage never decreases. `pace` lets
    other terminals pause the work and change its rate (see kit/work.py). `work` returns the file that they read, which
    the run writes from `due_at` on; None where they do not see the work.
    """

    DELAY_S: Final = 0.6
    PERIOD_S: Final = 0.1
    #: Between two states for other terminals.
    PUBLISH_S: Final = 1.0
    #: The rate is that of the last so many seconds.
    RATE_S: Final = 15.0
    FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

    def __init__(
        self,
        label: str,
        *,
        total: int | None = None,
        unit: str = "",
        stream: TextIO | None = None,
        enabled: bool = True,
        color: bool = False,
        pace: Pace | None = None,
        work: Callable[[], WorkFile] | None = None,
        due_at: float = 0.0,
    ) -> None:
        self.unit = unit
        #: More about the work, after the amount.
        self.remark = ""
        self.begin(label, total)
        self._stream = stream or sys.stderr
        self._draws = enabled and self._stream.isatty()
        self._color, self._pace, self._work, self._due_at = color, pace, work, due_at
        self._file: WorkFile | None = None
        #: True while another stage runs within this one, and shows itself.
        self.is_covered = False
        self._shown = False
        self._thread: threading.Thread | None = None

    def begin(self, label: str, total: int | None = None) -> None:
        """Begin another stage: nothing of it is done."""
        self.label, self.total = label, total
        self.done = 0
        self._share = 0.0
        self._samples: list[tuple[float, int]] = []

    def __enter__(self) -> Activity:
        if self._draws or self._work is not None:
            self._stopped = threading.Event()
            self._lock = threading.Lock()
            self._began = self._printed = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="activity", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self.clear()
            self._thread = None
            if self._file is not None and self._file.is_published:
                self._publish(self._file)

    def advance(self, count: int = 1) -> None:
        """Note that `count` more units are done."""
        self.done += count

    def update(self, done: int, total: int | None = None) -> None:
        """Set the finished amount and, if known, the total."""
        self.done, self.total = done, self.total if total is None else total

    def note_found(self, count: int) -> None:
        """Say beside the amount how many were found."""
        self.remark = f"{count:,} found"

    def step(self, done: int) -> None:
        """Set the finished amount, then wait as the pace says; for work that is not asynchronous."""
        steps, self.done = done - self.done, done
        if self._pace is not None:
            self._pace.take(steps=steps)

    def clear(self) -> None:
        """Remove the line before other output."""
        if self._thread is None or not self._draws:
            return
        with self._lock:
            self._printed = time.monotonic()
            if self._shown:
                draw("\r\x1b[K", self._stream)
                self._shown = False

    def amount(self) -> str:
        """Return how much is done, and of how much if that is known: `3 of 40 ledgers`; "" before the first unit."""
        unit = f" {self.unit}" if self.unit else ""
        done, total = f"{self.done:,}", f"{self.total or 0:,}"
        if self.unit == "bytes":
            done, total, unit = size_text(self.done), size_text(self.total or 0), ""
        if self.total:
            return f"{done} of {total}{unit}"
        if self.done == 1:
            unit = f"{unit[:-3]}y" if unit.endswith("ies") else unit.removesuffix("s")
        return f"{done}{unit}" if self.done else ""

    @property
    def share(self) -> float | None:
        """The part of the stage that is done, from 0 to 1; None if its total is unknown."""
        if not self.total:
            return None
        self._share = max(self._share, min(self.done / self.total, 1.0))
        return self._share

    def rate(self) -> float | None:
        """Return the units done a second, lately; None before that is known, and during a pause."""
        (began, before), (now, done) = (self._samples or [(0.0, 0)])[0], (self._samples or [(0.0, 0)])[-1]
        return (done - before) / (now - began) if now - began >= 1 and done > before else None

    def left_s(self) -> float | None:
        """Return the estimated remaining time of the stage; None before anything is known."""
        rate = self.rate()
        return None if rate is None or not self.total else max(self.total - self.done, 0) / rate

    def text(self, elapsed_s: float) -> list[str]:
        """Return the parts of the line behind its label and bar."""
        share, rate, left_s = self.share, self.rate(), self.left_s()
        parts = [] if share is None else [f"{int(share * 100):3}%"]
        parts.append(self.amount())
        if self._is_paused:
            parts.append("paused")
        elif self.remark or rate is None:
            parts.append(self.remark)
        else:
            parts.append(f"{size_text(int(rate))}/s" if self.unit == "bytes" else f"{rate:,.0f}/s")
        parts.append(f"{elapsed_s:.0f} s" if left_s is None else f"{time_text(left_s)} left")
        return [part for part in parts if part]

    @property
    def _is_paused(self) -> bool:
        return self._pace is not None and self._pace.is_paused

    def _run(self) -> None:
        """Draw the line and publish the state, each when it is due, until the stage ends."""
        published_at = -inf
        frame = 0
        wait_s = self.PERIOD_S if self._draws or self._work is None else max(self._due_at - time.monotonic(), 0.0)
        while not self._stopped.wait(wait_s):
            now = time.monotonic()
            wait_s = self.PERIOD_S if self._draws else self.PUBLISH_S
            if self.is_covered:
                continue
            if self._work is not None and now >= max(self._due_at, published_at + self.PUBLISH_S):
                published_at = now
                self._file = self._work()
                self._publish(self._file)
                if self._pace is not None:
                    self._file.steer(self._pace)
            if self._is_paused:
                self._samples.clear()
            else:
                self._samples = [each for each in self._samples if now - each[0] <= self.RATE_S]
                self._samples.append((now, self.done))
            if self._draws:
                self._draw(now, frame)
                frame += 1

    def _publish(self, file: WorkFile) -> None:
        share, rate, left_s = self.share, self.rate(), self.left_s()
        pace = self._pace
        file.publish(
            state="paused" if self._is_paused else "running",
            stage=self.label,
            done=self.done,
            total=self.total,
            unit=self.unit or None,
            percent=None if share is None else int(share * 100),
            rate=None if rate is None else round(rate, 1),
            etaSeconds=None if left_s is None else round(left_s),
            isSteerable=pace is not None,
            hasBytes=pace is not None and pace.has_bytes,
            bytesPerSecondMax=pace and pace.bytes_per_s,
            stepsPerSecondMax=pace and pace.steps_per_s,
        )

    def _draw(self, now: float, frame: int) -> None:
        if now - self._printed < self.DELAY_S:
            return
        from .drawing import progress_line

        work_id = self._file.id if self._file is not None and self._file.is_published else None
        spinner, parts = self.FRAMES[frame % len(self.FRAMES)], self.text(now - self._began)
        line = progress_line(spinner, work_id, self.label, self.share, parts, color=self._color)
        with self._lock:
            if time.monotonic() - self._printed >= self.DELAY_S:
                draw(f"\r\x1b[K{line}", self._stream)
                self._shown = True


class LongWork:
    """Runs the long work of a command."""

    def __init__(self, session: Session, out: Printer) -> None:
        self._session, self._out = session, out
        self._activity: Activity | None = None

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
        outer, session = self._activity, self._session
        if outer is not None:
            outer.is_covered = True
            outer.clear()
        color = wants_color(sys.stderr, no_color=session.no_color)
        with Activity(
            label, total=total, unit=unit, enabled=enabled and not self._out.quiet, color=color, pace=pace,
            work=session.work_of_run if enabled and listed else None, due_at=session.began_at + LISTED_S,
        ) as activity:  # fmt: skip
            self._activity, self._out.activity = activity, activity.clear
            try:
                yield activity
            except BaseException as error:
                if session.interrupted is None and is_interrupt(error):
                    stage = ", ".join(filter(None, [label, activity.amount()]))
                    session.interrupted = "; ".join(filter(None, [stage, left]))
                raise
            finally:
                self._activity, self._out.activity = outer, None
                if outer is not None:
                    outer.is_covered, self._out.activity = False, outer.clear

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
