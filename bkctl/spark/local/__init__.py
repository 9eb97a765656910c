"""The local engine: PySpark's DataFrames, as far as jobs use them, on DuckDB in this process."""
