"""The place of facts: a directory on any of Arrow's file systems, written so that no reader sees half of anything.

    URI/v1/<table>/<bookie>/<part>.parquet      the rows; a log has parts of its own in `records` and `evidence`
    URI/v1/parts/<bookie>-<number>.parquet      the parts that are current; the highest number counts
    URI/v1/_pieces/<bookie>/<log>/…             rows of one log, from which the next extract makes its tables

A part appears under its name once it is complete. Nothing that a reader may use changes: an extract adds parts, then a
list of parts with the next number, and only then removes what was superseded some time ago.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.redaction import without_user_info
from bkctl.spark.facts.tables import ROW_GROUP_ROWS, VERSION, arrow_schema, conform

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset

with suppress(ImportError):  # `_file_system` says that it is not installed.
    import pyarrow as pa
    from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

#: Bytes of rows that wait for a row group at most.
_BUFFER_SIZE_BYTES: Final = 128 << 20
_LIST_NAME: Final = re.compile(r"(?P<bookie>.+)-(?P<number>[0-9]{1,18})\.parquet", re.ASCII)
_PLAIN_BYTES: Final = frozenset(f"{ascii_letters}{digits}.-".encode())
_HINT: Final = "create them with 'bkctl pipeline extract'"


class StoredFile(NamedTuple):
    """A file below the version's directory, and when it was written last (None: unknown)."""

    path: str
    mtime: datetime | None


class PartList(NamedTuple):
    """The parts of one bookie: rows of the table `parts`."""

    rows: list[dict[str, Any]]

    @property
    def bookie_id(self) -> str:
        return str(self.rows[0]["bookieId"])

    @property
    def started_at(self) -> datetime:
        """Return the start of the extract that wrote this list."""
        started_at: datetime = max(self.rows, key=lambda row: row["supersededAt"] is None)["startedAt"]
        return started_at

    def parts(self, table: str) -> list[str]:
        """Return the current parts of `table`."""
        return [row["part"] for row in self.rows if row["table"] == table and row["supersededAt"] is None]


class FactsStore:
    """The facts below a path or URI: `file://`, or a file system of Arrow (`s3://`, `hdfs://`, `gs://`).

    Raises BkctlError if PyArrow is not installed or the file system cannot be used, UsageError for an unknown scheme.
    """

    def __init__(self, uri: str) -> None:
        #: As messages may show it: `s3://` may have keys in it.
        self.uri = without_user_info(uri, "***")
        self._arrow, root = _file_system(uri)
        self._root = f"{root.rstrip('/')}/v{VERSION}"
        self._base = f"file://{Path(uri).absolute()}"
        if "://" in uri:
            self._base = without_user_info(uri.partition("?")[0], "").replace("://@", "://").rstrip("/")

    def spark_path(self, path: str) -> str:
        """Return the URI of a file for Spark, which knows `s3://` as Hadoop's `s3a://`."""
        base = f"s3a{self._base[2:]}" if self._base.startswith("s3://") else self._base
        return f"{base}/v{VERSION}/{path}"

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, table: str, path: str, columns: list[str] | None = None) -> pa.Table:
        """Return the rows of one Parquet file of `table`; columns that it lacks are null. Raises NotFound."""
        found = self.dataset(table, [path])
        with self._failures("read"):
            return found.to_table(columns=columns)

    def dataset(self, table: str, paths: Iterable[str]) -> Dataset:
        """Return the rows of a table's Parquet files, to be read in parts. Raises NotFound."""
        import pyarrow.dataset  # A quarter of a second, which jobs without facts do not spend.

        files = [f"{self._root}/{path}" for path in paths]
        with self._failures("read"):
            return pyarrow.dataset.dataset(files, arrow_schema(table), format="parquet", filesystem=self._arrow)

    def files(self, directory: str) -> list[StoredFile]:
        """Return the files in a directory and below it; none if it does not exist."""
        with self._failures("read"):
            found = self._arrow.get_file_info(
                FileSelector(f"{self._root}/{directory}", allow_not_found=True, recursive=True)
            )
        prefix = len(self._root) + 1
        return [StoredFile(each.path[prefix:], each.mtime) for each in found if each.type == FileType.File]

    def part_lists(self) -> list[PartList]:
        """Return the newest list of parts of each bookie, in order of bookie ids. Raises NotFound without any."""
        found = self.numbers()
        if not found:
            raise NotFound(f"{self.uri} has no facts of version {VERSION}", hint=_HINT)
        lists = [self.part_list(bookie, max(numbers)) for bookie, numbers in found.items()]
        return sorted(lists, key=lambda each: each.bookie_id)

    def part_list(self, bookie: str, number: int) -> PartList:
        """Return one list of parts. Raises NotFound, and BkctlError for one that no extract can have written."""
        path = list_path(bookie, number)
        rows = self.read("parts", path).to_pylist()
        if not rows or not all(_is_part_of(bookie, row) for row in rows):
            raise BkctlError(
                f"{self.uri}/v{VERSION}/{path} is not a list of the parts of one bookie",
                hint="delete this file, and run 'bkctl pipeline extract' for the bookie again",
            )
        return PartList(rows)

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of each bookie's lists of parts."""
        found: dict[str, list[int]] = {}
        for file in self.files("parts"):
            if match := _LIST_NAME.fullmatch(file.path.removeprefix("parts/")):
                found.setdefault(match["bookie"], []).append(int(match["number"]))
        return found

    # --- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def new_part(self, table: str, path: str, *, if_empty: bool = True, **constants: Any) -> Iterator[PartWriter]:
        """Yield a writer of a Parquet file of `table`, which appears at `path` when the block ends without an error.

        Columns that rows lack are `constants`, or null.
        Without `if_empty` a file without rows appears only in place of an earlier one, which lists of parts may name.
        """
        target = f"{self._root}/{path}"
        directory = target.rpartition("/")[0]
        temporary = f"{directory}/_{uuid.uuid4().hex}.tmp"
        with self._failures("write"):
            self._arrow.create_dir(directory, recursive=True)
            stream = self._arrow.open_output_stream(temporary)
        writer = PartWriter(stream, table, {**constants, "part": path})
        try:
            yield writer
            with self._failures("write"):
                writer.close()
                stream.close()
                if writer.row_count or if_empty or self._exists(path):
                    # Other stores do that when a stream is closed.
                    if self._arrow.type_name == "local":
                        with open(temporary, "rb") as file:
                            os.fsync(file.fileno())
                    self._arrow.move(temporary, target)
                else:
                    self._arrow.delete_file(temporary)
        except BaseException:
            for end in (writer.close, stream.close, partial(self._arrow.delete_file, temporary)):
                with suppress(Exception):
                    end()
            raise

    def delete(self, path: str) -> None:
        """Delete a file; a missing file is accepted."""
        with self._failures("write"):
            if self._exists(path):
                self._arrow.delete_file(f"{self._root}/{path}")

    def _exists(self, path: str) -> bool:
        return bool(self._arrow.get_file_info(f"{self._root}/{path}").type != FileType.NotFound)

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"Cannot {what} facts at {self.uri}: {error}") from error
        except (OSError, pa.ArrowException) as error:
            raise BkctlError(f"Cannot {what} facts at {self.uri}: {error}") from error


class PartWriter:
    """Writes rows of one table as Parquet, in row groups of a bounded size."""

    def __init__(self, stream: Any, table: str, constants: Mapping[str, Any]) -> None:
        import pyarrow.parquet

        self._table, self._constants = table, constants
        self._writer = pyarrow.parquet.ParquetWriter(stream, arrow_schema(table), compression="zstd")
        self._rows: list[pa.Table] = []
        self._count = self._size_bytes = 0
        self.row_count = 0

    def add(self, rows: pa.RecordBatch | pa.Table, **constants: Any) -> None:
        """Add rows that have some of the table's columns; `constants` go before the constants of the part."""
        if rows.num_rows:
            self._rows.append(conform(rows, self._table, {**self._constants, **constants}))
            self._count += rows.num_rows
            self._size_bytes += self._rows[-1].nbytes
            self.row_count += rows.num_rows
        if self._count >= ROW_GROUP_ROWS or self._size_bytes >= _BUFFER_SIZE_BYTES:
            self._flush()

    def add_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows with ids as numbers or not at all."""
        found = list(rows)
        if found:
            names = {name for row in found for name in row}
            fields = [field for field in arrow_schema(self._table) if field.name in names]
            self.add(pa.Table.from_pylist(found, pa.schema(fields)))

    def close(self) -> None:
        """Write the remaining rows and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.concat_tables(self._rows), row_group_size=ROW_GROUP_ROWS)
        self._rows, self._count, self._size_bytes = [], 0, 0


def directory_name(bookie_id: str) -> str:
    """Return the name of a bookie's directories: its id with every byte but letters, digits, `.` and `-` escaped."""
    return "bookie-" + "".join(chr(byte) if byte in _PLAIN_BYTES else f"_{byte:02X}" for byte in bookie_id.encode())


def _is_part_of(bookie: str, row: dict[str, Any]) -> bool:
    """Return whether a row of `parts` is complete, and names a file of its table and this bookie."""
    required = (row["bookieId"], row["table"], row["part"], row["startedAt"])
    if None in required or directory_name(row["bookieId"]) != bookie:
        return False
    part: str = row["part"]
    return part.startswith(f"{row['table']}/{bookie}/") and ".." not in part.split("/")


def list_path(bookie: str, number: int) -> str:
    """Return the path of a bookie's list of parts."""
    return f"parts/{bookie}-{number:09d}.parquet"


def _file_system(uri: str) -> tuple[Any, str]:
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise BkctlError(
            "Facts are Parquet, and pyarrow is not installed", hint="pip install 'bkctl[facts]'"
        ) from error
    if "://" not in uri:
        return LocalFileSystem(), str(Path(uri).absolute())
    shown = without_user_info(uri, "***")
    try:
        files, root = FileSystem.from_uri(uri)
    except (ArrowException, ImportError, ValueError) as error:
        raise UsageError(
            f"{shown} cannot be used for facts: {error}", hint="give a path, or a URI: file://, s3://, hdfs://, gs://"
        ) from error
    except OSError as error:
        raise BkctlError(f"Cannot reach {shown}: {error}") from error
    return files, root
