"""The same requests to Apache's bookie and to ours, in scope 0: the same answers byte for byte, and the same files."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.servers import BOOKKEEPER_VERSION, INTERLEAVED, SORTED, ApacheBookie, Java, ZooKeeperServer, format_cluster
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.config import BookieConfig
from bkctl.files.journal import JournalReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import HEADER_SIZE
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol import v2, v3
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    AuthMessage,
    BatchReadRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadLacRequest,
    ReadRequest,
    Request,
    StartTlsRequest,
    WriteLacRequest,
)

pytestmark = [pytest.mark.java, pytest.mark.releases]

#: Earlier releases have no batch reads, or others, and read another BOOKIE_STATUS.
IS_LATEST = tuple(map(int, BOOKKEEPER_VERSION.split(".")[:2])) >= (4, 18)
#: Ids of one, two and six bytes, whose directories and varints differ.
LEDGERS = [LedgerId(0, 7), LedgerId(0, 70_000), LedgerId(0, 0x1234_5678_9ABC)]
NOWHERE = LedgerId(0, 99)
FENCED_FIRST = LedgerId(0, 100)
WRONG = b"w" * 20


def digest(ledger: LedgerId) -> DigestManager:
    return DigestManager(ledger, DigestType.CRC32C, b"secret")


def add(ledger: LedgerId, entry_id: int, size: int = 100, **changes: Any) -> AddRequest:
    payload = bytes((entry_id % 251,)) * size
    by = digest(ledger)
    body = by.seal(entry_id, entry_id - 1, (entry_id + 1) * size, payload) + payload
    return AddRequest(ledger, entry_id, by.master_key, body)._replace(**changes)


def written(count: int = 40) -> list[Request]:
    """Adds to several ledgers by turns, explicit LACs, and a fence in between."""
    requests: list[Request] = []
    for entry_id in range(count):
        requests += [add(ledger, entry_id, size=entry_id * 97 % 1500) for ledger in LEDGERS]
        if entry_id == count // 2:
            by = digest(LEDGERS[0])
            requests.append(WriteLacRequest(LEDGERS[0], entry_id, by.master_key, by.seal_lac(entry_id)))
            requests.append(ForceLedgerRequest(LEDGERS[0]))
    fenced = LEDGERS[1]
    requests.append(ReadRequest(fenced, LAST_ENTRY, digest(fenced).master_key, fence=True))
    requests.append(add(fenced, count))
    requests.append(add(fenced, count, recovery_add=True))
    requests.append(add(fenced, count + 1, recovery_add=True, high_priority=True))
    return requests


def asked() -> list[Request]:
    """Return requests for entries, wrong ones among them."""
    ledger = LEDGERS[0]
    by = digest(ledger)
    return [
        *(ReadRequest(each, entry_id) for each in LEDGERS for entry_id in (0, 1, 39, LAST_ENTRY, 1000)),
        ReadRequest(NOWHERE, 0),
        ReadRequest(NOWHERE, LAST_ENTRY),
        ReadRequest(ledger, 0, by.master_key, fence=True),
        ReadRequest(ledger, 0, WRONG, fence=True),
        ReadRequest(ledger, 1000, by.master_key, fence=True),
        ReadRequest(FENCED_FIRST, LAST_ENTRY, by.master_key, fence=True),
        add(ledger, 50, master_key=WRONG),
    ]


def asked_of_v3() -> list[Request]:
    ledger = LEDGERS[2]
    by = digest(ledger)
    return [
        add(ledger, 50, body=b"0123456789"),
        ReadRequest(ledger, 0, None, fence=True),
        ReadRequest(ledger, LAST_ENTRY, previous_lac=3, timeout_ms=1),
        ReadRequest(ledger, LAST_ENTRY, previous_lac=3, timeout_ms=1, piggyback=True),
        ReadRequest(ledger, LAST_ENTRY, previous_lac=1000, timeout_ms=1, piggyback=True),
        ReadRequest(ledger, LAST_ENTRY, previous_lac=1000, timeout_ms=1),
        ReadRequest(ledger, 5, previous_lac=3, timeout_ms=1, piggyback=True),
        ReadRequest(ledger, 5, previous_lac=3),
        ReadRequest(NOWHERE, LAST_ENTRY, previous_lac=0, timeout_ms=1),
        *(ReadLacRequest(each) for each in (*LEDGERS, NOWHERE, FENCED_FIRST)),
        *(ListEntriesRequest(each) for each in (*LEDGERS, NOWHERE)),
        ForceLedgerRequest(NOWHERE),
        WriteLacRequest(ledger, 5, WRONG, by.seal_lac(5)),
        WriteLacRequest(ledger, 5, by.master_key, b"short"),
        WriteLacRequest(ledger, 5, by.master_key, by.seal_lac(5)),
        BookieInfoRequest(0),
        AuthMessage("AuthDisabledPlugin", b"anything"),
        AuthMessage("org.example.Another", b""),
        StartTlsRequest(),
    ]


def asked_of_v2() -> list[Request]:
    ledger = LEDGERS[0]
    by = digest(ledger)
    return [
        BatchReadRequest(ledger, 0, 1, 5, 100_000),
        BatchReadRequest(ledger, 0, 2, 0, 100_000),
        BatchReadRequest(ledger, 30, 3, 100, 3000),
        BatchReadRequest(ledger, 30, 4, 100, 0),
        BatchReadRequest(ledger, 30, 5, 100, -1),
        BatchReadRequest(ledger, 30, 6, -7, 1 << 40),
        BatchReadRequest(ledger, 1000, 7, 5, 1000),
        BatchReadRequest(NOWHERE, 0, 8, 5, 1000),
        BatchReadRequest(ledger, LAST_ENTRY, 9, 5, 1000),
        BatchReadRequest(ledger, 0, 10, 2, 1000, by.master_key, fence=True),
        BatchReadRequest(ledger, 0, 11, 2, 1000, WRONG, fence=True),
        AuthMessage("AuthDisabledPlugin", b"anything"),
    ]


def of_another_version(operation: int) -> bytes:
    """A v3 request of a version that there never was."""
    message = v3.pb.Request()
    message.header.version, message.header.operation, message.header.txnId = 2, operation, 5
    message.readRequest.ledgerId = message.readRequest.entryId = 1
    message.addRequest.ledgerId = message.addRequest.entryId = 1
    message.addRequest.masterKey = message.addRequest.body = bytes(20)
    message.readLacRequest.ledgerId = 1
    return message.SerializeToString()


def asked_read_only(ledger: LedgerId) -> list[Request]:
    key = digest(ledger).master_key
    return [
        add(ledger, 50),
        add(ledger, 50, recovery_add=True),
        add(ledger, 50, high_priority=True),
        ReadRequest(ledger, 0),
        ReadRequest(ledger, LAST_ENTRY, key, fence=True),
        add(ledger, 51, high_priority=True),
        add(ledger, 51, recovery_add=True, high_priority=True),
        ReadRequest(ledger, LAST_ENTRY),
    ]


class Peer:
    """One bookie, asked with the very bytes of a client."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(self, requests: list[Request], *, is_v2: bool) -> list[bytes]:
        """The frames of the answers, one request after the other, on one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answers = []
        for number, request in enumerate(requests):
            out: list[Any] = []
            if is_v2:
                v2.encode_request(request, out)
            else:
                v3.encode_request(1000 + number, request, out)
            writer.writelines(out)
            try:
                answers.append(await self._frame(reader))
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                answers.append(b"no answer")
        writer.close()
        return answers

    async def ask_raw(self, frame: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(struct.pack(">i", len(frame)) + frame)
        answer = await self._frame(reader)
        writer.close()
        return answer

    @staticmethod
    async def _frame(reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            return await reader.readexactly(int.from_bytes(await reader.readexactly(4)))


def told(request: Request, answer: bytes, *, is_v2: bool) -> str:
    if answer == b"no answer":
        return f"{request}: no answer"
    view = memoryview(answer)
    decoded = v2.decode_response(view, 0, len(view))[1] if is_v2 else v3.decode_response(view, 0, len(view))[2:]
    return f"{request}\n  {decoded}\n  {answer.hex(' ')}"


async def compare(apache: Peer, ours: Peer, requests: list[Request], *, is_v2: bool) -> None:
    theirs = await apache.ask(requests, is_v2=is_v2)
    mine = await ours.ask(requests, is_v2=is_v2)
    assert b"no answer" not in theirs, requests[theirs.index(b"no answer")]
    differences = [
        f"{told(request, one, is_v2=is_v2)}\n  ours:{told(request, other, is_v2=is_v2)}"
        for request, one, other in zip(requests, theirs, mine, strict=True)
        if one != other
    ]
    assert not differences, "\n".join(differences)


def journal_records(directory: Path) -> list[tuple[LedgerId, int, bytes]]:
    """The records of all journals; how they were grouped, so padded, is a matter of time."""
    records: list[tuple[LedgerId, int, bytes]] = []
    for path in sorted(directory.glob("current/*.txn")):
        with JournalReader.open(path) as reader:
            assert reader.version == 6
            # Apache's bookie journals no key before the fence of a ledger that it never had, and so loses the fence.
            kept = (each for each in reader.records() if each.ledger != FENCED_FIRST)
            records += [(each.ledger, each.entry_id, bytes(each.body)) for each in kept]
    return records


def files(directory: Path, pattern: str) -> dict[str, bytes]:
    """The files below `current`, by name, without zeros at their ends (space that was reserved).

    Nor is an entry log here that is nothing but a header: made ahead of time.
    """
    current = directory / "current"
    found = {path.relative_to(current).as_posix(): path.read_bytes().rstrip(b"\0") for path in current.glob(pattern)}
    return {name: data for name, data in found.items() if not name.endswith(".log") or len(data) > HEADER_SIZE}


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED])
def test_answers_and_files_are_the_same_byte_for_byte(
    zookeeper: ZooKeeperServer,
    java: Java,
    apache_bookie: Callable[..., ApacheBookie],
    tmp_path: Path,
    storage: str,
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    apache = apache_bookie(uri, storage, settings={"persistBookieStatusEnabled": "true"})
    apache.start()
    config = BookieConfig(
        bookie_port=0,
        advertised_address="127.0.0.1",
        allow_loopback=True,
        journal_directories=(str(tmp_path / "journal"),),
        ledger_directories=(str(tmp_path / "ledgers"),),
        ledger_storage_class=storage,
        persist_bookie_status_enabled=True,
        disk_usage_threshold=0.99,
        disk_usage_warn_threshold=0.98,
    )

    async def write() -> None:
        bookie = Bookie(config, cluster=cluster)
        await bookie.start()
        theirs, mine = Peer(apache.port), Peer(bookie.address[1])
        await compare(theirs, mine, written(), is_v2=False)
        await compare(theirs, mine, asked(), is_v2=False)
        await compare(theirs, mine, asked(), is_v2=True)
        await compare(theirs, mine, asked_of_v3(), is_v2=False)
        if IS_LATEST:
            await compare(theirs, mine, asked_of_v2(), is_v2=True)
        for operation in (v3.READ_ENTRY, v3.ADD_ENTRY, v3.READ_LAC):
            frame = of_another_version(operation)
            assert await mine.ask_raw(frame) == await theirs.ask_raw(frame), operation
        await bookie.stop()

    async def become_read_only() -> None:
        bookie = Bookie(config, cluster=cluster)
        await bookie.start()
        await bookie.set_read_only(True)
        await bookie.stop()

    async def ask_read_only() -> None:
        bookie = Bookie(config, cluster=cluster)
        await bookie.start()
        assert bookie.read_only
        theirs, mine = Peer(apache.port), Peer(bookie.address[1])
        await compare(theirs, mine, asked_read_only(LEDGERS[0]), is_v2=False)
        await compare(theirs, mine, asked_read_only(LEDGERS[2]), is_v2=True)
        by = digest(LEDGERS[2])
        lac = WriteLacRequest(LEDGERS[2], 5, by.master_key, by.seal_lac(5))
        rest: list[Request] = [lac, ForceLedgerRequest(LEDGERS[2]), ListEntriesRequest(LEDGERS[2])]
        await compare(theirs, mine, rest, is_v2=False)
        await bookie.stop()

    def check_files() -> None:
        ours, theirs = tmp_path / "ledgers", apache.ledger_dir
        assert journal_records(tmp_path / "journal") == journal_records(apache.journal_dir)
        for pattern in ("*.log", "**/*.idx", "lastId"):
            mine, its = files(ours, pattern), files(theirs, pattern)
            assert mine.keys() == its.keys() != set(), pattern
            for name, data in mine.items():
                assert data == its[name], name

    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        asyncio.run(write())
        apache.stop()
        check_files()
        if not IS_LATEST:
            return
        asyncio.run(become_read_only())
        shutil.copy(tmp_path / "ledgers" / "current" / "BOOKIE_STATUS", apache.ledger_dir / "current")
        apache.start()
        asyncio.run(ask_read_only())
