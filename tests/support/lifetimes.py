"""Objects that are freed as soon as nothing uses them, without Python's cycle collector."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest


class Lifetimes:
    """Weak references to the objects of a class that were created since."""

    def __init__(self, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[weakref.ref[Any]] = []
        create = kind.__init__  # type: ignore[misc]

        def init(made: Any, *args: Any, **options: Any) -> None:
            create(made, *args, **options)
            self.made.append(weakref.ref(made))

        monkeypatch.setattr(kind, "__init__", init)

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self.made)


def count_of(name: str) -> int:
    """Return the number of objects of the types of that name, which may be compiled ones without weak references."""
    return sum(type(each).__name__ == name for each in gc.get_objects())


@contextlib.contextmanager
def without_cycle_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
