"""Write the reference in docs/python.md from the docstrings of the client: part of `make generate`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bkctl
from bkctl import errors

PAGE = Path(__file__).with_name("python.md")
BEGIN, END = "<!-- reference, from docstrings -->\n", "<!-- end of the reference -->\n"
CLASSES = (bkctl.BookKeeper, bkctl.WriteHandle, bkctl.ReadHandle, bkctl.Handle)
#: What bkctl's own commands use; it may change in any release.
INTERNAL = {"access", "find_recovery_loss", "watch_writer", "read_from", "versioned_metadata"}


def reference() -> str:
    """Return the Markdown of all classes and errors."""
    return "\n\n".join([*_classes(), *_errors()]) + "\n\n"


def _classes() -> Iterator[str]:
    for kind in CLASSES:
        yield f"### {kind.__name__}"
        if kind is bkctl.BookKeeper:
            yield f"```text\nBookKeeper{_signature(kind.__init__)}\n```"
        yield _text(kind)
        for name, member in vars(kind).items():
            if name.startswith("_") or name in INTERNAL or (kind is not bkctl.Handle and name in vars(bkctl.Handle)):
                continue
            if isinstance(member, property):
                yield f"**`{name}: {inspect.signature(member.fget).return_annotation}`** {_text(member)}"  # type: ignore[arg-type]
            elif inspect.isfunction(member):
                kind_of = "await " if inspect.iscoroutinefunction(member) else ""
                yield f"```text\n{kind_of}{name}{_signature(member)}\n```\n\n{_text(member)}"


def _errors() -> Iterator[str]:
    yield "### Errors"
    yield "All are in `bkctl.errors`. `str(error)` is one line; `error.hint`, where there is one, is a remedy."
    rows = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        rows.append(f"| `{name}` | `{kind.__base__.__name__}` | {_text(kind).splitlines()[0]} |")
    yield "\n".join(["| error | is a | means |", "| --- | --- | --- |", *rows])


def _text(of: Any) -> str:
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(of) or "")
    return text.replace("Source: ", "Java: ")


def _signature(function: Any) -> str:
    text = str(inspect.signature(function)).replace("b''", 'b""').replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"'([^']+)'|<(\w+\.\w+): \d+>", r"\1\2", text)
    text = re.sub(r"RackRules\([^)]*\)", "RackRules()", text)
    if len(text) < 100:
        return text
    return "(\n    " + re.sub(r", (?=\*|\w+:)", ",\n    ", text[1:]).replace(") ->", "\n) ->")


def updated(page: str) -> str:
    """Return the text of `page` with its reference written again."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + reference() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
