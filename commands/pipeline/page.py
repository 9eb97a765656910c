"""The HTML page of a pipeline's results: tables as the commands print them, plots in SVG, nothing from elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from bkctl import __version__
from bkctl.columns import Columns, Kind
from bkctl.errors import AlreadyExists

from ..kit.lines import Cells
from ..kit.texts import size_text

if TYPE_CHECKING:
    from bkctl.spark.engine import Frame
    from bkctl.spark.jobs.bookies import Bookies

#: Limits of a table and of a plot; the page shows the number of all rows.
TABLE_ROWS_MAX = 200
BARS_MAX = 25


class Bar(NamedTuple):
    """One bar of a plot: its label, and its parts by name."""

    label: str
    parts: Mapping[str, int]


class Section(NamedTuple):
    """A part of the page: SVG plots and tables, as HTML."""

    title: str
    text: str
    blocks: Sequence[str]


def top_rows(frame: Frame) -> list[Any]:
    """Return the first rows of `frame`, as many as a plot has bars."""
    return list(frame.limit(BARS_MAX).collect())


# --- tables and plots -----------------------------------------------------------------------------------------------


def table(frame: Frame, columns: Columns) -> str:
    """Return the first rows of `frame` as an HTML table with the terminal's cells."""
    shown = [column for column in columns.columns if column.title is not None]
    rows = frame.limit(TABLE_ROWS_MAX + 1).collect()
    right = [' class="number"' if column.kind in (Kind.INTEGER, Kind.SIZE) else "" for column in shown]
    head = "".join(f"<th{place}>{escape(str(column.title))}</th>" for column, place in zip(shown, right, strict=True))
    if not rows:
        return '<p class="none">None.</p>'
    body = "".join(
        "<tr>" + "".join(f"<td{place}>{escape(cell)}</td>" for cell, place in zip(cells, right, strict=True)) + "</tr>"
        for cells in Cells(columns).of_rows(rows[:TABLE_ROWS_MAX])
    )
    more = ""
    if len(rows) > TABLE_ROWS_MAX:
        more = f'<p class="none">The first {TABLE_ROWS_MAX} of {frame.count():,} rows.</p>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


_ROW_HEIGHT = 26
_LABEL_WIDTH = 300
_BAR_WIDTH = 480
_VALUE_WIDTH = 120


def bars(title: str, rows: Sequence[Bar], *, unit: str = "bytes") -> str:
    """Return a plot of horizontal bars, each of parts side by side; an empty text without rows."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    largest = max([sum(row.parts.values()) for row in rows] + [1])

    def text(value: int) -> str:
        return size_text(value) if unit == "bytes" else f"{value:,}"

    drawn: list[str] = []
    for number, row in enumerate(rows[:BARS_MAX]):
        top = number * _ROW_HEIGHT
        label = row.label if len(row.label) <= 42 else f"{row.label[:20]}…{row.label[-21:]}"
        x = float(_LABEL_WIDTH)
        drawn.append(
            f'<text x="{_LABEL_WIDTH - 10}" y="{top + 17}" text-anchor="end"><title>{escape(row.label)}</title>'
            f"{escape(label)}</text>"
        )
        for name, value in row.parts.items():
            width = value / largest * _BAR_WIDTH
            drawn.append(
                f'<rect class="p{names.index(name) % 5}" x="{x:.1f}" y="{top + 4}" width="{width:.1f}" height="18">'
                f"<title>{escape(row.label)}: {escape(name)} {text(value)}</title></rect>"
            )
            x += width
        drawn.append(f'<text class="value" x="{x + 8:.1f}" y="{top + 17}">{text(sum(row.parts.values()))}</text>')
    width, height = _LABEL_WIDTH + _BAR_WIDTH + _VALUE_WIDTH, min(len(rows), BARS_MAX) * _ROW_HEIGHT + 4
    legend = ""
    if len(names) > 1:
        keys = (f'<span><i class="p{number % 5}"></i>{escape(name)}</span>' for number, name in enumerate(names))
        legend = f'<div class="legend">{"".join(keys)}</div>'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg></figure>'
    )


# --- the page -------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5d6b7a; --line: #d9e0e7; --page: #ffffff; --head: #f3f6f9;
  --p0: #2f6fb0; --p1: #d9822b; --p2: #3a9a62; --p3: #b2455b; --p4: #7a5fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa7b4; --line: #35414d; --page: #161c22;
  --head: #1f272f; --p0: #5b9bdc; --p1: #e6a25c; --p2: #5fc08a; --p3: #dc7488; --p4: #a58cdc; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 1120px; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 40px 0 6px; border-top: 1px solid var(--line);
  padding-top: 20px; } h3 { font-size: 16px; margin: 24px 0 6px; }
p { margin: 4px 0 14px; } .about, .none { color: var(--soft); } .good { color: var(--p2); font-weight: 600; }
.wide { overflow-x: auto; margin: 8px 0 20px; } table { border-collapse: collapse; font-size: 13px; }
th { background: var(--head); text-align: left; font-weight: 600; } th, td { padding: 4px 12px;
  border-bottom: 1px solid var(--line); white-space: nowrap; } .number { text-align: right;
  font-variant-numeric: tabular-nums; }
figure { margin: 18px 0; } figcaption { font-weight: 600; margin-bottom: 6px; } svg { max-width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; } svg text.value { fill: var(--soft); }
.legend { font-size: 13px; color: var(--soft); margin-bottom: 4px; } .legend span { margin-right: 16px; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 2px; }
rect.p0 { fill: var(--p0); } rect.p1 { fill: var(--p1); } rect.p2 { fill: var(--p2); } rect.p3 { fill: var(--p3); }
rect.p4 { fill: var(--p4); } i.p0 { background: var(--p0); } i.p1 { background: var(--p1); }
i.p2 { background: var(--p2); } i.p3 { background: var(--p3); } i.p4 { background: var(--p4); }
"""


def page(title: str, sections: Sequence[Section], bookies: Sequence[str]) -> str:
    """Return the whole page as HTML."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    parts = [
        f"<section><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>{''.join(section.blocks)}</section>"
        for section in sections
    ]
    about = f"{len(bookies)} bookies: {', '.join(bookies)}. Made at {moment} by bkctl {__version__}."
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>BookKeeper: {escape(title.lower())}</title><style>{_STYLE}</style></head><body>"
        f'<h1>BookKeeper: {escape(title.lower())}</h1><p class="about">{escape(about)}</p>'
        f"{''.join(parts)}</body></html>\n"
    )


def write_pages(paths: Sequence[str], title: str, sections: Callable[[], Sequence[Section]], bookies: Bookies) -> None:
    """Write the page to a new file at each of `paths`; without one, `sections` is not called.

    Raises AlreadyExists, OSError.
    """
    if not paths:
        return
    text = page(title, sections(), [bookie.bookie_id for bookie in bookies])
    for path in paths:
        try:
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as error:
            raise AlreadyExists(f"{path} exists", hint="remove it, or give another name to --save") from error
