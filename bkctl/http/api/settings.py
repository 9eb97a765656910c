"""Endpoints of a bookie's metrics and settings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from bkctl.bookie.metrics import CONTENT_TYPE
from bkctl.config import BookieConfig, read_properties
from bkctl.errors import BkctlError, UsageError
from bkctl.http.bookie_metrics import metrics_text, process_text
from bkctl.http.endpoints import (
    PREFIX,
    STRING,
    TEXT,
    ApiCall,
    Body,
    Endpoints,
    Value,
    ValueKind,
    json_answer,
    map_of,
    text_answer,
)
from bkctl.redaction import is_secret_name, without_user_info

if TYPE_CHECKING:
    from bkctl.bookie.bookie import Bookie


ENDPOINTS: Final = Endpoints(of_bookie=True)

HIDDEN: Final = "********"

#: Settings that a running bookie reads each time it needs them.
CHANGEABLE: Final = frozenset(
    {
        "diskCheckInterval",
        "diskUsageLwmThreshold",
        "diskUsageThreshold",
        "diskUsageWarnThreshold",
        "flushInterval",
        "majorCompactionInterval",
        "majorCompactionThreshold",
        "maxBatchReadSize",
        "minUsableSizeForEntryLogCreation",
        "minUsableSizeForHighPriorityWrites",
        "minUsableSizeForIndexFileCreation",
        "minorCompactionInterval",
        "minorCompactionThreshold",
        "readOnlyModeOnAnyDiskFullEnabled",
    }
)


@ENDPOINTS.get("/metrics", "The bookie's metrics, Prometheus text 0.0.4.", answer=CONTENT_TYPE, probe=True)
async def metrics(call: ApiCall) -> Response:
    service = call.service
    text = await metrics_text(service.bookie) if service.samples is None else process_text(service.samples())
    return Response(text, media_type=CONTENT_TYPE)


@ENDPOINTS.get(
    f"{PREFIX}/config/server_config", "The bookie's current settings by Java's names, as strings.",
    values=(Value("show_secrets", "Show passwords and tokens too.", ValueKind.BOOLEAN),), answer=map_of(STRING),
)  # fmt: skip
async def server_config(call: ApiCall) -> Response:
    """Return the file's settings, as Apache's server does, and the defaults. Source: ConfigurationService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    settings = await asyncio.to_thread(_settings, config)
    if not call.values.get("show_secrets", False):
        settings = {name: _masked(name, value) for name, value in settings.items()}
    return json_answer(settings)


def _settings(config: BookieConfig) -> dict[str, str]:
    """Return the file's settings, known to us or not, overridden by the current ones."""
    found: dict[str, str] = {}
    if config.conf_path is not None:
        try:
            properties = read_properties(config.conf_path)
        except BkctlError:  # missing or damaged by now; the current settings are known
            pass
        else:
            found = {name: ",".join(properties.list(name)) for name in properties}
    if config.metadata_service_uri is not None:
        found["metadataServiceUri"] = config.metadata_service_uri
    found["ledgerDirectories"] = ",".join(config.ledger_directories)
    journals = "journalDirectory" if len(config.journal_directories) == 1 else "journalDirectories"
    found[journals] = ",".join(config.journal_directories)
    if config.index_directories:
        found["indexDirectories"] = ",".join(config.index_directories)
    found["ledgerStorageClass"] = config.ledger_storage_class
    for name, value in config.settings().items():
        if name not in found or not _is_current(config, name, found[name]):
            found[name] = value
    found["ledgerScopeIdDefault"] = "0"
    found["ledgerIdFormat"] = "decimal in scope 0, else the ledger qualified name"
    return found


def _is_current(config: BookieConfig, name: str, text: str) -> bool:
    """Return True if the file's text is the current value, such as 1e3 for 1000.0; the file may have changed."""
    try:
        return config.with_settings({name: text}) == config
    except UsageError:
        return False


def _masked(name: str, value: str) -> str:
    if is_secret_name(name) and value:
        return HIDDEN
    return without_user_info(value, HIDDEN)


@ENDPOINTS.put(
    f"{PREFIX}/config/server_config",
    f"Change settings until the bookie stops. Changeable settings: "
    f"{', '.join(sorted(CHANGEABLE))}.",
    body=Body(open_values="names of settings and their values"), answer=TEXT,
)  # fmt: skip
async def set_server_config(call: ApiCall) -> Response:
    """Change settings that take effect at once. Source: ConfigurationService, which accepts any name without effect."""
    settings = {}
    for name, value in call.body.items():
        if name not in CHANGEABLE:
            raise UsageError(
                f"{name} cannot be changed while the bookie runs",
                hint=f"changeable settings: {', '.join(sorted(CHANGEABLE))}",
            )
        if not isinstance(value, str | int | float):
            raise UsageError(f"{name} must be a string, a number, true or false")
        settings[name] = str(value).lower() if isinstance(value, bool) else str(value)

    def change(bookie: Bookie) -> None:
        bookie.reconfigure(bookie.config.with_settings(settings))

    await call.service.bookie.ask(change)
    return text_answer("Success set server config.")
