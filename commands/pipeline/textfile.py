"""The option --textfile: totals of a report for Prometheus' textfile collector."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bkctl.errors import NotFound, UsageError

if TYPE_CHECKING:
    from bkctl.bookie.metrics import PrometheusText

_SUFFIX: Final = ".prom"
#: Column of the rows by bookie → name of its metric.
_INVENTORY: Final = {"size": "bkctl_report_entry_bytes", "entryCount": "bkctl_report_entries"}
_GARBAGE: Final = {
    "remainingSize": "bkctl_report_remaining_bytes",
    "garbageSize": "bkctl_report_garbage_bytes",
    "reclaimableSize": "bkctl_report_reclaimable_bytes",
}

TextfileOption = Annotated[
    Path | None,
    typer.Option(
        "--textfile", metavar=f"NAME{_SUFFIX}",
        help="Write findings and totals for the textfile collector of Prometheus' node_exporter; replaces the file.",
    ),
]  # fmt: skip


def check_textfile(path: Path | None) -> None:
    """Raise UsageError or NotFound (directory) for a file that the collector or this machine would not take."""
    if path is None:
        return
    if path.suffix != _SUFFIX:
        raise UsageError(f"--textfile {path}: not a name that ends in {_SUFFIX}", hint="the collector reads no others")
    if not path.absolute().parent.is_dir():
        raise NotFound(f"--textfile {path}: the directory {path.absolute().parent} does not exist")


def write_textfile(
    path: Path, findings: Mapping[str, int], inventory: Iterable[Any], garbage: Iterable[Any]
) -> None:  # fmt: skip
    """Write the findings of each job, rows of inventory and garbage by bookie, and the time. Raises OSError."""
    from bkctl.bookie.metrics import PrometheusText
    from bkctl.disk import atomic_write

    text = PrometheusText()
    text.gauge("bkctl_report_timestamp_seconds", int(time.time()))
    for job, count in findings.items():
        text.gauge("bkctl_report_findings", count, {"job": job})
    _add_rows(text, inventory, _INVENTORY)
    _add_rows(text, garbage, _GARBAGE)
    with atomic_write(path, mode=0o644) as file:
        file.write(text.text().encode())


def _add_rows(text: PrometheusText, rows: Iterable[Any], names: Mapping[str, str]) -> None:
    for row in rows:
        values = row.asDict()
        for column, name in names.items():
            text.gauge(name, values[column], {"bookie": values["bookieId"]})
