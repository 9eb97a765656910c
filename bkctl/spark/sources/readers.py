"""The part that sources of tables share: base classes, conditions, mode, and filters that Spark pushes down on request.

The base classes are PySpark's, or plain ones where PySpark is not installed: the local engine reads sources without it.

Spark (4.2, 4.3: PythonDataSourceV2.setReadInfo) keeps the plan of a Python data source with the DataFrame instead of
the query. So filters that one query pushed down also limit later queries without filters, and other branches of the
same query, which then lack rows. Therefore a source takes filters only with the option `pushdown` = `true`, for a
DataFrame that answers one query. Without it Spark applies all filters itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from bkctl.spark.sources.columns import DAMAGE, checked_schema, source_schema
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.options import Mode, SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSource as DataSource
    from pyspark.sql.datasource import DataSourceReader, Filter
    from pyspark.sql.datasource import InputPartition as InputPartition
    from pyspark.sql.types import StructType
else:
    try:
        from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    except ModuleNotFoundError:

        class DataSource:
            """A source with its options."""

            def __init__(self, options: dict[str, str]) -> None:
                self.options = options

        class DataSourceReader:
            """Plans and reads a source."""

        class InputPartition:
            """A part of a plan."""

            def __init__(self, value: Any = None) -> None:
                self.value = value


#: Options of every table.
QUERY_OPTIONS: Final = ("mode", "columns", "ledger", "ledgerScopeId", "pushdown")


class QueryReader(DataSourceReader):
    """A reader of one query with the columns of `schema`; a subclass names the columns whose filters it takes."""

    #: The name for `spark.read.format`, and the options beside `path` and `paths`.
    source: str
    options: Collection[str]
    #: String and integer columns beside the ids of ledgers, and columns of which no row of data has a null.
    texts: Collection[str] = ()
    integers: Collection[str] = ()
    never_null: Collection[str] = ()

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._conditions, self._mode = Conditions.of(options), options.mode()
        default, on_request = self.columns(options)
        self._schema: pa.Schema = checked_schema(self.source, schema, (*default, *on_request, DAMAGE))
        if options.flag("pushdown"):
            # As a class's method it would need Spark's filterPushdown.enabled in every session.
            self.pushFilters = self.take_filters  # type: ignore[method-assign]

    @classmethod
    def columns(cls, options: SourceOptions) -> tuple[Sequence[str], Sequence[str]]:
        """Return the default columns, and the columns that come only when the option `columns` names them."""
        raise AssertionError

    def take_filters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that the source can apply; return the filters that Spark must apply.

        In mode permissive these are all: rows of damage have nulls, and Spark drops those that a filter excludes.
        """
        left = self._conditions.push(filters, self.texts, self.integers, self.never_null)
        return list(filters) if self._mode is Mode.PERMISSIVE else left


class TableSource(DataSource):
    """The data source of a reader. Raises UsageError for options that do not parse."""

    reads: ClassVar[type[QueryReader]]

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._checked = SourceOptions(self.name(), options, self.reads.options)

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return cls.reads.source

    def schema(self) -> str:
        """Return the columns that the options ask for, and `damage` in mode permissive."""
        return source_schema(self._checked, *self.reads.columns(self._checked))

    def reader(self, schema: StructType) -> QueryReader:
        """Return the reader of the columns of `schema`."""
        return self.reads(self._checked, schema)
