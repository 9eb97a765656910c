"""The screen of `bkctl top`: drawn by rich, steered by keys. Only a terminal's `top` imports this."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from bkctl.columns import iso_time, value_at
from bkctl.errors import BkctlError

from .kit.texts import counted, milliseconds, plain, size_text

if TYPE_CHECKING:
    from bkctl.http.bookie_load import BookieLoad, ClusterLoad, LoadWatch, Percentiles

#: Values that a sparkline is drawn from.
HISTORY_LENGTH: Final = 120
#: Keys are answered at once; new numbers are drawn within this time.
POLL_S: Final = 0.2
SPARK_WIDTH_MIN: Final = 8
_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-=+*#@"
_STATE_STYLES: Final = {"rw": "green", "ro": "yellow", "down": "red"}


class _Field(NamedTuple):
    """A column of the table; `rank` says which columns go first where the terminal is narrow (the highest)."""

    title: str
    rank: int
    value: Callable[[BookieLoad], Any]
    text: Callable[[Any], str]


def _number_text(value: float) -> str:
    """Return a number in at most five characters: `0.4`, `812`, `12.3k`."""
    if value < 9.95 and not float(value).is_integer():
        return f"{value:.1f}"
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 99.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def _latency_text(value: float) -> str:
    return milliseconds(value) if value < 1 else _number_text(value)


_FIELDS: Final = (
    _Field("BOOKIE", 0, lambda load: load.bookie.bookie_id, plain),
    _Field("ST", 1, lambda load: load.bookie.state, str),
    _Field("ADD/S", 2, lambda load: load.per_second.adds, _number_text),
    _Field("READ/S", 3, lambda load: load.per_second.reads, _number_text),
    _Field("ADD99", 4, value_at("reading.add.p99_ms"), _latency_text),
    _Field("READ99", 5, value_at("reading.read.p99_ms"), _latency_text),
    _Field("SYNC99", 6, value_at("reading.journal_sync.p99_ms"), _latency_text),
    _Field("DISK", 7, value_at("reading.disk.used_percent"), "{:.0f}%".format),
    _Field("GC", 8, value_at("reading.collection"), str),
    _Field("LEDGERS", 10, value_at("reading.ledger_count"), _number_text),
    _Field("UNDER", 9, lambda load: load.underreplicated_count, _number_text),
)
_TEXT_FIELDS: Final = ("BOOKIE", "ST", "GC")


def _cell(field: _Field, load: BookieLoad) -> str:
    value = field.value(load)
    return "-" if value is None else field.text(value)


def spark(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Return the last `width` values as bars; the highest bar is the largest of them."""
    shown = list(values)[-width:]
    largest = max(shown, default=0) or 1
    return "".join(bars[min(int(value / largest * len(bars)), len(bars) - 1)] for value in shown)


class _Looks:
    """Looks at the cluster every interval, in a thread; keeps the last load, or the error in place of one."""

    def __init__(self, watch: LoadWatch, interval_s: float) -> None:
        self._watch, self._interval_s = watch, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)
        #: The newest load and error, replaced as a pair.
        self.newest: tuple[ClusterLoad | None, str | None] = (None, None)

    def __enter__(self) -> _Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._watch.cancel()
        self._thread.join()

    def _run(self) -> None:
        load = None
        while not self._stopped.is_set():
            try:
                load = self._watch.look()
                self.newest = (load, None)
            except (BkctlError, OSError) as error:
                self.newest = (load, str(error))
            self._stopped.wait(self._interval_s)


class Screen:
    """The pages of `top`, and their state: the selected bookie, the order, the filter, the history of each bookie."""

    def __init__(self, bars: str = _BARS) -> None:
        self._bars, self._taken_ms, self._order, self._filter = bars, 0, 0, ""
        self._load: ClusterLoad | None = None
        self._problem: str | None = None
        self._selected: str | None = None
        self._history: dict[str, dict[str, deque[float]]] = {}
        self._is_open = self._reverse = self._is_typing = False

    # --- numbers ------------------------------------------------------------------------------------------------

    def take(self, load: ClusterLoad | None, problem: str | None) -> None:
        """Show new numbers, or the problem that hides them."""
        self._problem = problem
        if load is None or load is self._load:
            return
        self._load, self._taken_ms = load, time.time_ns() // 1_000_000
        before, self._history = self._history, {}
        for each in load.bookies:
            lines = before.get(each.bookie.bookie_id) or {
                name: deque(maxlen=HISTORY_LENGTH) for name in ("adds", "reads", "all")
            }
            self._history[each.bookie.bookie_id] = lines
            adds, reads = each.per_second.adds, each.per_second.reads
            if adds is not None or reads is not None:
                lines["adds"].append(adds or 0)
                lines["reads"].append(reads or 0)
                lines["all"].append((adds or 0) + (reads or 0))

    def _rows(self) -> list[BookieLoad]:
        """Return the bookies to show, in order; those without a value are last."""
        loads = self._load.bookies if self._load is not None else ()
        words = self._filter.lower()
        shown = [each for each in loads if words in each.bookie.bookie_id.lower() or words == each.bookie.state]
        field = _FIELDS[self._order]
        known = [each for each in shown if field.value(each) is not None]
        # Numbers are most useful with the largest first, names in their own order.
        known.sort(key=field.value, reverse=(field.title not in _TEXT_FIELDS) != self._reverse)
        return known + [each for each in shown if field.value(each) is None]

    def _chosen(self, rows: Sequence[BookieLoad]) -> int:
        """Return the index of the selected bookie; the first where it is not shown."""
        return next((at for at, each in enumerate(rows) if each.bookie.bookie_id == self._selected), 0)

    # --- keys ---------------------------------------------------------------------------------------------------

    def press(self, key: str) -> bool:
        """Act on a key; return False if the user quits."""
        if key == "end-of-input":
            return False
        if self._is_typing:
            self._type(key)
        elif key == "q":
            return False
        elif self._is_open and key in ("escape", "enter", "backspace", "left", "b"):
            self._is_open = False
        elif key in ("down", "j", "up", "k", "page-down", "page-up", "home", "end"):
            self._move(key)
        elif key in ("enter", "right"):
            self._is_open = bool(self._rows())
        elif key in ("s", "S"):
            self._order = (self._order + (1 if key == "s" else -1)) % len(_FIELDS)
        elif key == "r":
            self._reverse = not self._reverse
        elif key == "/":
            self._is_typing, self._is_open = True, False
        elif key == "escape":
            self._filter = ""
        return True

    def _type(self, key: str) -> None:
        self._is_typing = key not in ("enter", "escape")
        texts = {"escape": "", "enter": self._filter, "backspace": self._filter[:-1]}
        self._filter = texts.get(key, self._filter + key if len(key) == 1 else self._filter)

    def _move(self, key: str) -> None:
        rows = self._rows()
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "page-down": 10, "page-up": -10}
        wanted = self._chosen(rows) + steps.get(key, 0) if key in steps else (0 if key == "home" else len(rows))
        if rows:
            self._selected = rows[min(max(wanted, 0), len(rows) - 1)].bookie.bookie_id

    # --- drawing ------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or options.max_height
        rows = self._rows()
        body: Iterable[Any]
        if self._load is None:
            body, footer = [Text("Asking the bookies")], "q quit"
        elif self._is_open and rows:
            body = self._page(rows[self._chosen(rows)], width)
            footer = "Esc back  Up/Down other bookie  q quit"
        else:
            body = self._table(rows, width, height - 5)
            order = f"{_FIELDS[self._order].title}{', reversed' if self._reverse else ''}"
            footer = f"q quit  Up/Down select  Enter open  s sort ({order})  r reverse  / filter"
        if self._is_typing:
            footer = f"/{self._filter}_  (Enter keeps the filter, Esc drops it)"
        elif self._filter:
            footer = f"filter '{self._filter}' (Esc drops it)  {footer}"
        moment = f"{iso_time(self._taken_ms)[11:19]}Z" if self._taken_ms else ""
        sums = Text(plain(self._problem), style="red") if self._problem else self._sums(rows)
        head = [_line(Text.assemble(("bkctl top", "bold"), f"  {moment}")), _line(sums)]
        lines = [*console.render_lines(Group(*head, Text(""), *body), options.update(height=None), pad=False)]
        lines = lines[: max(height - 1, 1)]
        lines += [[]] * (height - 1 - len(lines))
        for line in lines:
            yield from line
            yield Segment.line()
        yield _line(Text(footer, style="reverse"))

    def _sums(self, rows: Sequence[BookieLoad]) -> Text:
        if self._load is None:
            return Text("")
        every = self._load.bookies
        text = Text(f"{counted(len(every), 'bookie')}:")
        for state, style in _STATE_STYLES.items():
            if count := sum(each.bookie.state == state for each in every):
                text.append(f" {count} {state}", style)
        for name in ("adds", "reads"):
            known = [value for each in every if (value := getattr(each.per_second, name)) is not None]
            text.append(f"  {name} {_number_text(sum(known)) if known else '-'}/s")
        if (words := self._load.underreplication) is not None:
            text.append(f"  {words}", "red" if self._load.underreplicated_count else "yellow")
        if len(rows) < len(every):
            text.append(f"  {len(rows)} shown")
        return text

    def _table(self, rows: Sequence[BookieLoad], width: int, height: int) -> Iterable[Any]:
        widths = {
            field.title: max([len(field.title), *(len(_cell(field, each)) for each in rows)]) for field in _FIELDS
        }
        widths["BOOKIE"] = min(widths["BOOKIE"], max(width // 3, 12))
        fields = list(_FIELDS)
        while len(fields) > 2 and sum(widths[each.title] + 1 for each in fields) + SPARK_WIDTH_MIN > width:
            fields.remove(max(fields, key=lambda each: each.rank))
        room = width - sum(widths[each.title] + 1 for each in fields)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, collapse_padding=True)
        for field in fields:
            style = "bold underline" if field is _FIELDS[self._order] else "bold"
            table.add_column(
                field.title, header_style=style, justify="left" if field.title in _TEXT_FIELDS else "right",
                width=widths[field.title], no_wrap=True, overflow="ellipsis",
            )  # fmt: skip
        has_spark = room >= SPARK_WIDTH_MIN
        if has_spark:
            table.add_column("LOAD", header_style="bold", width=room, no_wrap=True)
        at = self._chosen(rows)
        # The last line of the body is the selected bookie's problem.
        size = max(height - 2, 1)
        first = min(max(at - size // 2, 0), max(len(rows) - size, 0))
        for index, each in enumerate(rows[first : first + size], first):
            cells = [Text(_cell(field, each), style=self._style(field, each)) for field in fields]
            if has_spark:
                values = self._history[each.bookie.bookie_id]["all"]
                cells.append(Text(spark(values, room, self._bars), style="cyan"))
            table.add_row(*cells, style="reverse" if index == at else "")
        yield table
        problem = rows[at].problem if rows else None
        if problem is not None:
            yield Text("")
            yield _line(Text(f"{rows[at].bookie.bookie_id}: {plain(problem)}", style="yellow"))

    def _style(self, field: _Field, load: BookieLoad) -> str:
        if field.title == "ST":
            return _STATE_STYLES.get(load.bookie.state, "")
        if field.title == "UNDER" and load.underreplicated_count:
            return "red"
        used = field.value(load) if field.title == "DISK" else None
        return "red" if used is not None and used > 90 else ""

    def _page(self, load: BookieLoad, width: int) -> Iterable[Any]:
        bookie, reading, rates = load.bookie, load.reading, load.per_second
        lines = self._history[bookie.bookie_id]
        yield Text.assemble((plain(bookie.bookie_id), "bold"), "  ", (bookie.state, _STATE_STYLES[bookie.state]))
        if load.problem is not None:
            yield Text(plain(load.problem), style="yellow")
        room = max(min(width - 34, HISTORY_LENGTH), SPARK_WIDTH_MIN)
        grid = Table.grid(padding=(0, 2))
        for name, rate, size in (("adds", rates.adds, rates.added_bytes), ("reads", rates.reads, rates.read_bytes)):
            grid.add_row(
                name, _or_dash(rate, lambda value: f"{_number_text(value)}/s"), _bytes_text(size),
                Text(spark(lines[name], room, self._bars), style="cyan"),
            )  # fmt: skip
        yield grid
        if reading is None:
            return
        yield Text("")
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for title in ("MILLISECONDS", "P50", "P95", "P99", "P99.9"):
            table.add_column(title, header_style="bold", justify="left" if title == "MILLISECONDS" else "right")
        latencies: Mapping[str, Percentiles] = {
            "add": reading.add, "read": reading.read, "journal sync": reading.journal_sync,
            "journal queue": reading.journal_queue,
        }  # fmt: skip
        for label, found in latencies.items():
            table.add_row(label, *(_or_dash(value, milliseconds) for value in found))
        yield table
        yield Text("")
        facts = Table.grid(padding=(0, 2))
        disk, journal = reading.disk, f"{_bytes_text(rates.journal_bytes)}, {_or_dash(reading.journal_waiting, str)}"
        major, minor = (_or_dash(each, str) for each in (reading.major_compactions, reading.minor_compactions))
        reclaimed, count = _or_dash(reading.reclaimed_bytes, size_text), _or_dash(reading.ledger_count, str)
        facts.add_row("journal", f"{journal} waiting")
        if disk is not None:
            facts.add_row("disk", f"{size_text(disk.used)} of {size_text(disk.total)} used ({disk.used_percent:.1f}%)")
        work = f"{reading.collection or '-'}; compactions: {major} major, {minor} minor; reclaimed: {reclaimed}"
        facts.add_row("collection", work)
        facts.add_row("ledgers", f"{count} in memory; under-replicated: {load.underreplicated_count}")
        facts.add_row("version", Text(plain(bookie.version or "-")))
        yield facts


def _or_dash(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)


def _bytes_text(value: float | None) -> str:
    return _or_dash(value, lambda each: f"{size_text(int(each))}/s")


def _line(text: Text) -> Text:
    """Return `text` as one line that is cut at the terminal's width."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


#: The rest of a key's escape sequence follows its first byte within this time; a lone Escape key has none.
ESCAPE_WAIT_S: Final = 0.05
_SEQUENCES: Final = {
    "A": "up", "B": "down", "C": "right", "D": "left", "5~": "page-up", "6~": "page-down", "H": "home", "F": "end"
}  # fmt: skip
_CONTROLS: Final = {
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x04": "end-of-input", "\x1b": "escape"
}  # fmt: skip
#: One key: an escape sequence with what follows its `[` or `O`, or one character.
_KEY: Final = re.compile(r"\x1b[\[O]([^@-~]*[@-~]?)|.", re.DOTALL)


def _split(text: str) -> Iterator[str]:
    """Yield the keys in `text`: characters as they are, others by name; an unknown escape sequence yields nothing."""
    for key in _KEY.finditer(text):
        name = _CONTROLS.get(key[0], key[0]) if key[1] is None else _SEQUENCES.get(key[1], "")
        if name and (len(name) > 1 or name.isprintable()):
            yield name


def _bytes_of(descriptor: int, timeout_s: float) -> bytes:
    """Return the bytes that wait, none after `timeout_s`; the end of input where the terminal is gone."""
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return b""
    try:
        return os.read(descriptor, 1024) or b"\x04"
    except OSError:
        return b"\x04"


@contextmanager
def keys() -> Iterator[Callable[[float], list[str]]]:
    """Yield a function that waits at most so many seconds for keys on stdin, and returns those that were pressed.

    Characters are as they are, other keys have names: `up`, `enter`, `end-of-input` on a hang-up. The terminal is
    without line editing and echo, and restored at the end, after errors and interrupts. Ctrl-C still interrupts. Ctrl-Z
    does nothing: a stopped command would leave the terminal without echo.
    """
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)

    def read(timeout_s: float) -> list[str]:
        data = _bytes_of(descriptor, timeout_s)
        if data.endswith(b"\x1b"):
            data += _bytes_of(descriptor, ESCAPE_WAIT_S)
        return list(_split(data.decode("utf-8", "replace")))

    try:
        tty.setcbreak(descriptor)
        settings = termios.tcgetattr(descriptor)
        settings[6][termios.VSUSP] = os.fpathconf(descriptor, "PC_VDISABLE").to_bytes(1, "big")
        termios.tcsetattr(descriptor, termios.TCSANOW, settings)
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def show_live(watch: LoadWatch, *, interval_s: float, color: bool) -> None:
    """Show the loads that `watch` finds until the user quits."""
    console = Console(file=sys.stdout, no_color=not color, highlight=False)
    screen = Screen(_BARS if "utf" in console.encoding.lower() else _ASCII_BARS)
    drawn: object = None
    with (
        keys() as pressed_keys,
        _Looks(watch, interval_s) as looks,
        Live(screen, console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            # Drawing only what changed keeps a slow line free for keys.
            if (now := (looks.newest, console.size)) != drawn:
                drawn = now
                screen.take(*now[0])
                live.refresh()
            for key in pressed_keys(POLL_S):
                if not screen.press(key):
                    return
                live.refresh()
