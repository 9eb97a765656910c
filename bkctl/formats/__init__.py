"""Bytes and values: every on-disk and in-metadata format, both directions, without I/O."""
