"""The base class of data sources: options, columns, conditions, mode, and filters that Spark pushes down on request.

The base classes are PySpark's, or plain ones where PySpark is not installed: the local engine reads sources without it.

Spark (4.2, 4.3: PythonDataSourceV2.setReadInfo) keeps the plan of a Python data source with the DataFrame instead of
the query. So filters that one query pushed down also limit later queries without filters, and other branches of the
same query, which then lack rows. Therefore a source takes filters only with the option `pushdown` = `true`, for a
DataFrame that answers one query. Without it Spark applies all filters itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from bkctl.errors import UsageError
from bkctl.spark.sources.columns import DAMAGE, TYPES, arrow_schema_of, ddl
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


class TableSource(DataSource, DataSourceReader):
    """A data source, and the reader of one query of its columns. Raises UsageError for options that do not parse."""

    #: The name for `spark.read.format`, and the options beside `path` and `paths`.
    source: ClassVar[str]
    known: ClassVar[Collection[str]]
    #: The default columns, and the columns that come only when the option `columns` names them.
    columns: Sequence[str]
    on_request: Sequence[str] = ()
    #: String and integer columns beside the ids of ledgers, and columns of which no row of data has a null.
    texts: Collection[str] = ()
    integers: Collection[str] = ()
    never_null: Collection[str] = ()
    _schema: pa.Schema

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.checked = SourceOptions(self.source, options, self.known)
        self._conditions, self._mode = Conditions.of(self.checked), self.checked.choice("mode", Mode.FAILFAST)
        self._takes_filters = self.checked.flag("pushdown")

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return cls.source

    def schema(self) -> str:
        """Return the columns that the options ask for, and `damage` in mode permissive."""
        columns = self.checked.columns(self.columns, self.on_request)
        return ddl([*columns, DAMAGE] if self._mode is Mode.PERMISSIVE else columns)

    def reader(self, schema: StructType | pa.Schema) -> Self:
        """Return this source for the columns of `schema`; the local engine passes the source's own, for Arrow.

        Raises UsageError if `schema` has a column or type that the source does not have.
        """
        known = (*self.columns, *self.on_request, DAMAGE)
        for field in getattr(schema, "fields", ()):
            kind = field.dataType.simpleString()
            if field.name not in known or kind != TYPES[field.name]:
                raise UsageError(
                    f"{self.source} has no column {field.name} of type {kind}", hint=f"it has {ddl(known)}"
                )
        self._schema = arrow_schema_of(schema)
        return self

    @property
    def pushFilters(self) -> Any:
        """Return `take_filters` on request: as a method it would need Spark's filterPushdown.enabled everywhere."""
        return self.take_filters if self._takes_filters else super().pushFilters

    def take_filters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that the source can apply; return the filters that Spark must apply.

        In mode permissive these are all: rows of damage have nulls, and Spark drops those that a filter excludes.
        """
        left = self._conditions.push(filters, self.texts, self.integers, self.never_null)
        return list(filters) if self._mode is Mode.PERMISSIVE else left
