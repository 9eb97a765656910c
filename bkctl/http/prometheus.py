"""Reads metrics in Prometheus' text format."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from bkctl.errors import ProtocolError
from bkctl.http.client import shortened

_SAMPLE: Final = re.compile(
    r"([a-zA-Z_:][\w:.-]*)[ \t]*(?:\{(.*)\}[ \t]*|[ \t])([^\s{}]+)(?:[ \t]+-?\d+)?[ \t]*", re.ASCII
)
_LABEL: Final = re.compile(r'[ \t]*([a-zA-Z_][\w.-]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)', re.ASCII)
_ESCAPE: Final = re.compile(r"\\(.)")


class Metric(NamedTuple):
    """One sample. `type` is counter, gauge, summary, histogram or untyped."""

    name: str
    labels: Mapping[str, str]
    value: float
    type: str


def parse_metrics(text: str, where: str = "") -> Iterator[Metric]:
    """Yield the samples of a text in Prometheus' format 0.0.4, in order. Raise ProtocolError for an invalid line.

    Names and labels may have dots and dashes, which Apache's provider produces. `where` names the text in messages.
    """
    at = f"{where}: " if where else ""
    types: dict[str, str] = {}
    for number, line in enumerate(io.StringIO(text), 1):
        line = line.strip()
        if not line:
            continue
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[1] == "TYPE":
                types[words[2]] = words[3]
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            if match is None:
                raise ValueError(line)
            value = float(match[3])
            labels = _labels(match[2] or "")
        except ValueError as error:
            raise ProtocolError(f"{at}line {number} is not a metric: {shortened(line)[:60]!r}") from error
        name = match[1]
        family = name if name in types else re.sub(r"_(?:bucket|count|sum)$", "", name)
        yield Metric(name, labels, value, types.get(family, "untyped"))


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            raise ValueError(text)
        labels[match[1]] = _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], match[2])
        at = match.end()
    return labels
