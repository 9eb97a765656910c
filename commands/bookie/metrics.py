"""`bkctl bookie metrics`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError

from ..kit.command import Run, command, group, rows_of
from ..kit.options import WatchOption
from ..kit.texts import plain_lines
from .server import BookieServerOption, Server, server

if TYPE_CHECKING:
    from bkctl.http.bookie_load import Metric

app = group()


def _number(metric: Metric) -> int | float | str:
    """Return the value as JSON has it; values that JSON numbers cannot have are text, as in Prometheus."""
    value = metric.value
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


def _labels_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def _sample_id(metric: Metric) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in metric.labels.items())
    return f"{metric.name}{{{labels}}}" if labels else metric.name


METRIC_COLUMNS = Columns(
    Column("METRIC", "name", "name"),
    Column("LABELS", "labels", "labels", Kind.NESTED, flexible=True, text=_labels_text),
    Column("VALUE", "value", _number, Kind.NESTED, text=str),
    Column("TYPE", "type", "type"),
    key=Column(None, "sample", _sample_id),
)


@command(
    app,
    "metrics",
    connects=True,
    examples=("bkctl bookie metrics --match journal --bookie-url http://127.0.0.1:8080",),
    prints=rows_of(METRIC_COLUMNS),
)
def metrics(
    run: Run,
    which: BookieServerOption,
    watch: WatchOption,
    match: Annotated[
        str | None,
        typer.Option(
            "--match",
            metavar="PATTERN",
            help="Only metrics whose name contains this; with * or ?, it must match the whole name.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print Prometheus' text as the bookie sent it.")] = False,
) -> None:
    """Show a bookie's metrics, one row for each sample.

    Apache's bookies have metrics only with statsProviderClass=…PrometheusMetricsProvider.
    """
    if raw and (match is not None or watch is not None):
        raise UsageError("--raw prints all metrics, once", hint="drop --match and --watch")
    with server(run, which) as found:
        if raw:
            text = found.api.metrics()
            run.out.text(plain_lines(text) if sys.stdout.isatty() else text)
            return

        run.out.watch(watch, partial(_metrics, found, match), METRIC_COLUMNS)


def _metrics(found: Server, match: str | None) -> list[Metric]:
    from bkctl.http.bookie_load import parse_metrics

    metrics = parse_metrics(found.api.metrics(), f"{found.url}/metrics")
    return [metric for metric in metrics if match is None or _matches(metric.name, match)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if any(char in pattern for char in "*?[") else pattern in name
