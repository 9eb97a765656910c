"""The names and signatures that programs may rely on, beside the committed ones."""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SURFACE = Path(__file__).with_name("public_surface.txt")
MODULES = ("bkctl", "bkctl.sync", "bkctl.errors")
ACCEPT = "python tests/test_public_surface.py > tests/public_surface.txt"


def surface() -> Iterator[str]:
    """Yield one line for each public name of the public modules, and for each public member of their classes."""
    for module in map(importlib.import_module, MODULES):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        for name in sorted(module.__all__):
            yield from _lines(f"{module.__name__}.{name}", getattr(module, name))


def _lines(name: str, found: Any) -> Iterator[str]:
    if not inspect.isclass(found):
        yield f"{name}: {found}"
        return
    bases = ", ".join(base.__name__ for base in found.__bases__ if not base.__name__.startswith("_"))
    yield f"class {name}({bases})"
    if issubclass(found, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in found)
        return
    if issubclass(found, BaseException):
        yield f"    exit_code = {found.exit_code}"
        return
    constructor = found.__new__ if found.__new__ is not object.__new__ and issubclass(found, tuple) else found.__init__
    if not {"thread", "access"} & inspect.signature(constructor).parameters.keys():  # handles come from a client
        yield f"    {name.rpartition('.')[2]}{_signature(constructor)}"
    for member, value in sorted(inspect.getmembers_static(found)):
        if member.startswith("_") or (issubclass(found, tuple) and hasattr(tuple, member)):
            continue
        if isinstance(value, property):
            yield f"    {member}: {inspect.signature(value.fget).return_annotation}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"    @{type(value).__name__} {member}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            kind = "async " if inspect.iscoroutinefunction(value) else ""
            yield f"    {kind}{member}{_signature(value)}"
        else:
            yield f"    {member}"


def _signature(function: Any) -> str:
    """Return the signature; annotations without their quotes, as each release of Python shows them."""
    text = str(inspect.signature(function)).replace("b''", 'b""')
    return re.sub(r"ForwardRef\('([^']+)'\)|'([^']+)'", r"\1\2", text)


def test_the_public_names_and_signatures_are_the_committed_ones() -> None:
    # In a process of its own, because tests have other defaults.
    printed = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True).stdout
    committed, found = SURFACE.read_text().splitlines(), printed.splitlines()
    changes = list(difflib.unified_diff(committed, found, "committed", "found", lineterm=""))
    assert not changes, (
        "Programs rely on this. If the change is meant, say so in CHANGELOG.md and accept it:\n"
        f"    {ACCEPT}\n" + "\n".join(changes)
    )


def test_the_blocking_twin_has_what_the_client_has() -> None:
    import bkctl
    from bkctl import sync

    for name in ("BookKeeper", "ReadHandle", "WriteHandle"):
        public = {member for member in dir(getattr(bkctl, name)) if not member.startswith("_")}
        twin = {member for member in dir(getattr(sync, name)) if not member.startswith("_")}
        # A loop's own means, what only bkctl's commands use, and what blocks in the twin by itself.
        assert public - twin <= {
            "access",
            "find_recovery_loss",
            "plan_recovery",
            "read_from",
            "versioned_metadata",
            "ready",
        }
        assert twin - public <= {"add_async"}


if __name__ == "__main__":
    print(*surface(), sep="\n")
