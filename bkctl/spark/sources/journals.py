"""`bookkeeper.journal`: the records of journals, as `bkctl journal read` prints them.

Options are the same as of `bookkeeper.entrylog`. `masterKey` is a column on request, and a secret. A journal may end
inside a record, as when its bookie stopped; a replay ignores that record, and so does this source. Any other end is
damage.
"""

from __future__ import annotations

from collections.abc import Iterator

from bkctl.files.journal import JournalReader
from bkctl.files.scan import RecordBatch
from bkctl.formats.journal import journal_id_of
from bkctl.formats.record import RecordType
from bkctl.spark.sources.places import Place, resolve
from bkctl.spark.sources.pushdown import PathSource
from bkctl.spark.sources.records import RecordReader


class JournalRecords(RecordReader):
    """Plans and reads journals."""

    id_name = "journalId"
    source = "bookkeeper.journal"
    is_written_in_place = True
    on_request = (*RecordReader.on_request, "masterKey")

    def list_places(self) -> list[Place]:
        return resolve(self._paths, lambda directories: directories.journals(), journal_id_of)

    def read_range(self, path: str, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
        with JournalReader.open(path) as reader:
            yield from reader.batches(start, end, padding=RecordType.PADDING.value in (self._types or ()))


class JournalSource(PathSource):
    """The records of journals. See the module."""

    reads = JournalRecords
