"""The endpoints of the REST API: of one bookie (a gateway forwards them), and of a cluster."""

from __future__ import annotations

from typing import Final

from bkctl.http.api import bookies, files, garbage, ledgers, recovery, settings, state
from bkctl.http.endpoints import ApiEndpoint

ENDPOINTS: Final[tuple[ApiEndpoint, ...]] = tuple(
    endpoint
    for module in (settings, state, files, garbage, ledgers, bookies, recovery)
    for endpoint in module.ENDPOINTS
)
