"""Installed as `pyspark_bkctl_journal`: lets PySpark find `bookkeeper.journal`, without a call of `register`."""

from contextlib import suppress

# PySpark imports this in every session, with releases that bkctl does not support, too.
with suppress(ImportError):
    from bkctl.spark.sources.records import JournalSource as DefaultSource  # noqa: F401
