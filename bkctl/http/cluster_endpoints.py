"""The REST API of a cluster: ledgers, bookies, auto-recovery.

A ledger of scope 0 is named by its decimal id, as in Apache's answers; a ledger of another scope by its qualified name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from decimal import ROUND_DOWN, Decimal
from itertools import islice
from typing import Any, Final

from starlette.responses import Response

from bkctl.client.disk_space import disk_space
from bkctl.client.read_handle import ReadHandle
from bkctl.columns import base64_text
from bkctl.errors import BkctlError, Conflict, LedgerNotFound, NotFound, UsageError
from bkctl.http.endpoints import (
    BATCH_COUNT,
    BOOLEAN,
    INTEGER,
    LIMIT_MAX,
    PREFIX,
    SCOPES,
    STRING,
    STRING_OR_NULL,
    TEXT,
    ApiCall,
    Body,
    Endpoints,
    Value,
    ValueKind,
    json_text,
    list_of,
    map_of,
    object_of,
    scope_of,
    streamed_object,
)
from bkctl.http.service import next_of
from bkctl.ids import LedgerId, check_bookie_id, resolve_ledger, to_signed
from bkctl.metadata.admin.auto_recovery import MarkFilter
from bkctl.metadata.admin.overview import cluster_info
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS, ledger_row
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.underreplication import AuditorElection, AutoRecoverySettings, AutoRecoveryState, LedgerMarks

ENDPOINTS: Final = Endpoints(of_bookie=False)

# --- ledgers

#: Source: ListLedgerService.LIST_LEDGER_BATCH_SIZE, ReadLedgerEntryService.ENTRIES_PER_PAE.
LEDGERS_A_PAGE: Final = 100
ENTRIES_A_PAGE: Final = 1000
#: The largest piece of an answer.
BATCH_SIZE_BYTES: Final = 1 << 20
_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")

_ONE_LEDGER = (
    Value("ledger_id", "The ledger's id, in any text form."),
    Value("ledger_scope_id", "The ledger's scope (BP-35); default 0."),
    Value("ledger_qualified_name", "Scope and id in one: 32 hex digits, or a UUID. Instead of ledger_id."),
)
_NO_LEDGER = {404: "The ledger does not exist"}

#: Fields that Apache's server has in another form, or that it lacks.
_OTHER_FIELDS: Final = ("ensembles", "pulsar")
_METADATA: Final = object_of(
    **{
        **{
            name: {key: value for key, value in shape.items() if key != "title"}
            for column in LEDGER_COLUMNS.columns
            for name, shape in column.properties()
            if name not in _OTHER_FIELDS
        },
        "ledgerId": {"type": ["integer", "string"]},
        "ctime": INTEGER,
        "password": STRING,
        "closed": BOOLEAN,
        "allEnsembles": map_of(list_of(object_of(id=STRING))),
        "ctoken": INTEGER,
    }
)


def _ledger(call: ApiCall) -> LedgerId:
    ledger = resolve_ledger(**{value.name: call.values.get(value.name) for value in _ONE_LEDGER})
    if ledger is None:
        raise UsageError("No ledger is named", hint="add ledger_id or ledger_qualified_name")
    return ledger


def metadata_object(ledger: LedgerId, found: VersionedMetadata, *, with_password: bool = True) -> dict[str, Any]:
    """Return a ledger's metadata in the form of Apache's server, with the two names of BP-35.

    The password is empty without `with_password`. An id of a scope ≠ 0 is a string, since JSON readers may lose digits
    of a large number. Source: LedgerMetadataImpl.
    """
    metadata = found.metadata
    value = LEDGER_COLUMNS.object(ledger_row(ledger, found))
    for name in _OTHER_FIELDS:
        value.pop(name, None)
    return value | {
        "ledgerId": str(ledger.ledger_id) if ledger.is_scoped else to_signed(ledger.ledger_id),
        "ctime": -1 if found.ctime_ms is None else found.ctime_ms,
        "digestType": "MAC" if value["digestType"] == "HMAC" else value["digestType"],  # source: DigestType
        "password": base64_text((metadata.password or b"") if with_password else b""),
        "closed": metadata.is_closed,
        "allEnsembles": {
            str(each.first_entry_id): [{"id": bookie} for bookie in each.bookies] for each in metadata.ensembles
        },
        "ctoken": metadata.c_token or 0,
    }


@ENDPOINTS.delete(
    f"{PREFIX}/ledger/delete", "Delete a ledger; the bookies' garbage collections delete its entries.",
    values=_ONE_LEDGER, answer=STRING, errors=_NO_LEDGER,
)  # fmt: skip
async def delete_ledger(call: ApiCall) -> str:
    ledger = _ledger(call)
    bookkeeper = await call.service.bookkeeper()
    await bookkeeper.delete_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
    return f"Deleted ledger: {ledger}"


@ENDPOINTS.get(
    f"{PREFIX}/ledger/list", "The ledgers of a scope, optionally with metadata; streams.",
    values=(
        Value("print_metadata", "With each ledger's metadata.", ValueKind.BOOLEAN),
        Value("decode_meta", "Metadata as an object, not as the stored text.", ValueKind.BOOLEAN),
        Value("page", f"With metadata: a page of {LEDGERS_A_PAGE}, from 1 on; page 1 has one less.", ValueKind.INTEGER,
              least=1, most=1 << 31),
        SCOPES,
        Value("after", "Only ledgers after this one, in any text form."),
        Value("limit", "The largest number of ledgers.", ValueKind.INTEGER, least=1, most=LIMIT_MAX),
    ),
    answer=map_of({"type": ["null", "string", "object"]}),
)  # fmt: skip
async def list_ledgers(call: ApiCall) -> Response:
    """List ledgers; the first page has one less, as in Apache's server. Source: ListLedgerService."""
    values = call.values
    scope = scope_of(call)
    after = LedgerId.parse(values["after"], None) if "after" in values else None
    if after is not None and scope is not None and after.scope_id != scope:
        raise UsageError(f"after names a ledger of scope {after.scope_id}, but the list is of scope {scope}")
    cluster = await call.service.cluster()
    manager = await asyncio.to_thread(lambda: cluster.ledgers)  # reads the LAYOUT
    ledgers = await asyncio.to_thread(manager.ledgers, scope, after)
    if not values.get("print_metadata", False):
        ids = islice(ledgers, values.get("limit"))
        return await streamed_object(_batches(ids, lambda batch: [(str(each), "null") for each in batch]))
    if "page" in values:
        first = (values["page"] - 1) * LEDGERS_A_PAGE
        # Ledgers are counted from 1 on, and page 1 begins with number 0.
        ledgers = islice(ledgers, max(first - 1, 0), first + LEDGERS_A_PAGE - 1)
    decode = values.get("decode_meta", False)
    found = manager.read_many(islice(ledgers, values.get("limit")))
    secrets = call.sees_secrets
    return await streamed_object(_batches(found, lambda batch: list(_metadata_entries(batch, decode, secrets))))


async def _batches(
    items: Iterator[Any], entries: Callable[[list[Any]], list[tuple[str, str]]]
) -> AsyncIterator[list[tuple[str, str]]]:
    while batch := await next_of(items, BATCH_COUNT):
        yield entries(batch)


def _metadata_entries(
    batch: Iterable[tuple[LedgerId, VersionedMetadata | BkctlError]], decode: bool, with_password: bool
) -> Iterator[tuple[str, str]]:
    for ledger, found in batch:
        if isinstance(found, LedgerNotFound):  # deleted meanwhile
            continue
        if isinstance(found, BkctlError):
            yield str(ledger), json_text({"error": found.message, "hint": found.hint}, 1)
        elif decode:
            yield str(ledger), json_text(metadata_object(ledger, found, with_password=with_password), 1)
        else:
            metadata = found.metadata._replace(c_token=found.metadata.c_token or 0)
            if not with_password and metadata.password is not None:
                metadata = metadata._replace(password=b"")
            # Java has one U+FFFD for half a surrogate pair, Python one for each of its bytes.
            data = _SURROGATE.sub("\ufffd".encode(), metadata.serialize())
            yield str(ledger), json_text(data.decode("utf-8", "replace"))


@ENDPOINTS.get(
    f"{PREFIX}/ledger/metadata", "One ledger's metadata, its password included.",
    values=_ONE_LEDGER, answer=map_of(_METADATA), errors=_NO_LEDGER,
)  # fmt: skip
def ledger_metadata(cluster: Cluster, call: ApiCall) -> dict[str, Any]:
    ledger = _ledger(call)
    return {str(ledger): metadata_object(ledger, cluster.ledgers.read(ledger), with_password=call.sees_secrets)}


@ENDPOINTS.get(
    f"{PREFIX}/ledger/read", "A ledger's entries up to its last add confirmed; streams.",
    values=(
        *_ONE_LEDGER,
        Value("start_entry_id", "The first entry; default 0.", ValueKind.INTEGER),
        Value("end_entry_id", "The last entry, inclusive; -1: the last existing one.", ValueKind.INTEGER, least=-1),
        Value("page", f"{ENTRIES_A_PAGE} entries, from page 1 on.", ValueKind.INTEGER, least=1, most=1 << 31),
        Value("encoding", "The encoding of payloads: ascii (as Apache's, lossy), utf8 (lossy), hex, base64.",
              choices=("ascii", "utf8", "hex", "base64")),
    ),
    answer=map_of(STRING), errors=_NO_LEDGER,
)  # fmt: skip
async def read_ledger(call: ApiCall) -> Response:
    """Stream the entries. Source: ReadLedgerEntryService."""
    values = call.values
    ledger = _ledger(call)
    first, last = values.get("start_entry_id", 0), values.get("end_entry_id", -1)
    entries: list[tuple[str, str]] = []
    page = values.get("page")
    if page is not None:
        page_first = (page - 1) * ENTRIES_A_PAGE
        page_last = page_first + ENTRIES_A_PAGE - 1
        first = max(first, page_first)
        last = page_last if last == -1 else min(last, page_last)
        entries = [("Entries for page: ", json_text(str(page)))]
    if last != -1 and first > last:
        raise UsageError(f"start_entry_id {first} is behind end_entry_id {last}" + (f" of page {page}" if page else ""))
    texts: dict[str, Callable[[bytes], str]] = {
        "ascii": lambda payload: payload.decode("ascii", "replace"),
        "utf8": lambda payload: payload.decode("utf-8", "replace"),
        "hex": bytes.hex,
        "base64": base64_text,
    }
    text = texts[values.get("encoding", "ascii")]
    bookkeeper = await call.service.bookkeeper()
    reader = await bookkeeper.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None)
    last = reader.last_add_confirmed if last == -1 else min(last, reader.last_add_confirmed)
    return await streamed_object(_entries(reader, first, last, entries, text))


async def _entries(
    reader: ReadHandle, first: int, last: int, batch: list[tuple[str, str]], text: Callable[[bytes], str]
) -> AsyncIterator[list[tuple[str, str]]]:
    async with reader:
        size = 0
        if first <= last:
            reading: Any = reader.read(first, last)
            async with aclosing(reading):
                async for entry in reading:
                    value = json_text(text(bytes(entry.payload)))
                    batch.append((str(entry.entry_id), value))
                    size += len(value)
                    if size >= BATCH_SIZE_BYTES or len(batch) >= BATCH_COUNT:
                        yield batch
                        batch, size = [], 0
        if batch:
            yield batch


# --- bookies


@ENDPOINTS.get(
    f"{PREFIX}/bookie/list_bookies", "The registered bookies, writable ones or read-only ones.",
    values=(
        Value("type", "ro: read-only bookies; anything else: writable ones."),
        Value("print_hostnames", "With the host of each bookie.", ValueKind.BOOLEAN),
    ),
    answer=map_of(STRING_OR_NULL),
)  # fmt: skip
def list_bookies(cluster: Cluster, call: ApiCall) -> dict[str, str | None]:
    """List the bookies of one state. Source: ListBookiesService."""
    state = "ro" if call.values.get("type") == "ro" else "rw"
    wants_host = call.values.get("print_hostnames", False)
    return {
        bookie.bookie_id: bookie.address[0] if wants_host and bookie.address else None
        for bookie in cluster.bookies.list(include_down=False)
        if bookie.state == state
    }


@ENDPOINTS.get(
    f"{PREFIX}/bookie/list_bookie_info", "Free and total space of each registered bookie, as the bookie reports it.",
    answer=map_of(STRING), errors={404: "No bookie answers"},
)  # fmt: skip
async def list_bookie_info(call: ApiCall) -> dict[str, str]:
    """Ask the bookies for their space. Source: ListBookieInfoService."""
    bookkeeper = await call.service.bookkeeper()
    bookies = await asyncio.to_thread(bookkeeper.cluster.bookies.list, include_down=False)
    found = {}
    free_total = total_total = 0
    async for space in disk_space(bookkeeper, bookies):
        if space.error is None:
            free, total = space.free or 0, space.total or 0
            found[space.bookie.bookie_id] = f": {_space_text(free, total)},"
            free_total += free
            total_total += total
    if not found:
        raise NotFound("No bookie answers")
    return {**found, "ClusterInfo: ": _space_text(free_total, total_total)}


def _space_text(free: int, total: int) -> str:
    return f"{{Free: {free}{_readable(free)}, Total: {total}{_readable(total)}}}"


def _readable(size: int) -> str:
    """Return the size in decimal units with up to three digits, rounded down; nothing below 1000."""
    value, unit = Decimal(size), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return ""
    text = f"{value.quantize(Decimal('0.001'), ROUND_DOWN):f}".rstrip("0").rstrip(".")
    return f"({text}{('', 'KB', 'MB', 'GB', 'TB')[unit]})"


@ENDPOINTS.get(
    f"{PREFIX}/bookie/cluster_info", "The cluster: its auditor, under-replication, and numbers of bookies.",
    answer=object_of(
        auditorElected=BOOLEAN, auditorId=STRING, clusterUnderReplicated=BOOLEAN, ledgerReplicationEnabled=BOOLEAN,
        totalBookiesCount=INTEGER, writableBookiesCount=INTEGER, readonlyBookiesCount=INTEGER,
        unavailableBookiesCount=INTEGER,
    ),
)  # fmt: skip
def show_cluster(cluster: Cluster, call: ApiCall) -> dict[str, Any]:
    """Return the state of the cluster, without a field that ClusterInfo lacks. Source: ClusterInfoService."""
    info = cluster_info(cluster)
    return {
        "auditorElected": info.auditor_elected,
        "auditorId": info.auditor_id or "",
        "clusterUnderReplicated": bool(info.underreplicated),
        "ledgerReplicationEnabled": info.replication_enabled,
        "totalBookiesCount": info.bookie_count,
        "writableBookiesCount": info.writable_count,
        "readonlyBookiesCount": info.read_only_count,
        "unavailableBookiesCount": info.down_count,
    }


@ENDPOINTS.get(
    f"{PREFIX}/bookie/ledger_scopes", "The number of registered bookies that know ledger scopes (BP-35).",
    answer=object_of(ledgerScopesBookiesCount=INTEGER),
)  # fmt: skip
def ledger_scopes(cluster: Cluster, call: ApiCall) -> dict[str, int]:
    return {"ledgerScopesBookiesCount": sum(each.ledger_scopes for each in cluster.bookies.list(include_down=False))}


# --- recovery

DELAY_S_MAX: Final = (1 << 31) - 1


_ENABLED: Final = object_of(enabled=BOOLEAN)
_BUSY: Final = "Another background request is running"


@ENDPOINTS.get(f"{PREFIX}/autorecovery/status", "Whether auto-recovery is on.", answer=_ENABLED)
def recovery_status(cluster: Cluster, call: ApiCall) -> dict[str, bool]:
    return {"enabled": AutoRecoverySettings(cluster.store).is_enabled()}


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/status", "Switch auto-recovery on or off.",
    values=(Value("enabled", "true or false.", ValueKind.BOOLEAN, required=True),), answer=_ENABLED,
)  # fmt: skip
def switch_recovery(cluster: Cluster, call: ApiCall) -> dict[str, bool]:
    wanted, settings = call.values["enabled"], AutoRecoverySettings(cluster.store)
    if settings.is_enabled() != wanted:
        (settings.enable if wanted else settings.disable)()
    return {"enabled": settings.is_enabled()}


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/bookie", "Copy all that lost bookies hold to others, in every scope; in the background.",
    body=Body((
        Value("bookie_src", "The lost bookies.", ValueKind.TEXTS, required=True),
        Value("delete_cookie", "Delete their cookies once they hold nothing.", ValueKind.BOOLEAN),
    )),
    answer=TEXT, errors={409: "One of the bookies is registered", 503: _BUSY},
)  # fmt: skip
async def recover_bookie(call: ApiCall) -> str:
    """Recover all of the bookies.

    Source: RecoveryBookieService, which recovers only the first one, and a running one as well: that closes its open
    ledgers under their writers.
    """
    bookies = [check_bookie_id(each) for each in call.body["bookie_src"]]
    if not bookies:
        raise UsageError("bookie_src names no bookie", hint='send {"bookie_src": ["HOST:PORT"]}')
    delete_cookie = call.body.get("delete_cookie", False)
    cluster = await call.service.cluster()
    for bookie_id in bookies:
        await asyncio.to_thread(_check_stopped, cluster, bookie_id)
    call.service.recover_in_background(bookies, delete_cookie=delete_cookie)
    return "Success send recovery request command."


def _check_stopped(cluster: Cluster, bookie_id: str) -> None:
    found = cluster.bookies.get(bookie_id)
    if found is not None and found.state != "down":
        raise Conflict(
            f"Bookie {bookie_id} is registered ({found.state})",
            hint="stop it first, or move its ledgers with 'bkctl bookies drain'",
        )


@ENDPOINTS.get(
    f"{PREFIX}/autorecovery/list_under_replicated_ledger", "Ledgers that are marked under-replicated.",
    values=(
        Value("missingreplica", "Only ledgers that lack entries on this bookie."),
        Value("excludingmissingreplica", "Only ledgers that lack no entries on this bookie."),
        Value("printmissingreplica", "With the bookies that lack entries.", ValueKind.FLAG),
        SCOPES,
    ),
    answer={"oneOf": [list_of({"type": ["integer", "string"]}), map_of(list_of(STRING))]},
    errors={404: "No ledger is under-replicated"},
)  # fmt: skip
async def list_underreplicated(call: ApiCall) -> Any:
    """List the marked ledgers. Source: ListUnderReplicatedLedgerService."""
    missing, excluded = (call.values.get(name, "").strip() for name in ("missingreplica", "excludingmissingreplica"))
    chosen = MarkFilter([missing] if missing else (), [excluded] if excluded else ())
    found: dict[LedgerId, tuple[str, ...]] = {}
    cluster = await call.service.cluster()
    marks = LedgerMarks(cluster.store).list(scope_of(call))
    while batch := await next_of(marks, BATCH_COUNT):
        for ledger, mark in batch:
            if not isinstance(mark, BkctlError):
                found |= {ledger: mark.missing_replicas} if chosen.matches(mark) else {}
            elif not missing and not excluded:
                found[ledger] = ()
        if len(found) > LIMIT_MAX:
            raise UsageError(f"More than {LIMIT_MAX} ledgers are under-replicated", hint="ask for one bookie's")
    if not found:
        raise NotFound("No under replicated ledgers found")
    if "printmissingreplica" in call.values:
        return {str(ledger): replicas for ledger, replicas in found.items()}
    return [str(each) if each.is_scoped else to_signed(each.ledger_id) for each in found]


@ENDPOINTS.get(
    f"{PREFIX}/autorecovery/who_is_auditor", "The auditor.", answer=TEXT, errors={404: "No auditor is elected"}
)
def who_is_auditor(cluster: Cluster, call: ApiCall) -> str:
    auditor = AuditorElection(cluster.store).auditor()
    if auditor is None:
        raise NotFound("No auditor elected", hint="start auto-recovery on some bookie")
    return f"Auditor: {auditor}"


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/trigger_audit", "Have the auditor look for lost bookies now.", answer=TEXT,
    errors={404: "No auditor is elected", 409: "Auto-recovery is disabled"},
)  # fmt: skip
def trigger_audit(cluster: Cluster, call: ApiCall) -> str:
    AutoRecoveryState(cluster.store).trigger_audit()
    return "Success trigger audit."


@ENDPOINTS.get(
    f"{PREFIX}/autorecovery/lost_bookie_recovery_delay", "Seconds that the auditor waits for a lost bookie to return.",
    answer=TEXT, errors={404: "No delay is stored: the auditor's default applies"},
)  # fmt: skip
def recovery_delay(cluster: Cluster, call: ApiCall) -> str:
    delay_s = AutoRecoverySettings(cluster.store).lost_bookie_recovery_delay_s()
    if delay_s is None:
        raise NotFound("No lostBookieRecoveryDelay is stored", hint="the auditor's default applies: 0 seconds")
    return f"lostBookieRecoveryDelay value: {delay_s}"


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/lost_bookie_recovery_delay", "Set the seconds that the auditor waits for a lost bookie.",
    body=Body((Value("delay_seconds", "Seconds.", ValueKind.INTEGER, required=True, most=DELAY_S_MAX),)), answer=TEXT,
)  # fmt: skip
def set_recovery_delay(cluster: Cluster, call: ApiCall) -> str:
    delay_s = call.body["delay_seconds"]
    AutoRecoverySettings(cluster.store).set_lost_bookie_recovery_delay_s(delay_s)
    return f"Success set lostBookieRecoveryDelay to {delay_s}"


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/decommission", "Decommission a stopped bookie, in every scope; in the background.",
    body=Body((
        Value("bookie_src", "The bookie.", required=True),
        Value("delete_cookie", "Delete its cookie once it holds nothing.", ValueKind.BOOLEAN),
    )),
    answer=TEXT, errors={409: "The bookie is registered, or auto-recovery is disabled", 503: _BUSY},
)  # fmt: skip
async def decommission(call: ApiCall) -> str:
    """Start a decommission. Source: DecommissionService."""
    bookie_id = check_bookie_id(call.body["bookie_src"])
    cluster = await call.service.cluster()
    await asyncio.to_thread(_check_stopped, cluster, bookie_id)
    if not await asyncio.to_thread(AutoRecoverySettings(cluster.store).is_enabled):
        raise Conflict("Auto-recovery is disabled", hint="enable it first")
    call.service.decommission_in_background(bookie_id, delete_cookie=call.body.get("delete_cookie", False))
    return f"Success send decommission Bookie command {bookie_id}"
