"""Endpoints of a bookie's metrics and settings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from bkctl.bookie.metrics import CONTENT_TYPE
from bkctl.config import BookieConfig, read_properties
from bkctl.errors import BkctlError, UsageError
from bkctl.http.bookie_metrics import metrics_text
from bkctl.http.endpoints import (
    PREFIX,
    STRING,
    TEXT,
    Body,
    Call,
    Endpoints,
    Kind,
    Value,
    json_answer,
    map_of,
    text_answer,
)
from bkctl.redaction import is_secret_name, without_user_info

if TYPE_CHECKING:
    from bkctl.bookie.server import Bookie


ENDPOINTS: Final = Endpoints(of_bookie=True)

HIDDEN: Final = "********"

#: Settings that a running bookie reads anew each time it needs them.
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
async def metrics(call: Call) -> Response:
    bookie = call.service.bookie
    text = await metrics_text(bookie)
    return Response(text, media_type=CONTENT_TYPE)


@ENDPOINTS.get(
    f"{PREFIX}/config/server_config", "The bookie's settings by Java's names, as strings: what holds now.",
    values=(Value("show_secrets", "Show passwords and tokens too.", Kind.BOOLEAN),), answer=map_of(STRING),
)  # fmt: skip
async def server_config(call: Call) -> Response:
    """Apache's server has what the file sets; here the defaults are added. Source: ConfigurationService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    settings = await asyncio.to_thread(_settings, config)
    if not call.values.get("show_secrets", False):
        settings = {name: _without_secrets(name, value) for name, value in settings.items()}
    return json_answer(settings)


def _settings(config: BookieConfig) -> dict[str, str]:
    """The file's settings, known to us or not, and above them what holds."""
    found: dict[str, str] = {}
    if config.conf_path is not None:
        try:
            properties = read_properties(config.conf_path)
        except BkctlError:  # it is gone or damaged by now; what holds is known all the same
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
        if name not in found or not _says_the_same(config, name, found[name]):
            found[name] = value
    found["ledgerScopeIdDefault"] = "0"
    found["ledgerIdFormat"] = "decimal in scope 0, else the ledger qualified name"
    return found


def _says_the_same(config: BookieConfig, name: str, text: str) -> bool:
    """Whether the file's text stands for what holds, 1e3 for 1000.0 and so on; the file may be another one by now."""
    try:
        return config.with_settings({name: text}) == config
    except UsageError:
        return False


def _without_secrets(name: str, value: str) -> str:
    if is_secret_name(name) and value:
        return HIDDEN
    return without_user_info(value, HIDDEN)


@ENDPOINTS.put(
    f"{PREFIX}/config/server_config",
    f"Change settings while the bookie runs; it forgets them when it stops. Those that can be changed: "
    f"{', '.join(sorted(CHANGEABLE))}.",
    body=Body(open_values="names of settings and their values"), answer=TEXT,
)  # fmt: skip
async def set_server_config(call: Call) -> Response:
    """Source: ConfigurationService, which takes any name and changes nothing but what it shows."""
    settings = {}
    for name, value in (call.body or {}).items():
        if name not in CHANGEABLE:
            raise UsageError(
                f"{name} cannot be changed while the bookie runs",
                hint=f"those that can be changed are {', '.join(sorted(CHANGEABLE))}",
            )
        if not isinstance(value, str | int | float):
            raise UsageError(f"{name} must be a string, a number, true or false")
        settings[name] = str(value).lower() if isinstance(value, bool) else str(value)

    def change(bookie: Bookie) -> None:
        bookie.reconfigure(bookie.config.with_settings(settings))

    await call.service.bookie.ask(change)
    return text_answer("Success set server config.")
