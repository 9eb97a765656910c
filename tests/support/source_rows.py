"""Data sources without Spark: planned and read in this process, as Spark's workers do it.

A test module that imports this before anything of `bkctl.spark` is skipped where PySpark or PyArrow is not installed.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support import servers

if find_spec("pyspark") is None or find_spec("pyarrow") is None:
    servers.require("spark", "PySpark and PyArrow are not installed: pip install 'bkctl[spark]'", module=True)

from pyspark.sql.datasource import DataSource, Filter
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    StructType,
)

_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "binary": BinaryType(),
    "boolean": BooleanType(),
    "decimal(20,0)": DecimalType(20, 0),
}


def struct_of(ddl: str) -> StructType:
    """The schema that a DDL text of our sources says."""
    found = StructType()
    for name, text in re.findall(r"`(\w+)` (\w+(?:<[^>]*>|\([^)]*\))?)", ddl):
        inner = re.fullmatch(r"struct<(.*)>", text)
        if inner is None:
            found.add(name, _TYPES[text])
        else:
            of_fields = StructType()
            for field in inner[1].split(","):
                of_fields.add(*(each if at == 0 else _TYPES[each] for at, each in enumerate(field.split(":"))))
            found.add(name, of_fields)
    return found


def cuts(size_bytes: int, *paths: Path) -> str:
    """The option `borders` that cuts logs or journals into parts of this size."""
    from bkctl.spark.jobs.bookie_records import find_borders

    return json.dumps(
        {
            str(path): [row["offset"] for row in find_borders(size_bytes, (str(path), path.suffix == ".txn"))]
            for path in paths
        }
    )


class Planned:
    """A source with its options, planned; `left` are the filters that are left to Spark."""

    def __init__(self, source: type[DataSource], filters: Sequence[Filter] = (), **options: object) -> None:
        given = {"pushdown": "true", **options} if filters else options
        made = source({name: str(value) for name, value in given.items()})
        self.schema = struct_of(str(made.schema()))
        self.reader = made.reader(self.schema)
        self.left = list(self.reader.pushFilters(list(filters)))
        self.parts = pickle.loads(pickle.dumps(list(self.reader.partitions())))

    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order of the partitions; each is read by a reader that went over the wire."""
        return [row for part in self.parts for row in self.rows_of(part)]

    def rows_of(self, part: Any) -> list[dict[str, Any]]:
        reader = pickle.loads(pickle.dumps(self.reader))
        found = []
        for batch in reader.read(part):
            assert batch.num_rows > 0
            assert batch.schema.names == self.schema.names
            batch.validate(full=True)
            found += batch.to_pylist()
        return found


def rows_of(source: type[DataSource], filters: Sequence[Filter] = (), **options: object) -> list[dict[str, Any]]:
    """The rows of a source with these options."""
    return Planned(source, filters, **options).rows()
