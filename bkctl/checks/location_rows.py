"""The rows of an index, sorted by location in bounded memory: a check reads them beside the entry logs. Needs NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final

from bkctl.ids import U64_MAX, LedgerId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.uint64]
    Columns = tuple[Column, Column, Column]

#: Rows that are sorted together in memory; a larger index is sorted run by run in a temporary file.
RUN_ROWS: Final = 1 << 20


class LedgerNumbers:
    """The number of each ledger in rows: its index in `ledgers`."""

    def __init__(self) -> None:
        self.ledgers: list[LedgerId] = []
        self._numbers: dict[LedgerId, int] = {}

    def number(self, ledger: LedgerId) -> int:
        """Return the ledger's number; assign the next number to a new ledger."""
        number = self._numbers.get(ledger)
        if number is None:
            number = self._numbers[ledger] = len(self.ledgers)
            self.ledgers.append(ledger)
        return number

    def find(self, ledger: LedgerId) -> int | None:
        """Return the ledger's number; None if it has none."""
        return self._numbers.get(ledger)


class LocationRows:
    """Rows (location, entry id, ledger number), added in any order and read in the order of their locations.

    Rows are sorted in memory, RUN_ROWS at a time. Full runs are stored in a temporary file. Use as a context manager.
    """

    def __init__(self) -> None:
        self.numbers = LedgerNumbers()
        self.count = 0
        self._chunks: list[Columns] = []
        self._chunked = 0
        self._runs: list[Columns] = []
        self._stack = ExitStack()
        self._file: Any = None

    def __enter__(self) -> LocationRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.clear()
        self._stack.close()

    def add(self, locations: Column, entries: Column, numbers: Column) -> None:
        """Add rows: three columns of one length."""
        self._chunks.append((locations, entries, numbers))
        self._chunked += len(locations)
        self.count += len(locations)
        if self._chunked >= RUN_ROWS:
            self._sort(to_file=True)

    def _sort(self, *, to_file: bool) -> None:
        import numpy as np

        if not self._chunks:
            return
        columns = [np.concatenate(column) for column in zip(*self._chunks, strict=True)]
        self._chunks, self._chunked = [], 0
        order = np.argsort(columns[0], kind="stable")
        columns = [column[order] for column in columns]
        if to_file:
            if self._file is None:
                self._file = self._stack.enter_context(TemporaryFile(prefix="bkctl-check-"))  # noqa: SIM115 (closed by the stack)
            columns = [self._write(column) for column in columns]
        self._runs.append((columns[0], columns[1], columns[2]))

    def _write(self, column: Column) -> Column:
        import numpy as np

        at = self._file.seek(0, 2)
        self._file.write(column.data)
        self._file.flush()
        return np.memmap(self._file, np.uint64, "r", at, column.shape)

    def has_any(self, first: int, last: int) -> bool:
        """Return True if any row has a location from `first` to `last`, both included."""
        return next(self.windows(first, last), None) is not None

    def windows(self, first: int, last: int) -> Iterator[Columns]:
        """Yield the rows with locations `first` to `last`, both included, in order: up to RUN_ROWS or so at a time."""
        import numpy as np

        if last < first:
            return
        self._sort(to_file=False)
        begins = [int(np.searchsorted(run[0], np.uint64(first))) for run in self._runs]
        ends = [int(np.searchsorted(run[0], np.uint64(last), "right")) for run in self._runs]
        share = max(1, RUN_ROWS // max(1, len(self._runs)))
        while any(begin < end for begin, end in zip(begins, ends, strict=True)):
            # Take the rows up to the lowest location at which the share of any run ends.
            limit = min(
                (
                    int(run[0][begin + share - 1])
                    for run, begin, end in zip(self._runs, begins, ends, strict=True)
                    if begin + share < end
                ),
                default=last,
            )
            stops = [
                max(begin, min(end, int(np.searchsorted(run[0], np.uint64(limit), "right"))))
                for run, begin, end in zip(self._runs, begins, ends, strict=True)
            ]
            parts = [
                tuple(column[begin:stop] for column in run)
                for run, begin, stop in zip(self._runs, begins, stops, strict=True)
                if stop > begin
            ]
            begins = stops
            if len(parts) == 1:
                yield parts[0][0], parts[0][1], parts[0][2]
            elif parts:
                locations, entries, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
                order = np.argsort(locations, kind="stable")
                yield locations[order], entries[order], numbers[order]


def choose_sample(ledger: LedgerId, entries: Column, share: float, seed: int) -> Any:
    """Return a bool for each entry, True if it is in the sample. The same seed chooses the same entries."""
    import numpy as np

    mixed = (ledger.value ^ ledger.scope_id ^ seed * 0x9E3779B97F4A7C15) & U64_MAX
    with np.errstate(over="ignore"):
        # splitmix64 chooses neighbouring entries independently of each other.
        value = entries * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mixed)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        value = value ^ value >> np.uint64(31)
    return value < np.uint64(min(int(share * 2.0**64), U64_MAX))
