"""The fake bookies and the event loop of the client's tests."""

from __future__ import annotations

from client.conftest import fake_cluster, run

__all__ = ["fake_cluster", "run"]
