"""The progress file of a conversion between index files and the databases of DbLedgerStorage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from bkctl.disk import Files
from bkctl.errors import Conflict, Corrupt
from bkctl.formats.names import CONVERSION_NAME, UNFINISHED_SUFFIX
from bkctl.ids import LedgerId

DB: Final = "db"
INTERLEAVED: Final = "interleaved"
_STAMP: Final = re.compile(r"[0-9TZ-]{1,40}", re.ASCII)
_QUALIFIED_NAME: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


class ConversionState(NamedTuple):
    """The progress file of a conversion to `to`.

    `stamp` is the time in the names of its backups, `fingerprint` the state of the bookie's files at its start. `after`
    is the qualified name of the last ledger on disk, `number` its directory. `swapping`: the new index is complete, and
    `counts` has the ledgers and entries of each directory.
    """

    to: str
    stamp: str
    fingerprint: str
    after: str | None = None
    number: int = 0
    swapping: bool = False
    counts: tuple[tuple[int, int], ...] = ()

    def has(self, ledger: LedgerId, number: int) -> bool:
        """Return True if the ledger is on disk. Ledgers come directory by directory, scoped ledgers last."""
        if self.after is None:
            return False
        last = LedgerId.from_value(int(self.after, 16))
        return (ledger.is_scoped, number, ledger) <= (last.is_scoped, self.number, last)

    @classmethod
    def read(cls, path: Path) -> ConversionState | None:
        """Return the state in `path`; None if the file is missing. Raises Corrupt."""
        try:
            state = cls(**json.loads(path.read_bytes()))
            if not state._is_sound():
                raise ValueError("a value has a type that no conversion writes")
            return state
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, RecursionError) as error:
            raise Corrupt(
                f"{path} is not a progress file of a conversion",
                hint=f"if no conversion was in its last step, remove it and all *{UNFINISHED_SUFFIX}",
            ) from error

    def _is_sound(self) -> bool:
        """Return True if every value has a type that `write` writes."""
        to, stamp, fingerprint, after, number, swapping, counts = cast("tuple[Any, ...]", self)
        return (
            to in (DB, INTERLEAVED)
            and isinstance(stamp, str)
            and _STAMP.fullmatch(stamp) is not None
            and isinstance(fingerprint, str)
            and (after is None or (isinstance(after, str) and _QUALIFIED_NAME.fullmatch(after) is not None))
            and type(number) is int
            and type(swapping) is bool
            and isinstance(counts, list | tuple)
            and all(isinstance(row, list) and [type(count) for count in row] == [int, int] for row in counts)
        )

    def write(self, path: Path, files: Files) -> None:
        files.replace(path, json.dumps(self._asdict()).encode())


def check_conversion(index_directory: Path) -> None:
    """Refuse an index that is partly one storage class's and partly the other's.

    Raises Conflict if a conversion stopped in its last step in the first `current` directory, Corrupt if its progress
    file is damaged.
    """
    state = ConversionState.read(index_directory / CONVERSION_NAME)
    if state is not None and state.swapping:
        raise Conflict(
            f"The conversion to {state.to} in {index_directory} is not finished",
            hint=f"'bkctl bookie convert --to {state.to}' finishes it",
        )
