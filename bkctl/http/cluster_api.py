"""The endpoints of a cluster: ledgers, registered bookies, auto-recovery. Every bookie answers them, and a gateway.

A ledger of scope 0 goes by its decimal id, as in Apache's answers; one of another scope by its qualified name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from decimal import ROUND_DOWN, Decimal
from itertools import islice
from typing import Any, Final

from starlette.responses import Response

from bkctl.client.disk_space import disk_space
from bkctl.client.ledger import LedgerEntry, ReadHandle
from bkctl.errors import BkctlError, Conflict, LedgerNotFound, NotFound, UsageError
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
    Value,
    json_answer,
    json_text,
    list_of,
    map_of,
    nullable,
    object_of,
    streamed_object,
    text_answer,
)
from bkctl.http.service import next_of
from bkctl.ids import LedgerId, check_bookie_id, parse_scope_id, resolve_ledger, to_signed
from bkctl.metadata.admin.overview import cluster_info
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.underreplication import LedgerUnderreplicationManager, UnderreplicatedLedger

CLUSTER: Final = Endpoints(of_bookie=False)

#: Every scope, where a scope is asked for.
ALL_SCOPES: Final = "*"
#: Source: ListLedgerService.LIST_LEDGER_BATCH_SIZE, ReadLedgerEntryService.ENTRIES_PER_PAE.
LEDGERS_A_PAGE: Final = 100
ENTRIES_A_PAGE: Final = 1000
LIMIT_MAX: Final = 1_000_000
#: Sent as one piece; what is held of an endless answer.
BATCH_COUNT: Final = 1000
BATCH_SIZE_BYTES: Final = 1 << 20
_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
DELAY_S_MAX: Final = (1 << 31) - 1

_LEDGER_ID = Value("ledger_id", "The ledger's id, in any text form.")
_SCOPE_ID = Value("ledger_scope_id", "The ledger's scope (BP-35); 0 where it is not given.")
_QUALIFIED_NAME = Value("ledger_qualified_name", "Scope and id in one: 32 hex digits, or a UUID. Instead of ledger_id.")
_ONE_LEDGER = (_LEDGER_ID, _SCOPE_ID, _QUALIFIED_NAME)
_SCOPES = Value("ledger_scope_id", f"Ledgers of this scope (BP-35), 0 where it is not given; {ALL_SCOPES}: of all.")
_NO_LEDGER = {404: "There is no such ledger"}

_METADATA: Final = object_of(
    ledgerId={"type": ["integer", "string"]},
    metadataFormatVersion=INTEGER,
    ensembleSize=INTEGER,
    writeQuorumSize=INTEGER,
    ackQuorumSize=INTEGER,
    state={"type": "string", "enum": ["OPEN", "IN_RECOVERY", "CLOSED"]},
    length=INTEGER,
    lastEntryId=INTEGER,
    ctime=INTEGER,
    digestType=nullable("string"),
    password=STRING,
    customMetadata=map_of(STRING),
    closed=BOOLEAN,
    allEnsembles=map_of(list_of(object_of(id=STRING))),
    ctoken=INTEGER,
    ledgerScopeId=STRING,
    ledgerQualifiedName=STRING,
)


# --- ledgers ---------------------------------------------------------------------------------------------------------


def _ledger(call: Call) -> LedgerId:
    given = {name: call.values.get(name) for name in ("ledger_id", "ledger_scope_id", "ledger_qualified_name")}
    ledger = resolve_ledger(**given)
    if ledger is None:
        raise UsageError("No ledger is named", hint="add ledger_id or ledger_qualified_name")
    return ledger


def _scope(call: Call) -> int | None:
    text = call.values.get("ledger_scope_id", "0")
    return None if text == ALL_SCOPES else parse_scope_id(text)


def metadata_object(ledger: LedgerId, found: VersionedMetadata, *, with_password: bool = True) -> dict[str, Any]:
    """A ledger's metadata as Apache's server gives it, and the two names of BP-35.

    The password is empty unless it is asked for.
    An id of a scope ≠ 0 is a string, for it may have more digits than JSON's readers keep. Source: LedgerMetadataImpl.
    """
    import base64

    metadata = found.metadata
    return {
        "ledgerId": str(ledger.ledger_id) if ledger.is_scoped else to_signed(ledger.ledger_id),
        "metadataFormatVersion": metadata.format_version,
        "ensembleSize": metadata.ensemble_size,
        "writeQuorumSize": metadata.write_quorum_size,
        "ackQuorumSize": metadata.ack_quorum_size,
        "state": metadata.state.name,
        "length": metadata.length,
        "lastEntryId": metadata.last_entry_id,
        "ctime": -1 if found.ctime_ms is None else found.ctime_ms,
        "digestType": None if metadata.digest_type is None else _digest_name(metadata.digest_type.name),
        "password": base64.b64encode((metadata.password or b"") if with_password else b"").decode(),
        "customMetadata": {
            key: base64.b64encode(metadata.custom_metadata[key]).decode() for key in sorted(metadata.custom_metadata)
        },
        "closed": metadata.is_closed,
        "allEnsembles": {
            str(each.first_entry_id): [{"id": bookie} for bookie in each.bookies] for each in metadata.ensembles
        },
        "ctoken": metadata.c_token or 0,
        "ledgerScopeId": str(ledger.scope_id),
        "ledgerQualifiedName": ledger.qualified_name,
    }


def _digest_name(name: str) -> str:
    """The name in Java's API. Source: DigestType."""
    return "MAC" if name == "HMAC" else name


@CLUSTER.delete(
    f"{PREFIX}/ledger/delete", "Delete a ledger; its entries go when bookies collect garbage.",
    values=_ONE_LEDGER, answer=STRING, errors=_NO_LEDGER,
)  # fmt: skip
async def delete_ledger(call: Call) -> Response:
    ledger = _ledger(call)
    bookkeeper = await call.service.bookkeeper()
    await bookkeeper.delete_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
    return json_answer(f"Deleted ledger: {ledger}")


@CLUSTER.get(
    f"{PREFIX}/ledger/list", "The ledgers of a scope, perhaps with their metadata; streams.",
    values=(
        Value("print_metadata", "With each ledger's metadata.", Kind.BOOLEAN),
        Value("decode_meta", "Metadata as an object, not as the text that is stored.", Kind.BOOLEAN),
        Value("page", f"With metadata: {LEDGERS_A_PAGE} a page, from 1 on, which has one less.", Kind.INTEGER,
              least=1, most=1 << 31),
        _SCOPES,
        Value("after", "Only ledgers behind this one, in any text form."),
        Value("limit", "At most so many.", Kind.INTEGER, least=1, most=LIMIT_MAX),
    ),
    answer=map_of({"type": ["null", "string", "object"]}),
)  # fmt: skip
async def list_ledgers(call: Call) -> Response:
    """Source: ListLedgerService. The first page is one short there, and so it is here."""
    values = call.values
    scope = _scope(call)
    after = LedgerId.parse(values["after"], None) if "after" in values else None
    if after is not None and scope is not None and after.scope_id != scope:
        raise UsageError(f"after names a ledger of scope {after.scope_id}, and the list is of scope {scope}")
    cluster = await call.service.cluster()
    ledgers = await asyncio.to_thread(cluster.ledgers.ledgers, scope, after)
    if not values.get("print_metadata", False):
        ids = islice(ledgers, values.get("limit"))
        return await streamed_object(_batches(ids, lambda batch: [(str(each), "null") for each in batch]))
    if "page" in values:
        first = (values["page"] - 1) * LEDGERS_A_PAGE
        # Ledgers are counted from 1 on, and page 1 begins with number 0.
        ledgers = islice(ledgers, max(first - 1, 0), first + LEDGERS_A_PAGE - 1)
    decode = values.get("decode_meta", False)
    found = cluster.ledgers.read_many(islice(ledgers, values.get("limit")))
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
            metadata = replace(found.metadata, c_token=found.metadata.c_token or 0)
            if not with_password:
                metadata = replace(metadata, password=b"")
            # Java has one U+FFFD for half a surrogate pair, Python one for each of its bytes.
            data = _SURROGATE.sub("\ufffd".encode(), metadata.serialize())
            yield str(ledger), json_text(data.decode("utf-8", "replace"))


@CLUSTER.get(
    f"{PREFIX}/ledger/metadata", "One ledger's metadata, its password included.",
    values=_ONE_LEDGER, answer=map_of(_METADATA), errors=_NO_LEDGER,
)  # fmt: skip
async def ledger_metadata(call: Call) -> Response:
    ledger = _ledger(call)
    cluster = await call.service.cluster()
    found = await asyncio.to_thread(cluster.ledgers.read, ledger)
    return json_answer({str(ledger): metadata_object(ledger, found, with_password=call.sees_secrets)})


@CLUSTER.get(
    f"{PREFIX}/ledger/read", "A ledger's entries up to the last one that is confirmed; streams.",
    values=(
        *_ONE_LEDGER,
        Value("start_entry_id", "The first entry, 0 where it is not given.", Kind.INTEGER),
        Value("end_entry_id", "The last entry, included; -1: the last one there is.", Kind.INTEGER, least=-1),
        Value("page", f"{ENTRIES_A_PAGE} entries, from page 1 on.", Kind.INTEGER, least=1, most=1 << 31),
        Value("encoding", "What payloads are: ascii (as Apache's, lossy), utf8 (lossy), hex, base64.",
              choices=("ascii", "utf8", "hex", "base64")),
    ),
    answer=map_of(STRING), errors=_NO_LEDGER,
)  # fmt: skip
async def read_ledger(call: Call) -> Response:
    """Source: ReadLedgerEntryService."""
    import base64

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
        "base64": lambda payload: base64.b64encode(payload).decode(),
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
            async with aclosing(_read(reader, first, last)) as entries:
                async for entry in entries:
                    value = json_text(text(bytes(entry.payload)))
                    batch.append((str(entry.entry_id), value))
                    size += len(value)
                    if size >= BATCH_SIZE_BYTES or len(batch) >= BATCH_COUNT:
                        yield batch
                        batch, size = [], 0
        if batch:
            yield batch


async def _read(reader: ReadHandle, first: int, last: int) -> AsyncGenerator[LedgerEntry, None]:
    async for entry in reader.read(first, last):
        yield entry


# --- bookies ---------------------------------------------------------------------------------------------------------


async def _registered(cluster: Cluster) -> list[RegisteredBookie]:
    return await asyncio.to_thread(cluster.bookies.list, include_down=False)


@CLUSTER.get(
    f"{PREFIX}/bookie/list_bookies", "The registered bookies, writable ones or read-only ones.",
    values=(
        Value("type", "ro: those that are read-only; anything else: those that are writable."),
        Value("print_hostnames", "With the host that each is to be reached at.", Kind.BOOLEAN),
    ),
    answer=map_of(nullable("string")),
)  # fmt: skip
async def list_bookies(call: Call) -> Response:
    """Source: ListBookiesService."""
    state = "ro" if call.values.get("type") == "ro" else "rw"
    wants_host = call.values.get("print_hostnames", False)
    found = {}
    for bookie in await _registered(await call.service.cluster()):
        if bookie.state == state:
            found[bookie.bookie_id] = bookie.address[0] if wants_host and bookie.address else None
    return json_answer(found)


@CLUSTER.get(
    f"{PREFIX}/bookie/list_bookie_info", "Free and total space of each registered bookie, as it says itself.",
    answer=map_of(STRING), errors={404: "No bookie answers"},
)  # fmt: skip
async def list_bookie_info(call: Call) -> Response:
    """Source: ListBookieInfoService."""
    bookkeeper = await call.service.bookkeeper()
    bookies = await _registered(bookkeeper.cluster)
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
    return json_answer({**found, "ClusterInfo: ": _space_text(free_total, total_total)})


def _space_text(free: int, total: int) -> str:
    return f"{{Free: {free}{_readable(free)}, Total: {total}{_readable(total)}}}"


def _readable(size: int) -> str:
    """In thousands, three digits, rounded down, without zeros at the end; nothing below 1000."""
    value, unit = Decimal(size), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return ""
    text = f"{value.quantize(Decimal('0.001'), ROUND_DOWN):f}".rstrip("0").rstrip(".")
    return f"({text}{('', 'KB', 'MB', 'GB', 'TB')[unit]})"


@CLUSTER.get(
    f"{PREFIX}/bookie/cluster_info", "The cluster: its auditor, whether ledgers are under-replicated, bookies counted.",
    answer=object_of(
        auditorElected=BOOLEAN, auditorId=STRING, clusterUnderReplicated=BOOLEAN, ledgerReplicationEnabled=BOOLEAN,
        totalBookiesCount=INTEGER, writableBookiesCount=INTEGER, readonlyBookiesCount=INTEGER,
        unavailableBookiesCount=INTEGER, ledgerScopesBookiesCount=INTEGER,
    ),
)  # fmt: skip
async def show_cluster(call: Call) -> Response:
    """Source: ClusterInfoService."""
    info = await asyncio.to_thread(cluster_info, await call.service.cluster())
    return json_answer(
        {
            "auditorElected": info.auditor_elected,
            "auditorId": info.auditor_id or "",
            "clusterUnderReplicated": info.underreplicated,
            "ledgerReplicationEnabled": info.replication_enabled,
            "totalBookiesCount": info.bookie_count,
            "writableBookiesCount": info.writable_count,
            "readonlyBookiesCount": info.read_only_count,
            "unavailableBookiesCount": info.down_count,
            "ledgerScopesBookiesCount": info.scopes_count,
        }
    )


# --- auto-recovery ---------------------------------------------------------------------------------------------------

_ENABLED: Final = object_of(enabled=BOOLEAN)
_BUSY: Final = "Another such request is being worked on"


async def _replication(call: Call) -> LedgerUnderreplicationManager:
    return LedgerUnderreplicationManager((await call.service.cluster()).store)


@CLUSTER.get(f"{PREFIX}/autorecovery/status", "Whether auto-recovery is on.", answer=_ENABLED)
async def recovery_status(call: Call) -> Response:
    replication = await _replication(call)
    return json_answer({"enabled": await asyncio.to_thread(replication.is_enabled)})


@CLUSTER.put(
    f"{PREFIX}/autorecovery/status", "Switch auto-recovery on or off.",
    values=(Value("enabled", "true or false.", Kind.BOOLEAN, required=True),), answer=_ENABLED,
)  # fmt: skip
async def switch_recovery(call: Call) -> Response:
    replication = await _replication(call)
    wanted = call.values["enabled"]

    def switch() -> bool:
        if replication.is_enabled() != wanted:
            (replication.enable if wanted else replication.disable)()
        return replication.is_enabled()

    return json_answer({"enabled": await asyncio.to_thread(switch)})


@CLUSTER.put(
    f"{PREFIX}/autorecovery/bookie", "Copy what lost bookies hold to others, in every scope; in the background.",
    body=Body((
        Value("bookie_src", "The lost bookies.", Kind.TEXTS, required=True),
        Value("delete_cookie", "Delete their cookies when nothing is left on them.", Kind.BOOLEAN),
    )),
    answer=TEXT, errors={409: "A bookie whose cookie is to be deleted is registered", 503: _BUSY},
)  # fmt: skip
async def recover_bookie(call: Call) -> Response:
    """Source: RecoveryBookieService, which recovers the first one only."""
    assert call.body is not None
    bookies = [check_bookie_id(each) for each in call.body["bookie_src"]]
    if not bookies:
        raise UsageError("bookie_src names no bookie", hint='send {"bookie_src": ["HOST:PORT"]}')
    delete_cookie = call.body.get("delete_cookie", False)
    cluster = await call.service.cluster()
    if delete_cookie:
        for bookie_id in bookies:
            await _check_stopped(cluster, bookie_id)
    call.service.recover_in_background(bookies, delete_cookie=delete_cookie)
    return text_answer("Success send recovery request command.")


async def _check_stopped(cluster: Cluster, bookie_id: str) -> None:
    found = await asyncio.to_thread(cluster.bookies.get, bookie_id)
    if found is not None and found.state != "down":
        raise Conflict(f"Bookie {bookie_id} is registered ({found.state})", hint="stop it first")


@CLUSTER.get(
    f"{PREFIX}/autorecovery/list_under_replicated_ledger", "Ledgers that are marked under-replicated.",
    values=(
        Value("missingreplica", "Only those that lack entries on this bookie."),
        Value("excludingmissingreplica", "Only those that lack none on this bookie."),
        Value("printmissingreplica", "With the bookies that lack entries.", Kind.FLAG),
        _SCOPES,
    ),
    answer={"oneOf": [list_of({"type": ["integer", "string"]}), map_of(list_of(STRING))]},
    errors={404: "No ledger is under-replicated"},
)  # fmt: skip
async def list_underreplicated(call: Call) -> Response:
    """Source: ListUnderReplicatedLedgerService."""
    missing, excluded = (call.values.get(name, "").strip() for name in ("missingreplica", "excludingmissingreplica"))
    replication = await _replication(call)
    marks = await asyncio.to_thread(replication.list, _scope(call))

    def fits(mark: UnderreplicatedLedger | BkctlError) -> bool:
        if isinstance(mark, BkctlError):
            return not missing and not excluded
        there = mark.missing_replicas
        return (not missing or missing in there) and (not excluded or excluded not in there)

    found: dict[LedgerId, tuple[str, ...]] = {}
    while batch := await next_of(marks, BATCH_COUNT):
        for ledger, mark in batch:
            if fits(mark):
                found[ledger] = () if isinstance(mark, BkctlError) else mark.missing_replicas
        if len(found) > LIMIT_MAX:
            raise UsageError(f"More than {LIMIT_MAX} ledgers are under-replicated", hint="ask for one bookie's")
    if not found:
        raise NotFound("No under replicated ledgers found")
    if "printmissingreplica" in call.values:
        return json_answer({str(ledger): replicas for ledger, replicas in found.items()})
    return json_answer([str(each) if each.is_scoped else to_signed(each.ledger_id) for each in found])


@CLUSTER.get(
    f"{PREFIX}/autorecovery/who_is_auditor", "The auditor.", answer=TEXT, errors={404: "No auditor is elected"}
)
async def who_is_auditor(call: Call) -> Response:
    replication = await _replication(call)
    auditor = await asyncio.to_thread(replication.auditor)
    if auditor is None:
        raise NotFound("No auditor elected", hint="start auto-recovery on some bookie")
    return text_answer(f"Auditor: {auditor}")


@CLUSTER.put(
    f"{PREFIX}/autorecovery/trigger_audit", "Have the auditor look for lost bookies now.", answer=TEXT,
    errors={404: "No auditor is elected", 409: "Auto-recovery is disabled"},
)  # fmt: skip
async def trigger_audit(call: Call) -> Response:
    replication = await _replication(call)
    await asyncio.to_thread(replication.trigger_audit)
    return text_answer("Success trigger audit.")


@CLUSTER.get(
    f"{PREFIX}/autorecovery/lost_bookie_recovery_delay", "Seconds that the auditor waits for a bookie to come back.",
    answer=TEXT, errors={404: "None is stored: it is the auditor's default"},
)  # fmt: skip
async def recovery_delay(call: Call) -> Response:
    replication = await _replication(call)
    delay_s = await asyncio.to_thread(replication.lost_bookie_recovery_delay_s)
    if delay_s is None:
        raise NotFound("No lostBookieRecoveryDelay is stored", hint="the auditor's own default holds: 0 seconds")
    return text_answer(f"lostBookieRecoveryDelay value: {delay_s}")


@CLUSTER.put(
    f"{PREFIX}/autorecovery/lost_bookie_recovery_delay", "Set the seconds that the auditor waits.",
    body=Body((Value("delay_seconds", "Seconds.", Kind.INTEGER, required=True, most=DELAY_S_MAX),)), answer=TEXT,
)  # fmt: skip
async def set_recovery_delay(call: Call) -> Response:
    assert call.body is not None
    delay_s = call.body["delay_seconds"]
    replication = await _replication(call)
    await asyncio.to_thread(replication.set_lost_bookie_recovery_delay_s, delay_s)
    return text_answer(f"Success set lostBookieRecoveryDelay to {delay_s}")


@CLUSTER.put(
    f"{PREFIX}/autorecovery/decommission", "Empty a bookie that is stopped, in every scope; in the background.",
    body=Body((
        Value("bookie_src", "The bookie.", required=True),
        Value("delete_cookie", "Delete its cookie when nothing is left on it.", Kind.BOOLEAN),
    )),
    answer=TEXT, errors={409: "The bookie is registered, or auto-recovery is disabled", 503: _BUSY},
)  # fmt: skip
async def decommission(call: Call) -> Response:
    """Source: DecommissionService."""
    assert call.body is not None
    bookie_id = check_bookie_id(call.body["bookie_src"])
    await _check_stopped(await call.service.cluster(), bookie_id)
    replication = await _replication(call)
    if not await asyncio.to_thread(replication.is_enabled):
        raise Conflict("Auto-recovery is disabled", hint="enable it first")
    call.service.decommission_in_background(bookie_id, delete_cookie=call.body.get("delete_cookie", False))
    return text_answer(f"Success send decommission Bookie command {bookie_id}")
