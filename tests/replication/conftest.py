"""The fake bookies and the event loop of the client's tests."""

from __future__ import annotations

import random

import pytest
from client.conftest import fake_cluster, nothing_left_behind, pytest_pycollect_makeitem, run
from support.waiting import LIMIT_S

__all__ = ["fake_cluster", "nothing_left_behind", "pytest_pycollect_makeitem", "run"]


@pytest.fixture(autouse=True)
def _ensembles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ensembles are chosen alike in each run."""
    chosen = random.Random(8)
    monkeypatch.setattr("bkctl.client.ensemble.random.SystemRandom", lambda: chosen)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine no fake bookie seems mute."""
    monkeypatch.setattr("bkctl.replication.replica_reads.LIST_TIMEOUT_S", LIMIT_S)
