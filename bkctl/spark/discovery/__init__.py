"""Installed as `pyspark_bkctl_NAME` for each source: PySpark finds `bookkeeper.NAME` without a call of `register`."""

from contextlib import suppress

# PySpark imports this in every session, with releases that bkctl does not support, too.
with suppress(ImportError):
    from bkctl.spark.sources import source_named

    DefaultSource = source_named(__name__.replace("pyspark_bkctl_", "bookkeeper."))
