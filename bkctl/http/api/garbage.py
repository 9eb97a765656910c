"""Endpoints of a bookie's garbage collection and compaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from bkctl.errors import UsageError
from bkctl.http.endpoints import (
    BOOLEAN,
    INTEGER,
    PREFIX,
    STRING,
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

if TYPE_CHECKING:
    from bkctl.bookie.garbage_collector import GarbageCollectorThread
    from bkctl.bookie.server import Bookie


ENDPOINTS: Final = Endpoints(of_bookie=True)


@ENDPOINTS.get(
    f"{PREFIX}/bookie/gc", "Whether a garbage collection that was asked for is under way.",
    answer=object_of(is_in_force_gc={"type": "string", "enum": ["true", "false"]}),
)  # fmt: skip
async def gc_state(call: Call) -> Response:
    forced = await call.service.bookie.ask(lambda bookie: _collector(bookie).is_in_force_gc)
    return json_answer({"is_in_force_gc": str(forced).lower()})


@ENDPOINTS.put(
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


@ENDPOINTS.get(
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


@ENDPOINTS.get(
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


@ENDPOINTS.put(
    f"{PREFIX}/bookie/gc/suspend_compaction", "Start no major or minor compaction from now on.",
    body=Body((
        Value("suspendMajor", "No major compaction.", Kind.BOOLEAN),
        Value("suspendMinor", "No minor compaction.", Kind.BOOLEAN),
    ), some=True),
    answer=STRING,
)  # fmt: skip
async def suspend(call: Call) -> Response:
    return await _switch_compaction(call, "suspend")


@ENDPOINTS.put(
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


@ENDPOINTS.get(
    f"{PREFIX}/bookie/entry_location_compact",
    "The databases of entry locations, and whether each is being compacted; none but with DbLedgerStorage.",
    answer=map_of(BOOLEAN),
)  # fmt: skip
async def location_compactions(call: Call) -> Response:
    """Source: TriggerLocationCompactService."""
    return json_answer(await call.service.bookie.ask(lambda bookie: bookie.storage.ledgers.location_compactions()))


@ENDPOINTS.put(
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
