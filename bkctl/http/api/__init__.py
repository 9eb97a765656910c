"""The endpoints of the REST API: of one bookie (a gateway forwards them), and of a cluster."""

from __future__ import annotations

from typing import Final

from bkctl.http.api import bookies, files, garbage, ledgers, recovery, settings, state
from bkctl.http.endpoints import ApiEndpoint

BOOKIE: Final[tuple[ApiEndpoint, ...]] = (
    *settings.ENDPOINTS,
    *state.ENDPOINTS,
    *files.ENDPOINTS,
    *garbage.ENDPOINTS,
)
#: Every bookie answers these, and a gateway.
CLUSTER: Final[tuple[ApiEndpoint, ...]] = (*ledgers.ENDPOINTS, *bookies.ENDPOINTS, *recovery.ENDPOINTS)
