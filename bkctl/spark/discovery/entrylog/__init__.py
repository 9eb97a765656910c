"""Installed as `pyspark_bkctl_entrylog`: lets PySpark find `bookkeeper.entrylog`, without a call of `register`."""

from contextlib import suppress

# PySpark imports this in every session, with releases that bkctl does not support, too.
with suppress(ImportError):
    from bkctl.spark.sources.records import EntryLogSource as DefaultSource  # noqa: F401
