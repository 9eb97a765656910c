"""RepairFindings of a repair, and the type of its progress callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bkctl.errors import BkctlError

#: Called with the bytes (or entries) that were processed since the last call.
Progress = Callable[[int], None]


class DamagedFile(NamedTuple):
    """A file that could not be read to its end, and the error. A repair uses the records before the damage."""

    path: Path
    error: BkctlError


@dataclass(slots=True)
class RepairFindings:
    """The findings of a repair besides its result: damaged files, and notes for the operator."""

    damage: list[DamagedFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
