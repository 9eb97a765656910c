"""Endpoints of ledgers: list, metadata, entries, deletion.

A ledger of scope 0 is named by its decimal id, as in Apache's answers; a ledger of another scope by its qualified name.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from itertools import islice
from typing import Any, Final

from starlette.responses import Response

from bkctl.client.read_handle import ReadHandle
from bkctl.client.reader import LedgerEntry
from bkctl.columns import base64_text
from bkctl.errors import BkctlError, LedgerNotFound, UsageError
from bkctl.http.endpoints import (
    BATCH_COUNT,
    BOOLEAN,
    INTEGER,
    LIMIT_MAX,
    PREFIX,
    SCOPES,
    STRING,
    ApiCall,
    Endpoints,
    Value,
    ValueKind,
    json_answer,
    json_text,
    list_of,
    map_of,
    object_of,
    scope_of,
    streamed_object,
)
from bkctl.http.service import next_of
from bkctl.ids import LedgerId, resolve_ledger, to_signed
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS, ledger_row
from bkctl.metadata.ledgers import VersionedMetadata

ENDPOINTS: Final = Endpoints(of_bookie=False)

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
async def delete_ledger(call: ApiCall) -> Response:
    ledger = _ledger(call)
    bookkeeper = await call.service.bookkeeper()
    await bookkeeper.delete_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
    return json_answer(f"Deleted ledger: {ledger}")


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
async def ledger_metadata(call: ApiCall) -> Response:
    ledger = _ledger(call)
    cluster = await call.service.cluster()
    found = await asyncio.to_thread(lambda: cluster.ledgers.read(ledger))
    return json_answer({str(ledger): metadata_object(ledger, found, with_password=call.sees_secrets)})


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
