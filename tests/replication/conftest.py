"""The fake bookies and the event loop of the client's tests."""

from __future__ import annotations

import pytest
from client.conftest import fake_cluster, run

__all__ = ["fake_cluster", "run"]


@pytest.fixture(autouse=True)
def _sessions_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fake bookie's registration ends because the machine is busy: here that means that a bookie is lost."""
    monkeypatch.setattr("bkctl.metadata.sqlite.SESSION_EXPIRY_MS", 600_000)
