"""Repairs of a bookie's files: rebuilt indexes, conversions, downgrades, extraction."""
