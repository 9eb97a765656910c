"""The templates of the console, which also render the page of a pipeline's results."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from bkctl.columns import iso_time, plain, size_text


def templates() -> Environment:
    """Return the templates by file name. Whatever they show is escaped, and cannot reorder the page's own text."""
    here = files("bkctl.http.console")
    texts = {each.name: each.read_text("utf-8") for each in here.iterdir() if each.name.endswith(".html")}
    found = Environment(loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, finalize=_visible)
    found.filters.update(
        time=lambda ms: "-" if ms is None else re.sub(r"\.\d+Z", "Z", iso_time(ms)),
        size=lambda size_bytes: "-" if size_bytes is None else size_text(size_bytes),
        path=lambda text: quote(str(text), safe=""),
    )
    return found


def style() -> Markup:
    """Return the style sheet, for pages that stand alone."""
    return Markup((files("bkctl.http.console") / "console.css").read_text("utf-8"))


def _visible(value: Any) -> Any:
    """Return text without what could reorder the page's own; other values as they are."""
    return plain(value) if type(value) is str else value
