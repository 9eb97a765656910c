"""BookKeeper's files, metadata and ledgers as data sources of Spark, and the jobs over them: the extra `spark`."""
