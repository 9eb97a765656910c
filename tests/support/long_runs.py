"""Lengths of tests: short, or long with BKCTL_TEST_LONG."""

from __future__ import annotations

import os

IS_LONG = bool(os.environ.get("BKCTL_TEST_LONG"))


def seeds(short: int, long: int) -> list[int]:
    """Return the seeds in BKCTL_TEST_SEEDS (`7,8`), or else those from 1 to `short`, of a long run to `long`."""
    chosen = os.environ.get("BKCTL_TEST_SEEDS")
    return [int(each) for each in chosen.split(",")] if chosen else list(range(1, (long if IS_LONG else short) + 1))
