"""The REST API of one bookie: metrics, settings, state, files, garbage collection. A gateway forwards it to bookies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bkctl.bookie.cookies import configured_directories, stamp_or_verify
from bkctl.bookie.entry_log_collection import MAJOR, MINOR
from bkctl.bookie.metrics import CONTENT_TYPE
from bkctl.client.trials import SANITY_ENTRY_COUNT, sanity_test
from bkctl.config import BookieConfig, camel_case, read_properties
from bkctl.disk import Files
from bkctl.errors import BkctlError, Conflict, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.journals import latest_marks
from bkctl.formats.names import CURRENT, SCOPED_DIRECTORY
from bkctl.http.bookie_metrics import metrics_text, process_text
from bkctl.http.endpoints import (
    BOOLEAN,
    INTEGER,
    PREFIX,
    STRING,
    TEXT,
    ApiCall,
    Body,
    Endpoints,
    Value,
    ValueKind,
    list_of,
    map_of,
    object_of,
    text_answer,
)
from bkctl.http.service import ServiceUnavailable
from bkctl.redaction import is_secret_name, without_user_info

if TYPE_CHECKING:
    from bkctl.bookie.bookie import Bookie
    from bkctl.bookie.garbage_collector import GarbageCollectorThread

ENDPOINTS: Final = Endpoints(of_bookie=True)


# --- metrics and settings ---

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
async def metrics(call: ApiCall) -> str:
    service = call.service
    return await metrics_text(service.bookie) if service.samples is None else process_text(service.samples())


@ENDPOINTS.get(
    f"{PREFIX}/config/server_config", "The bookie's current settings by Java's names, as strings.",
    values=(Value("show_secrets", "Show passwords and tokens too.", ValueKind.BOOLEAN),), answer=map_of(STRING),
)  # fmt: skip
async def server_config(call: ApiCall) -> dict[str, str]:
    """Return the file's settings, as Apache's server does, and the defaults. Source: ConfigurationService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    settings = await asyncio.to_thread(_settings, config)
    if not call.values.get("show_secrets", False):
        settings = {
            name: HIDDEN if is_secret_name(name) and value else without_user_info(value, HIDDEN)
            for name, value in settings.items()
        }
    return settings


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


@ENDPOINTS.put(
    f"{PREFIX}/config/server_config",
    f"Change settings until the bookie stops. Changeable settings: "
    f"{', '.join(sorted(CHANGEABLE))}.",
    body=Body(open_values="names of settings and their values"), answer=TEXT,
)  # fmt: skip
def set_server_config(bookie: Bookie, call: ApiCall) -> str:
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
    bookie.reconfigure(bookie.config.with_settings(settings))
    return "Success set server config."


# --- state

#: The longest sanity test. Source: SanityTestCommand.
SANITY_TIMEOUT_S: Final = 30.0
#: The longest wait for another sanity test. Source: BookieSanityService.
SANITY_WAIT_S: Final = 5.0


@ENDPOINTS.get(
    f"{PREFIX}/bookie/state", "The state of the bookie: running, writable, stopping.",
    answer=object_of(running=BOOLEAN, readOnly=BOOLEAN, shuttingDown=BOOLEAN, availableForHighPriorityWrites=BOOLEAN),
    probe=True,
)  # fmt: skip
def state(bookie: Bookie, call: ApiCall) -> Any:
    return bookie.state()


_READ_ONLY: Final = object_of(readOnly=BOOLEAN)


@ENDPOINTS.get(f"{PREFIX}/bookie/state/readonly", "Whether the bookie is read-only.", answer=_READ_ONLY)
def read_only(bookie: Bookie, call: ApiCall) -> dict[str, bool]:
    return {"readOnly": bookie.read_only}


@ENDPOINTS.put(
    f"{PREFIX}/bookie/state/readonly", "Make the bookie read-only, or writable again.",
    body=Body((Value("readOnly", "true or false.", ValueKind.BOOLEAN, required=True),)), answer=_READ_ONLY,
)  # fmt: skip
async def set_read_only(call: ApiCall) -> dict[str, bool]:
    """Switch read-only mode; answer 400 if it is forced or disabled. Source: BookieStateReadOnlyService."""
    wanted = call.body["readOnly"]

    async def switch(bookie: Bookie) -> bool:
        if bookie.read_only != wanted:
            await bookie.set_read_only(wanted)
        return bookie.read_only

    return {"readOnly": await call.service.bookie.do(switch)}


@ENDPOINTS.get(
    f"{PREFIX}/bookie/is_ready", "Whether the bookie serves.",
    answer=TEXT, errors={503: "The bookie is starting or stopping, or not registered for zkTimeout"}, probe=True,
)  # fmt: skip
def is_ready(bookie: Bookie, call: ApiCall) -> str:
    found = bookie.state()
    if not found["running"] or found["shuttingDown"]:
        raise ServiceUnavailable("Bookie is not fully started yet")
    if bookie.registration.is_over:
        raise ServiceUnavailable("Bookie has lost its registration in the metadata store")
    return "OK"


@ENDPOINTS.get(
    f"{PREFIX}/bookie/info", "Free and total bytes of the ledger disks.",
    answer=object_of(freeSpace=INTEGER, totalSpace=INTEGER),
)  # fmt: skip
async def info(call: ApiCall) -> dict[str, int]:
    directories, files = await call.service.bookie.ask(
        lambda bookie: (list(bookie.storage.ledger_directories), bookie.files)
    )
    usages = await asyncio.to_thread(lambda: list(map(files.disk_usage, directories)))
    disks = {usage.device: usage for usage in usages}.values()
    return {"freeSpace": sum(each.free for each in disks), "totalSpace": sum(each.total for each in disks)}


@ENDPOINTS.get(
    f"{PREFIX}/bookie/sanity", "Write, read and delete a ledger on this bookie alone.",
    answer=object_of(passed=BOOLEAN, readOnly=BOOLEAN), timeout_s=SANITY_WAIT_S + SANITY_TIMEOUT_S + 5,
    acts=True,
)  # fmt: skip
async def sanity(call: ApiCall) -> dict[str, bool]:
    """Run a sanity test; a failed one is an answer too. Source: BookieSanityService, SanityTestCommand."""
    service = call.service
    if await service.bookie.ask(lambda bookie: bookie.read_only):
        return {"passed": False, "readOnly": True}
    try:
        async with asyncio.timeout(SANITY_WAIT_S):
            await service.sanity.acquire()
    except TimeoutError as error:
        raise ServiceUnavailable("Another sanity test is running", hint="try again later") from error
    try:
        client = service.client(await service.cluster(), [service.bookie.bookie_id])
        async with asyncio.timeout(SANITY_TIMEOUT_S), client:
            await sanity_test(client, ledger_scope_id=0, entry_count=SANITY_ENTRY_COUNT)
        passed = True
    except (BkctlError, TimeoutError):
        passed = False
    finally:
        service.sanity.release()
    return {"passed": passed, "readOnly": False}


# --- files


@ENDPOINTS.get(
    f"{PREFIX}/bookie/last_log_mark", "The last mark of each journal: entries before it are in ledger storage.",
    answer=map_of(STRING), errors={404: "The bookie has no mark yet"},
)  # fmt: skip
async def last_log_mark(call: ApiCall) -> dict[str, str]:
    """Return the marks; without one, journal 0 and position 0. Source: GetLastLogMarkService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    directories = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)

    def look() -> dict[str, str]:
        found: dict[int, tuple[int, int]] = {}
        with suppress(NotFound):
            found = {each.journal_index: each.mark for each in latest_marks(directories).marks}
        marks = (found.get(index, (0, 0)) for index in range(len(config.journal_directories)))
        return {f"LastLogMark: Journal Id - {journal}({journal:x}.txn)": f"Pos - {offset}" for journal, offset in marks}

    return await asyncio.to_thread(look)


_FILE_TYPES: Final = {"journal": "txn", "entrylog": "log", "index": "idx"}


@ENDPOINTS.get(
    f"{PREFIX}/bookie/list_disk_file", "Names of journal, entry log and index files, oldest first, each with a tab.",
    values=(Value("file_type", "journal, entrylog or index; anything else: all."),), answer=map_of(STRING),
)  # fmt: skip
async def list_disk_file(call: ApiCall) -> dict[str, str]:
    """List the files; a file of scoped ledgers has its path below `current`. Source: ListDiskFilesService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    directories = {
        "journal": config.journal_directories,
        "entrylog": config.ledger_directories,
        "index": config.index_or_ledger_directories,
    }
    wanted = call.values.get("file_type", "")
    kinds = [wanted] if wanted in _FILE_TYPES else ["index", "journal", "entrylog"]
    found = {kind: await asyncio.to_thread(_names, directories[kind], f".{_FILE_TYPES[kind]}") for kind in kinds}
    return {f"{kind} files": "".join(f"{name}\t" for name in names) for kind, names in found.items()}


def _names(directories: Iterable[str], ending: str) -> list[str]:
    found: list[tuple[int, str]] = []
    for directory in directories:
        for parent, _, names in os.walk(directory):
            for name in names:
                if name.endswith(ending):
                    path = Path(parent) / name
                    try:
                        changed = path.stat().st_mtime_ns
                    except FileNotFoundError:
                        continue
                    found.append((changed, _shown(Path(directory), path)))
    return [name for _, name in sorted(found)]


def _shown(directory: Path, path: Path) -> str:
    """Return the file's name; for scoped ledgers its path below `current`, since names repeat there."""
    below = path.relative_to(directory).parts
    levels = below[below.index(CURRENT) + 1 :] if CURRENT in below else below
    is_scoped = levels[0] == SCOPED_DIRECTORY or (path.suffix == ".idx" and len(levels) > 3)
    return "/".join(levels) if is_scoped else path.name


@ENDPOINTS.put(
    f"{PREFIX}/bookie/expand_storage", "Add new, empty directories of the configuration file to the cookie.",
    answer=TEXT, errors={409: "The directories do not fit the cookie"},
)  # fmt: skip
async def expand_storage(call: ApiCall) -> str:
    """Read the file again and stamp the directories for the next start. Source: ExpandStorageService."""
    bookie = call.service.bookie
    config = await bookie.ask(lambda bookie: bookie.config)
    cluster = await call.service.cluster()

    def stamp() -> None:
        wanted = config
        if config.conf_path is not None:
            read = BookieConfig.load(config.conf_path)
            wanted = replace(
                config, journal_directories=read.journal_directories, ledger_directories=read.ledger_directories,
                index_directories=read.index_directories, allow_storage_expansion=read.allow_storage_expansion,
            )  # fmt: skip
        if wanted.ledger_storage == "db" and configured_directories(wanted) != configured_directories(config):
            raise Conflict(
                "DbLedgerStorage takes no other directories while its bookie writes ledgers",
                hint="stop the bookie, then run 'bkctl cookie expand'",
            )
        try:
            stamp_or_verify(wanted, bookie.bookie_id, cluster, Files())
        except OSError as error:
            raise Conflict(f"The directories cannot be used: {error}") from error

    await asyncio.to_thread(stamp)
    return "Success expand storage"


# --- garbage


@ENDPOINTS.get(
    f"{PREFIX}/bookie/gc", "Whether a requested garbage collection is running.",
    answer=object_of(is_in_force_gc={"type": "string", "enum": ["true", "false"]}),
)  # fmt: skip
def gc_state(bookie: Bookie, call: ApiCall) -> dict[str, str]:
    return {"is_in_force_gc": str(_collector(bookie).is_in_force_gc).lower()}


@ENDPOINTS.put(
    f"{PREFIX}/bookie/gc", "Collect garbage now.",
    body=Body((
        Value("forceMajor", "With major compaction; default: unless it is suspended.", ValueKind.BOOLEAN),
        Value("forceMinor", "With minor compaction; default: unless it is suspended.", ValueKind.BOOLEAN),
        Value("acceptScopedDeletes", "Let this round delete any number of scoped ledgers.", ValueKind.BOOLEAN),
    ), needed=False),
    answer=STRING, errors={409: "A forced round is under way"},
)  # fmt: skip
def trigger_gc(bookie: Bookie, call: ApiCall) -> str:
    """Start a garbage collection. Source: TriggerGCService."""
    body = call.body
    accepts = body.get("acceptScopedDeletes", False)
    is_forced = _collector(bookie).force(body.get("forceMajor"), body.get("forceMinor"), accept_scoped_deletes=accepts)
    if accepts and not is_forced:  # Others mean the round that is under way, too, as to Apache's bookie.
        raise Conflict("A forced round is under way, which does not accept scoped deletes", hint="try again later")
    return f"Triggered GC on BookieServer: {bookie.bookie_id}"


@ENDPOINTS.get(
    f"{PREFIX}/bookie/gc_details", "The state of each garbage collector; DbLedgerStorage has one a ledger directory.",
    answer=list_of(object_of(
        forceCompacting=BOOLEAN, majorCompacting=BOOLEAN, minorCompacting=BOOLEAN, lastMajorCompactionTime=INTEGER,
        lastMinorCompactionTime=INTEGER, lastEntryLocationCompactionTime=INTEGER, majorCompactionCounter=INTEGER,
        minorCompactionCounter=INTEGER, entryLocationCompactionCounter=INTEGER,
        scopedDeletesHeldBack=STRING,
    )),
)  # fmt: skip
def gc_details(bookie: Bookie, call: ApiCall) -> list[dict[str, Any]]:
    """Return the collectors' states. Source: GCDetailsService."""
    collector = _collector(bookie)
    held_back = collector.stats.scoped_held_back
    return [
        {**{camel_case(name): value for name, value in status._asdict().items()}, "scopedDeletesHeldBack": held_back}
        for status in collector.statuses()
    ]


@ENDPOINTS.get(
    f"{PREFIX}/bookie/gc/suspend_compaction", "Whether compactions are suspended.",
    answer=object_of(isMajorGcSuspended=STRING, isMinorGcSuspended=STRING),
)  # fmt: skip
def suspended(bookie: Bookie, call: ApiCall) -> dict[str, str]:
    collector = _collector(bookie)
    problems = {"suspendedByDisks": collector.suspended_by_disks(), "lastRoundProblem": collector.stats.problem}
    return {
        "isMinorGcSuspended": str(collector.is_suspended(MINOR)).lower(),
        "isMajorGcSuspended": str(collector.is_suspended(MAJOR)).lower(),
        # Apache's answer has the two fields above.
        **{name: text for name, text in problems.items() if text},
    }


def _declare_switch(verb: str, major: str, minor: str) -> None:
    """Declare the endpoint that suspends or resumes compactions: `suspendMajor`, `suspendMinor`."""

    @ENDPOINTS.put(
        f"{PREFIX}/bookie/gc/{verb}_compaction", f"{verb.capitalize()} major or minor compactions.",
        body=Body((
            Value(f"{verb}Major", major, ValueKind.BOOLEAN),
            Value(f"{verb}Minor", minor, ValueKind.BOOLEAN),
        ), needs_value=True),
        answer=STRING,
    )  # fmt: skip
    def switch_compaction(bookie: Bookie, call: ApiCall) -> str:
        """Switch compactions, in Apache's words. Source: SuspendCompactionService, ResumeCompactionService."""
        collector = _collector(bookie)
        server = f"Bookie Server listening on {bookie.address[0]}:{bookie.address[1]} with id {bookie.bookie_id}"
        message = ""
        for kind, before in ((MAJOR, ""), (MINOR, ", ")):
            if call.body.get(f"{verb}{kind.capitalize()}"):
                (collector.suspend if verb == "suspend" else collector.resume)(kind)
                message += f"{before}{verb.capitalize()} {kind}GC on BookieServer: {server}"
        return message


_declare_switch("suspend", "No major compaction.", "No minor compaction.")
_declare_switch("resume", "Major compaction.", "Minor compaction.")


def _collector(bookie: Bookie) -> GarbageCollectorThread:
    if bookie.garbage_collector is None:
        raise ServiceUnavailable(f"Bookie {bookie.bookie_id} has no garbage collection at present")
    return bookie.garbage_collector


def _compactions(bookie: Bookie) -> dict[str, bool]:
    """Return the databases of entry locations by path, with True for one that is being compacted."""
    return dict(each for index in bookie.storage.ledgers.location_indexes for each in index.compactions())


@ENDPOINTS.get(
    f"{PREFIX}/bookie/entry_location_compact",
    "The entry location databases of DbLedgerStorage, and whether each is being compacted.",
    answer=map_of(BOOLEAN),
)  # fmt: skip
def location_compactions(bookie: Bookie, call: ApiCall) -> Any:
    """Return the databases' paths. Source: TriggerLocationCompactService."""
    return _compactions(bookie)


@ENDPOINTS.put(
    f"{PREFIX}/bookie/entry_location_compact", "Compact databases of entry locations.",
    body=Body((
        Value("entryLocationRocksDBCompact", "true; with false, nothing is done.", ValueKind.BOOLEAN),
        Value("entryLocations", "Paths of databases, separated by commas; default: all."),
    )),
    answer=STRING, text_too=True,
)  # fmt: skip
async def compact_locations(call: ApiCall) -> Any:
    """Compact databases, and answer in Apache's words. Source: TriggerLocationCompactService."""
    if not call.body.get("entryLocationRocksDBCompact", False):
        return text_answer("Not trigger Entry Location RocksDB compact.")
    bookie_id = call.service.bookie.bookie_id
    wanted = call.body.get("entryLocations", "").strip()
    paths = list(await call.service.bookie.ask(_compactions))
    chosen = wanted.split(",") if wanted else paths
    if unknown := [path for path in chosen if path not in paths]:
        raise UsageError(
            f"Specified trigger compact entryLocations: {','.join(unknown)} is invalid",
            hint=f"this bookie's databases of entry locations: {', '.join(paths) or 'none'}",
        )
    collector = await call.service.bookie.ask(_collector)
    call.service.in_background(lambda: asyncio.to_thread(collector.compact_locations, chosen))
    if wanted:
        return f"Triggered entry Location RocksDB: {wanted} compact on bookie:{bookie_id}."
    return f"Triggered entry Location RocksDB compact on bookie:{bookie_id}"
