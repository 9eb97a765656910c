"""Installed as `pyspark_bkctl_index`: lets PySpark find `bookkeeper.index`, without a call of `register`."""

from contextlib import suppress

# PySpark imports this in every session, with releases that bkctl does not support, too.
with suppress(ImportError):
    from bkctl.spark.sources.indexes import IndexSource as DefaultSource  # noqa: F401
