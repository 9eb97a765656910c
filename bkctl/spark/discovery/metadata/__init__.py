"""Installed as `pyspark_bkctl_metadata`: lets PySpark find `bookkeeper.metadata`, without a call of `register`."""

from contextlib import suppress

# PySpark imports this in every session, with releases that bkctl does not support, too.
with suppress(ImportError):
    from bkctl.spark.sources.metadata import MetadataSource as DefaultSource  # noqa: F401
