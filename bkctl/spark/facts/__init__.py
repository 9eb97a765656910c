"""Facts: the contents of bookies' files as Parquet tables, extracted on each bookie's host and read by jobs and SQL."""
