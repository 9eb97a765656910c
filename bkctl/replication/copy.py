"""Copies a ledger to another scope or another cluster, and closes the copy.

Until the copy is complete and verified, it has `bkctl.copy-of` in its custom metadata: the source's cluster and name,
and a token of the copying process. An interrupted copy is deleted; if the process died, the next copy of the same
ledger to the same place deletes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Final, NamedTuple

from bkctl.client.ensemble import check_quorums, update_metadata
from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerExists, LedgerNotFound, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.pace import Pace
from bkctl.tasks import run_to_end

#: The key in the custom metadata of an incomplete copy.
COPY_OF: Final = "bkctl.copy-of"


class CopyShape(NamedTuple):
    """The properties of a copy that differ from its source; None: as the source."""

    ensemble_size: int | None = None
    write_quorum_size: int | None = None
    ack_quorum_size: int | None = None
    digest_type: DigestType | None = None


AS_SOURCE: Final = CopyShape()


class CopiedLedger(NamedTuple):
    """A verified copy. `length` is in payload bytes; `source_open`: the source was open, and may have grown since."""

    ledger: LedgerId
    copy: LedgerId
    entry_count: int
    length: int
    source_open: bool


class CopyFailure(NamedTuple):
    """A ledger that was not copied."""

    ledger: LedgerId
    error: BkctlError


async def copy_ledgers(
    source: BookKeeper, target: BookKeeper, ledgers: Iterable[LedgerId], *, keep_going: bool = False, **settings: Any
) -> AsyncGenerator[CopiedLedger | CopyFailure]:
    """Yield the copy of each ledger as `copy_ledger` makes it with `settings`; opens and closes `target`.

    Errors are raised, or yielded with `keep_going`.
    """
    async with target:
        for ledger in ledgers:
            try:
                yield await copy_ledger(source, target, ledger, **settings)
            except BkctlError as error:
                if not keep_going:
                    raise
                yield CopyFailure(ledger, error)


async def copy_ledger(
    source: BookKeeper,
    target: BookKeeper,
    ledger: LedgerId,
    *,
    ledger_scope_id: int | None = None,
    ledger_id: int | None = None,
    new_id: bool = False,
    shape: CopyShape = AS_SOURCE,
    recovery: bool = False,
    allow_open: bool = False,
    pace: Pace | None = None,
    progress: Callable[[int], None] = lambda count: None,
    note: Callable[[str], None] = lambda _: None,
) -> CopiedLedger:
    """Copy the ledger of `source` to a new ledger of `target`, which may be the same client, and close the copy.

    `ledger_scope_id` and `ledger_id` name the copy (None: as the source; with `new_id` an id is generated). Password,
    digest type, sizes and custom metadata are the source's, except as `shape` says. Each entry's digest is verified,
    and the copy is read back and compared. `recovery` fences and closes an open source first, `allow_open` copies it up
    to its last add confirmed. `pace` bounds what is written, and may pause the copy. `progress` gets the number of
    entries copied and read back. Raise Conflict for an open source, LedgerExists, NotEnoughBookies, UsageError if
    source and copy have one name, Corrupt if the copy differs, and errors of reading and writing; the copy is deleted
    then, or `note` gets a sentence that says why it is not.
    """
    if ledger_id is not None and new_id:
        raise UsageError("A ledger id and a new id exclude each other", hint="give one of them")
    scope_id = ledger.scope_id if ledger_scope_id is None else ledger_scope_id
    to = None if new_id else LedgerId(scope_id, ledger.ledger_id if ledger_id is None else ledger_id)
    if to == ledger and source.cluster.store is target.cluster.store:
        raise UsageError(f"Ledger {ledger} cannot be copied to itself", hint="name another scope, id or cluster")
    reader = await source.open_ledger(
        ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None, recovery=recovery
    )
    async with reader:
        if not reader.is_closed and not allow_open:
            raise Conflict(
                f"Ledger {ledger} is open: a copy would end at entry {reader.last_add_confirmed}",
                hint="close it first (--recover), or copy the confirmed entries (--open)",
            )
        pace = pace or Pace()
        origin = f"{await asyncio.to_thread(source.cluster.instance_id)} {reader.ledger.qualified_name}"
        token = f"{origin} {uuid.uuid4()}".encode()
        writer = await _create(target, reader.metadata, scope_id, to, shape, token, origin.encode())
        finished_version: int | None = None
        try:
            async with writer:
                copied = await _content(reader, pace, progress, writer)
            copy = await target.open_ledger(writer.ledger_id, ledger_scope_id=writer.scope_id, password=None)
            async with copy:
                if (copy.length, (await _content(copy, pace, progress)).hex) != (copied.length, copied.hex):
                    raise Corrupt(f"Ledger {writer.ledger} differs from its source, ledger {reader.ledger}")

            def finish() -> None:
                nonlocal finished_version
                ledgers, custom = target.cluster.ledgers, _custom(reader.metadata)
                finished_version = update_metadata(
                    ledgers, writer.ledger, copy.versioned_metadata,
                    lambda metadata: metadata._replace(custom_metadata=custom),
                ).version  # fmt: skip

            await run_to_end(asyncio.to_thread(finish))
        except BaseException:
            try:
                await run_to_end(asyncio.to_thread(_remove, target, writer.ledger, token, finished_version))
            except BkctlError as error:  # the first error is the one to raise
                note(
                    f"Ledger {writer.ledger} is an unfinished copy that could not be removed ({error.message}): 'bkctl "
                    f"ledger delete {writer.ledger}' removes it"
                )
            raise
        return CopiedLedger(reader.ledger, writer.ledger, copied.entry_count, copied.length, not reader.is_closed)


class EntryHash:
    """SHA-256 of entries in order (of each its size, 8 bytes big-endian, and payload), and their number and bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.entry_count = self.length = 0

    def add(self, payload: bytes) -> None:
        """Add the next entry's payload."""
        self._hash.update(len(payload).to_bytes(8, "big"))
        self._hash.update(payload)
        self.entry_count += 1
        self.length += len(payload)

    @property
    def hex(self) -> str:
        """Return the hash of the entries so far."""
        return self._hash.hexdigest()


async def _content(
    reader: ReadHandle, pace: Pace, progress: Callable[[int], None], writer: WriteHandle | None = None
) -> EntryHash:
    """Return the hash of the entries of a ledger, and add them to `writer` (None: to none)."""
    seen = EntryHash()
    if reader.last_add_confirmed >= 0:
        async for entry in reader.read(0, reader.last_add_confirmed):
            seen.add(entry.payload)
            if pace.is_paused:
                await pace.resumed()
            if writer is not None:
                await pace.acquire(len(entry.payload))
                await writer.ready()
                writer.add(entry.payload)
            progress(1)
    return seen


async def _create(
    target: BookKeeper,
    metadata: LedgerMetadata,
    scope_id: int,
    to: LedgerId | None,
    shape: CopyShape,
    token: bytes,
    origin: bytes,
) -> WriteHandle:
    """Create the empty copy. Delete an interrupted copy of the same origin first; raise LedgerExists for any other."""
    sizes: dict[str, Any] = {
        "ensemble_size": shape.ensemble_size or metadata.ensemble_size,
        "write_quorum_size": shape.write_quorum_size or metadata.write_quorum_size,
        # Apache's old createLedger accepted an ack quorum of 0.
        "ack_quorum_size": shape.ack_quorum_size or max(metadata.ack_quorum_size, 1),
    }
    check_quorums(**sizes)
    for tries_left in (1, 0):
        try:
            return await target.create_ledger_adv(
                None if to is None else to.ledger_id,
                ledger_scope_id=scope_id,
                **sizes,
                digest_type=shape.digest_type or metadata.digest_type or DigestType.CRC32,
                password=metadata.password or b"",
                custom_metadata={**_custom(metadata), COPY_OF: token},
            )
        except LedgerExists:
            if to is None or not tries_left or not await asyncio.to_thread(_remove, target, to, origin):
                raise
    raise AssertionError


def _custom(metadata: LedgerMetadata) -> dict[str, bytes]:
    return {key: value for key, value in metadata.custom_metadata.items() if key != COPY_OF}


def _remove(target: BookKeeper, ledger: LedgerId, mark: bytes, version: int | None = None) -> bool:
    """Delete the ledger if it has `version`, or is an incomplete copy whose token begins with `mark`.

    Return False for any other ledger.
    """
    ledgers = target.cluster.ledgers
    try:
        found = ledgers.read(ledger)
        token = found.metadata.custom_metadata.get(COPY_OF)
        if found.version != version and (token is None or not token.startswith(mark)):
            return False
        ledgers.remove(ledger, found.version)
    except LedgerNotFound:
        return True
    return True
