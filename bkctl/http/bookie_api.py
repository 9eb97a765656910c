"""The endpoints of one bookie: its state, files, settings, garbage collection and metrics. A gateway passes them on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from bkctl.bookie.cookies import stamp_or_verify
from bkctl.bookie.metrics import CONTENT_TYPE
from bkctl.client.trials import sanity_test
from bkctl.config import BookieConfig, read_properties
from bkctl.disk import Files
from bkctl.errors import BkctlError, Conflict, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.journals import latest_marks
from bkctl.formats.names import CURRENT, SCOPED_DIRECTORY
from bkctl.http.bookie_metrics import metrics_text
from bkctl.http.endpoints import (
    BOOLEAN,
    INTEGER,
    PREFIX,
    STRING,
    TEXT,
    Body,
    Call,
    Endpoints,
    Kind,
    ServiceUnavailable,
    Value,
    json_answer,
    list_of,
    map_of,
    object_of,
    text_answer,
)
from bkctl.redaction import is_secret_name, without_user_info

if TYPE_CHECKING:
    from bkctl.bookie.garbage_collector import GarbageCollectorThread
    from bkctl.bookie.server import Bookie

BOOKIE: Final = Endpoints(of_bookie=True)

#: Entries of the sanity test, and how long it may take. Source: SanityTestCommand.
SANITY_ENTRIES: Final = 10
SANITY_TIMEOUT_S: Final = 30.0
#: A second sanity test waits so long for the first. Source: BookieSanityService.
SANITY_WAIT_S: Final = 5.0
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


# --- metrics and settings --------------------------------------------------------------------------------------------


@BOOKIE.get("/metrics", "The bookie's metrics, Prometheus text 0.0.4.", answer=CONTENT_TYPE, probe=True)
async def metrics(call: Call) -> Response:
    bookie = call.service.bookie
    text = await metrics_text(bookie)
    return Response(text, media_type=CONTENT_TYPE)


@BOOKIE.get(
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


@BOOKIE.put(
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


# --- state -----------------------------------------------------------------------------------------------------------


@BOOKIE.get(
    f"{PREFIX}/bookie/state", "Whether the bookie runs, and takes entries.",
    answer=object_of(running=BOOLEAN, readOnly=BOOLEAN, shuttingDown=BOOLEAN, availableForHighPriorityWrites=BOOLEAN),
    probe=True,
)  # fmt: skip
async def state(call: Call) -> Response:
    return json_answer(await call.service.bookie.ask(lambda bookie: bookie.state()))


_READ_ONLY: Final = object_of(readOnly=BOOLEAN)


@BOOKIE.get(f"{PREFIX}/bookie/state/readonly", "Whether the bookie is read-only.", answer=_READ_ONLY)
async def read_only(call: Call) -> Response:
    return json_answer({"readOnly": await call.service.bookie.ask(lambda bookie: bookie.read_only)})


@BOOKIE.put(
    f"{PREFIX}/bookie/state/readonly", "Make the bookie read-only, or writable again.",
    body=Body((Value("readOnly", "true or false.", Kind.BOOLEAN, required=True),)), answer=_READ_ONLY,
)  # fmt: skip
async def set_read_only(call: Call) -> Response:
    """Source: BookieStateReadOnlyService; 400 where read-only mode is forced or disabled."""
    assert call.body is not None
    wanted = call.body["readOnly"]

    async def switch(bookie: Bookie) -> bool:
        if bookie.read_only != wanted:
            await bookie.set_read_only(wanted)
        return bookie.read_only

    return json_answer({"readOnly": await call.service.bookie.do(switch)})


@BOOKIE.get(
    f"{PREFIX}/bookie/is_ready", "Whether the bookie serves.",
    answer=TEXT, errors={503: "It does not serve, yet or any more"}, probe=True,
)  # fmt: skip
async def is_ready(call: Call) -> Response:
    found = await call.service.bookie.ask(lambda bookie: bookie.state())
    if not found["running"] or found["shuttingDown"]:
        raise ServiceUnavailable("Bookie is not fully started yet")
    return text_answer("OK")


@BOOKIE.get(
    f"{PREFIX}/bookie/info", "Free and total bytes of the disks that the ledgers are on.",
    answer=object_of(freeSpace=INTEGER, totalSpace=INTEGER),
)  # fmt: skip
async def info(call: Call) -> Response:
    directories = await call.service.bookie.ask(_usage)
    usages = await asyncio.to_thread(directories)
    return json_answer({"freeSpace": usages[0], "totalSpace": usages[1]})


def _usage(bookie: Bookie) -> Any:
    directories, files = list(bookie.storage.ledger_directories), bookie.files

    def look() -> tuple[int, int]:
        disks = {usage.device: usage for usage in map(files.disk_usage, directories)}
        return sum(each.free for each in disks.values()), sum(each.total for each in disks.values())

    return look


@BOOKIE.get(
    f"{PREFIX}/bookie/sanity", "Write, read and delete a ledger on this bookie alone.",
    answer=object_of(passed=BOOLEAN, readOnly=BOOLEAN), timeout_s=SANITY_WAIT_S + SANITY_TIMEOUT_S + 5,
    acts=True,
)  # fmt: skip
async def sanity(call: Call) -> Response:
    """Source: BookieSanityService, SanityTestCommand; a failed test is an answer, too."""
    service = call.service
    if await service.bookie.ask(lambda bookie: bookie.read_only):
        return json_answer({"passed": False, "readOnly": True})
    try:
        async with asyncio.timeout(SANITY_WAIT_S):
            await service.sanity.acquire()
    except TimeoutError as error:
        raise ServiceUnavailable("Another sanity test is running", hint="try again later") from error
    try:
        client = await service.bookkeeper_of_one(service.bookie.bookie_id)
        async with asyncio.timeout(SANITY_TIMEOUT_S), client:
            await sanity_test(client, ledger_scope_id=0, entry_count=SANITY_ENTRIES)
        passed = True
    except (BkctlError, TimeoutError):
        passed = False
    finally:
        service.sanity.release()
    return json_answer({"passed": passed, "readOnly": False})


# --- files -----------------------------------------------------------------------------------------------------------


@BOOKIE.get(
    f"{PREFIX}/bookie/last_log_mark", "Up to where each journal is in ledger storage.",
    answer=map_of(STRING), errors={404: "There is no mark yet"},
)  # fmt: skip
async def last_log_mark(call: Call) -> Response:
    """Source: GetLastLogMarkService, which says journal 0, position 0 where there is no mark."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    directories = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)

    def look() -> dict[int, tuple[int, int]]:
        try:
            marks = latest_marks(directories).marks
        except NotFound:
            marks = []
        found = {each.journal_index: (each.mark.journal_id, each.mark.offset) for each in marks}
        return {index: found.get(index, (0, 0)) for index in range(len(config.journal_directories))}

    found = await asyncio.to_thread(look)
    return json_answer(
        {
            f"LastLogMark: Journal Id - {journal_id}({journal_id:x}.txn)": f"Pos - {offset}"
            for journal_id, offset in found.values()
        }
    )


_FILE_TYPES: Final = {"journal": "txn", "entrylog": "log", "index": "idx"}


@BOOKIE.get(
    f"{PREFIX}/bookie/list_disk_file", "Names of journal, entry log and index files, oldest first, a tab behind each.",
    values=(Value("file_type", "journal, entrylog or index; anything else: all."),), answer=map_of(STRING),
)  # fmt: skip
async def list_disk_file(call: Call) -> Response:
    """Files of scoped ledgers are named with their paths below `current`. Source: ListDiskFilesService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    directories = {
        "journal": config.journal_directories,
        "entrylog": config.ledger_directories,
        "index": config.index_directories or config.ledger_directories,
    }
    wanted = call.values.get("file_type", "")
    kinds = [wanted] if wanted in _FILE_TYPES else ["index", "journal", "entrylog"]

    def look() -> dict[str, str]:
        return {
            f"{kind} files": "".join(f"{name}\t" for name in _names(directories[kind], f".{_FILE_TYPES[kind]}"))
            for kind in kinds
        }

    return json_answer(await asyncio.to_thread(look))


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
    """The name; of a file of scoped ledgers its path from `current` on, for other files have that name too."""
    below = path.relative_to(directory).parts
    levels = below[below.index(CURRENT) + 1 :] if CURRENT in below else below
    is_scoped = levels[0] == SCOPED_DIRECTORY or (path.suffix == ".idx" and len(levels) > 3)
    return "/".join(levels) if is_scoped else path.name


@BOOKIE.put(
    f"{PREFIX}/bookie/expand_storage", "Take new, empty directories of the configuration file into the cookie.",
    answer=TEXT, errors={409: "The directories do not fit the cookie"},
)  # fmt: skip
async def expand_storage(call: Call) -> Response:
    """The file is read again, so that the bookie's next start finds them in order. Source: ExpandStorageService."""
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
        try:
            stamp_or_verify(wanted, bookie.bookie_id, cluster, Files())
        except OSError as error:
            raise Conflict(f"The directories cannot be used: {error}") from error

    await asyncio.to_thread(stamp)
    return text_answer("Success expand storage")


# --- garbage collection ----------------------------------------------------------------------------------------------


@BOOKIE.get(
    f"{PREFIX}/bookie/gc", "Whether a garbage collection that was asked for is under way.",
    answer=object_of(is_in_force_gc={"type": "string", "enum": ["true", "false"]}),
)  # fmt: skip
async def gc_state(call: Call) -> Response:
    forced = await call.service.bookie.ask(lambda bookie: _collector(bookie).is_in_force_gc)
    return json_answer({"is_in_force_gc": str(forced).lower()})


@BOOKIE.put(
    f"{PREFIX}/bookie/gc", "Collect garbage now.",
    body=Body((
        Value("forceMajor", "With major compaction; not given: unless it is suspended.", Kind.BOOLEAN),
        Value("forceMinor", "With minor compaction; not given: unless it is suspended.", Kind.BOOLEAN),
        Value("acceptScopedDeletes", "Let this round delete as many scoped ledgers as it finds deleted.", Kind.BOOLEAN),
    ), needed=False),
    answer=STRING,
)  # fmt: skip
async def trigger_gc(call: Call) -> Response:
    """Source: TriggerGCService."""
    body = call.body or {}

    def force(bookie: Bookie) -> None:
        _collector(bookie).force(
            major=body.get("forceMajor"),
            minor=body.get("forceMinor"),
            accept_scoped_deletes=body.get("acceptScopedDeletes", False),
        )

    await call.service.bookie.ask(force)
    return json_answer(f"Triggered GC on BookieServer: {call.service.bookie.bookie_id}")


@BOOKIE.get(
    f"{PREFIX}/bookie/gc_details", "How garbage collection stands, for each ledger directory that has its own.",
    answer=list_of(object_of(
        forceCompacting=BOOLEAN, majorCompacting=BOOLEAN, minorCompacting=BOOLEAN, lastMajorCompactionTime=INTEGER,
        lastMinorCompactionTime=INTEGER, lastEntryLocationCompactionTime=INTEGER, majorCompactionCounter=INTEGER,
        minorCompactionCounter=INTEGER, entryLocationCompactionCounter=INTEGER,
        scopedDeletesHeldBack=STRING,
    )),
)  # fmt: skip
async def gc_details(call: Call) -> Response:
    """Source: GCDetailsService."""
    return json_answer(await call.service.bookie.ask(_statuses))


def _statuses(bookie: Bookie) -> list[dict[str, Any]]:
    collector = _collector(bookie)
    held_back = collector.stats.scoped_held_back
    return [
        {**{_camel(name): value for name, value in status._asdict().items()}, "scopedDeletesHeldBack": held_back}
        for status in collector.statuses()
    ]


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


@BOOKIE.get(
    f"{PREFIX}/bookie/gc/suspend_compaction", "Whether compactions are suspended.",
    answer=object_of(isMajorGcSuspended=STRING, isMinorGcSuspended=STRING),
)  # fmt: skip
async def suspended(call: Call) -> Response:
    def look(bookie: Bookie) -> dict[str, str]:
        collector = _collector(bookie)
        return {
            "isMinorGcSuspended": str(collector.is_minor_suspended).lower(),
            "isMajorGcSuspended": str(collector.is_major_suspended).lower(),
        }

    return json_answer(await call.service.bookie.ask(look))


@BOOKIE.put(
    f"{PREFIX}/bookie/gc/suspend_compaction", "Start no major or minor compaction from now on.",
    body=Body((
        Value("suspendMajor", "No major compaction.", Kind.BOOLEAN),
        Value("suspendMinor", "No minor compaction.", Kind.BOOLEAN),
    ), some=True),
    answer=STRING,
)  # fmt: skip
async def suspend(call: Call) -> Response:
    return await _switch_compaction(call, "suspend")


@BOOKIE.put(
    f"{PREFIX}/bookie/gc/resume_compaction", "Start major or minor compactions again.",
    body=Body((
        Value("resumeMajor", "Major compaction.", Kind.BOOLEAN),
        Value("resumeMinor", "Minor compaction.", Kind.BOOLEAN),
    ), some=True),
    answer=STRING,
)  # fmt: skip
async def resume(call: Call) -> Response:
    return await _switch_compaction(call, "resume")


async def _switch_compaction(call: Call, verb: str) -> Response:
    """The words are those of SuspendCompactionService and ResumeCompactionService."""
    body = call.body or {}
    major, minor = body.get(f"{verb}Major", False), body.get(f"{verb}Minor", False)

    def switch(bookie: Bookie) -> str:
        collector = _collector(bookie)
        server = f"Bookie Server listening on {bookie.address[0]}:{bookie.address[1]} with id {bookie.bookie_id}"
        said = ""
        if major:
            said = f"{verb.capitalize()} majorGC on BookieServer: {server}"
            (collector.suspend_major if verb == "suspend" else collector.resume_major)()
        if minor:
            said += f", {verb.capitalize()} minorGC on BookieServer: {server}"
            (collector.suspend_minor if verb == "suspend" else collector.resume_minor)()
        return said

    return json_answer(await call.service.bookie.ask(switch))


def _collector(bookie: Bookie) -> GarbageCollectorThread:
    if bookie.garbage_collector is None:
        raise ServiceUnavailable(f"Bookie {bookie.bookie_id} has no garbage collection at present")
    return bookie.garbage_collector


@BOOKIE.get(
    f"{PREFIX}/bookie/entry_location_compact",
    "The databases of entry locations, and whether each is being compacted; none but with DbLedgerStorage.",
    answer=map_of(BOOLEAN),
)  # fmt: skip
async def location_compactions(call: Call) -> Response:
    """Source: TriggerLocationCompactService."""
    return json_answer(await call.service.bookie.ask(lambda bookie: bookie.storage.ledgers.location_compactions()))


@BOOKIE.put(
    f"{PREFIX}/bookie/entry_location_compact", "Compact databases of entry locations.",
    body=Body((
        Value("entryLocationRocksDBCompact", "true, or nothing is done.", Kind.BOOLEAN),
        Value("entryLocations", "Paths of databases, a comma between two; not given: all."),
    )),
    answer=STRING, text_too=True,
)  # fmt: skip
async def compact_locations(call: Call) -> Response:
    """Source: TriggerLocationCompactService, whose words these are."""
    body = call.body or {}
    if not body.get("entryLocationRocksDBCompact", False):
        return text_answer("Not trigger Entry Location RocksDB compact.")
    bookie_id = call.service.bookie.bookie_id
    wanted = body.get("entryLocations", "").strip()
    paths = await call.service.bookie.ask(lambda bookie: list(bookie.storage.ledgers.location_compactions()))
    chosen = wanted.split(",") if wanted else paths
    if unknown := [each for each in chosen if each not in paths]:
        raise UsageError(
            f"Specified trigger compact entryLocations: {','.join(unknown)} is invalid",
            hint=f"this bookie's databases of entry locations: {', '.join(paths) or 'none'}",
        )
    ledgers = await call.service.bookie.ask(lambda bookie: bookie.storage.ledgers)
    call.service.in_background(lambda: ledgers.compact_locations(chosen))
    if wanted:
        return json_answer(f"Triggered entry Location RocksDB: {wanted} compact on bookie:{bookie_id}.")
    return json_answer(f"Triggered entry Location RocksDB compact on bookie:{bookie_id}")
