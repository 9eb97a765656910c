"""Installed as `pyspark_bkctl_ledger`: lets PySpark find `bookkeeper.ledger`, without a call of `register`."""

from contextlib import suppress

# PySpark imports this in every session, with releases that bkctl does not support, too.
with suppress(ImportError):
    from bkctl.spark.sources.ledger_source import LedgerSource as DefaultSource  # noqa: F401
