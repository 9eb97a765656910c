"""Checks of a bookie's files: entry logs, indexes, digests, garbage."""
