"""Readers of a bookie's files, dead or running: journals, entry logs, indexes, databases."""
