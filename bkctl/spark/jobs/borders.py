"""Offsets of records at which large files are cut, found by a stage of tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError
from bkctl.files.directories import BookieFile, FileKind
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.spark.jobs.frames import rows_in_tasks, task_slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Bytes between two borders.
PART_SIZE_BYTES: Final = 128 << 20
_BORDERS: Final = "file string, offset bigint"


def borders(spark: SparkSession, files: Iterable[BookieFile], size_bytes: int = PART_SIZE_BYTES) -> dict[str, str]:
    """Return the option `borders` for entry logs or journals; no option where there are files for all cores.

    A file of less than two parts of `size_bytes` is not cut. Finding borders reads a file once more.
    """
    found = list(files)
    large = [(str(file.path), file.kind is FileKind.JOURNAL) for file in found if file.size >= 2 * size_bytes]
    if not large or len(found) >= task_slots(spark):
        return {}
    offsets: dict[str, list[int]] = {}
    for row in rows_in_tasks(spark, large, partial(find_borders, size_bytes), _BORDERS).collect():
        offsets.setdefault(row.file, []).append(row.offset)
    return {"borders": json.dumps({file: sorted(of_file) for file, of_file in offsets.items()})} if offsets else {}


def find_borders(size_bytes: int, file: tuple[str, bool]) -> Iterator[dict[str, Any]]:
    """Yield the borders of a file: records at least `size_bytes` apart, up to its first damage."""
    path, is_journal = file
    try:
        with JournalReader.open(path) if is_journal else EntryLogReader.open(path) as reader:
            border = None
            for batch in reader.batches():
                offsets = batch.offsets
                border = offsets[0] + size_bytes if border is None else border
                for offset in offsets if offsets[-1] >= border else ():
                    if offset >= border:
                        yield {"file": path, "offset": offset}
                        border = offset + size_bytes
    except BkctlError:
        return  # The task that reads the last part reports the damage.
