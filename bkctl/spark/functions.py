"""The functions of columns that jobs are written with: PySpark's, or the local engine's while that runs a job.

    from bkctl.spark import functions as F

So a question has one definition for both engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.functions import *  # noqa: F403

_chosen: ModuleType | None = None


@contextmanager
def chosen(module: ModuleType) -> Iterator[None]:
    """Let jobs use the functions of `module` inside the block."""
    global _chosen
    before, _chosen = _chosen, module
    try:
        yield
    finally:
        _chosen = before


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = _chosen
        if module is None:
            from pyspark.sql import functions as module
        return getattr(module, name)
