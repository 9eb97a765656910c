"""The base classes of data sources: PySpark's, or plain ones where PySpark is not installed.

The local engine reads sources without Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
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


__all__ = ["DataSource", "DataSourceReader", "InputPartition"]
