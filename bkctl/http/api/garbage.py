"""Endpoints of a bookie's garbage collection and compaction."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from bkctl.bookie.compaction_schedule import MAJOR, MINOR
from bkctl.errors import UsageError
from bkctl.http.endpoints import (
    BOOLEAN,
    INTEGER,
    PREFIX,
    STRING,
    ApiCall,
    Body,
    Endpoints,
    Value,
    ValueKind,
    json_answer,
    list_of,
    map_of,
    object_of,
    text_answer,
)
from bkctl.http.service import ServiceUnavailable

if TYPE_CHECKING:
    from bkctl.bookie.bookie import Bookie
    from bkctl.bookie.garbage_collector import GarbageCollectorThread


ENDPOINTS: Final = Endpoints(of_bookie=True)


@ENDPOINTS.get(
    f"{PREFIX}/bookie/gc", "Whether a requested garbage collection is running.",
    answer=object_of(is_in_force_gc={"type": "string", "enum": ["true", "false"]}),
)  # fmt: skip
async def gc_state(call: ApiCall) -> Response:
    forced = await call.service.bookie.ask(lambda bookie: _collector(bookie).is_in_force_gc)
    return json_answer({"is_in_force_gc": str(forced).lower()})


@ENDPOINTS.put(
    f"{PREFIX}/bookie/gc", "Collect garbage now.",
    body=Body((
        Value("forceMajor", "With major compaction; default: unless it is suspended.", ValueKind.BOOLEAN),
        Value("forceMinor", "With minor compaction; default: unless it is suspended.", ValueKind.BOOLEAN),
        Value("acceptScopedDeletes", "Let this round delete any number of scoped ledgers.", ValueKind.BOOLEAN),
    ), needed=False),
    answer=STRING,
)  # fmt: skip
async def trigger_gc(call: ApiCall) -> Response:
    """Start a garbage collection. Source: TriggerGCService."""

    def force(bookie: Bookie) -> None:
        _collector(bookie).force(
            major=call.body.get("forceMajor"),
            minor=call.body.get("forceMinor"),
            accept_scoped_deletes=call.body.get("acceptScopedDeletes", False),
        )

    await call.service.bookie.ask(force)
    return json_answer(f"Triggered GC on BookieServer: {call.service.bookie.bookie_id}")


@ENDPOINTS.get(
    f"{PREFIX}/bookie/gc_details", "The state of each garbage collector; DbLedgerStorage has one a ledger directory.",
    answer=list_of(object_of(
        forceCompacting=BOOLEAN, majorCompacting=BOOLEAN, minorCompacting=BOOLEAN, lastMajorCompactionTime=INTEGER,
        lastMinorCompactionTime=INTEGER, lastEntryLocationCompactionTime=INTEGER, majorCompactionCounter=INTEGER,
        minorCompactionCounter=INTEGER, entryLocationCompactionCounter=INTEGER,
        scopedDeletesHeldBack=STRING,
    )),
)  # fmt: skip
async def gc_details(call: ApiCall) -> Response:
    """Return the collectors' states. Source: GCDetailsService."""
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


@ENDPOINTS.get(
    f"{PREFIX}/bookie/gc/suspend_compaction", "Whether compactions are suspended.",
    answer=object_of(
        isMajorGcSuspended=STRING, isMinorGcSuspended=STRING,
    ),
)  # fmt: skip
async def suspended(call: ApiCall) -> Response:
    def look(bookie: Bookie) -> dict[str, str]:
        collector = _collector(bookie)
        problems = {
            "suspendedByDisks": collector.suspended_by_disks(),
            "lastRoundProblem": collector.stats.problem,
        }
        return {
            "isMinorGcSuspended": str(collector.is_suspended(MINOR)).lower(),
            "isMajorGcSuspended": str(collector.is_suspended(MAJOR)).lower(),
            # Apache's answer has the two fields above.
            **{name: text for name, text in problems.items() if text},
        }

    return json_answer(await call.service.bookie.ask(look))


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
    async def switch_compaction(call: ApiCall) -> Response:
        """Switch compactions, in Apache's words. Source: SuspendCompactionService, ResumeCompactionService."""

        def switch(bookie: Bookie) -> str:
            collector = _collector(bookie)
            server = f"Bookie Server listening on {bookie.address[0]}:{bookie.address[1]} with id {bookie.bookie_id}"
            message = ""
            for kind, before in ((MAJOR, ""), (MINOR, ", ")):
                if call.body.get(f"{verb}{kind.capitalize()}"):
                    (collector.suspend if verb == "suspend" else collector.resume)(kind)
                    message += f"{before}{verb.capitalize()} {kind}GC on BookieServer: {server}"
            return message

        return json_answer(await call.service.bookie.ask(switch))


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
async def location_compactions(call: ApiCall) -> Response:
    """Return the databases' paths. Source: TriggerLocationCompactService."""
    return json_answer(await call.service.bookie.ask(_compactions))


@ENDPOINTS.put(
    f"{PREFIX}/bookie/entry_location_compact", "Compact databases of entry locations.",
    body=Body((
        Value("entryLocationRocksDBCompact", "true; with false, nothing is done.", ValueKind.BOOLEAN),
        Value("entryLocations", "Paths of databases, separated by commas; default: all."),
    )),
    answer=STRING, text_too=True,
)  # fmt: skip
async def compact_locations(call: ApiCall) -> Response:
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
        return json_answer(f"Triggered entry Location RocksDB: {wanted} compact on bookie:{bookie_id}.")
    return json_answer(f"Triggered entry Location RocksDB compact on bookie:{bookie_id}")
