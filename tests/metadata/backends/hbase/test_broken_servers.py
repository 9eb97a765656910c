"""A region server, or a node in HBase's ZooKeeper, that answers what no HBase answers."""

from __future__ import annotations

import io
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from google.protobuf import proto
from google.protobuf.message import Message
from support.waiting import LIMIT_S, eventually

from bkctl.errors import BkctlError, Corrupt, MetadataVersionConflict, TimedOut, Unauthorized, Unsupported
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.backends.hbase import hbase_pb2 as pb
from bkctl.metadata.backends.hbase import hbase_store as store_module
from bkctl.metadata.backends.hbase import regions
from bkctl.metadata.backends.hbase.hbase_store import HBaseLedgerManager, HBaseStore
from bkctl.metadata.backends.hbase.regions import TableMissing
from bkctl.metadata.backends.hbase.rows import Rows, row_key
from bkctl.metadata.backends.hbase.rpc import Retries
from bkctl.metadata.backends.sessions import PolledWatches
from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import NEW, StoreConnection

Answer = Callable[[str, Any], Message | bytes]
ATTEMPTS_MAX = 5
FIRST = row_key(5)


@pytest.fixture(autouse=True)
def _ends_by_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of an operation be over after its fifth attempt, however fast or slow this machine is."""
    pauses: Counter[Retries] = Counter()

    def pause(self: Retries) -> bool:
        pauses[self] += 1
        return pauses[self] < ATTEMPTS_MAX

    monkeypatch.setattr(Retries, "pause", pause)


def result(row: bytes, **values: bytes) -> pb.Result:
    return pb.Result(cell=[pb.Cell(row=row, qualifier=name.encode(), value=value) for name, value in values.items()])


def region(server: bytes, start: bytes = b"", end: bytes = b"", row: bytes = b"t,,1") -> pb.Result:
    info = pb.RegionInfo(
        region_id=1, table_name=pb.TableName(namespace=b"default", qualifier=b"t"), start_key=start, end_key=end
    )
    return result(row, regioninfo=b"PBUF" + info.SerializeToString(), server=server)


def multi(*results: pb.Result, index: int = 0) -> pb.MultiResponse:
    return pb.MultiResponse(
        regionActionResult=[
            pb.RegionActionResult(processed=True, resultOrException=[pb.ResultOrException(index=index, result=each)])
            for each in results
        ]
    )


class RegionServer:
    """Answers each call by `answer(method, request)`: a message, or whole frames as bytes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}".encode()
        self.calls = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, suppress(OSError, struct.error):
            stream.read(6)
            stream.read(*struct.unpack(">I", stream.read(4)))
            while True:
                data = io.BytesIO(stream.read(*struct.unpack(">I", stream.read(4))))
                header = proto.parse_length_prefixed(pb.RequestHeader, data)
                assert header is not None
                kind: dict[str, type[Message]] = {
                    "Scan": pb.ScanRequest, "Multi": pb.MultiRequest, "Mutate": pb.MutateRequest,
                    "CreateTable": pb.CreateTableRequest, "DisableTable": pb.TableRequest,
                    "DeleteTable": pb.TableRequest, "getProcedureResult": pb.GetProcedureResultRequest,
                }  # fmt: skip
                request: Any = proto.parse_length_prefixed(kind[header.method_name], data)
                self.calls += 1
                is_of_meta = header.method_name == "Scan" and request.region.value.startswith(b"hbase:meta")
                answer = self._answer("Meta" if is_of_meta else header.method_name, request)
                if isinstance(answer, bytes):
                    connection.sendall(answer)
                    return
                body = io.BytesIO()
                exception = answer if isinstance(answer, pb.ExceptionResponse) else None
                proto.serialize_length_prefixed(pb.ResponseHeader(call_id=header.call_id, exception=exception), body)
                if exception is None:
                    proto.serialize_length_prefixed(answer, body)
                connection.sendall(struct.pack(">I", body.tell()) + body.getvalue())

    def close(self) -> None:
        self._listener.close()


@contextmanager
def rows_of(answer: Answer, *, timeout_s: float = LIMIT_S, meta: pb.ServerName | None = None) -> Iterator[Rows]:
    """Yield the rows of a table whose servers, that of the directory as well, is one that answers so."""
    server = RegionServer(lambda method, request: answer(method, request))

    def standard(method: str, request: Any) -> Message | bytes:
        found = answer(method, request)
        if method == "Meta" and isinstance(found, pb.ScanResponse) and not found.results:
            return pb.ScanResponse(results=[region(server.address)])
        return found

    server._answer = standard
    name = meta or pb.ServerName(host_name="127.0.0.1", port=server.port, start_code=1)
    node = pb.ServerNode(server=name).SerializeToString()
    zookeeper: Any = SimpleNamespace(
        hosts="zk:1", timeout_s=timeout_s, run=lambda *_: (node, None), client=SimpleNamespace(get_async=None)
    )
    with ThreadPoolExecutor(4) as executor:
        rows = Rows(zookeeper, "/hbase", "t", executor, "HBase")
        try:
            yield rows
        finally:
            rows.close()
            server.close()


def to_all(answer: Message | bytes) -> Answer:
    """Answer with `answer`, whatever is asked for but the directory of regions."""
    return lambda method, request: pb.ScanResponse() if method == "Meta" else answer


CALLS: dict[str, Callable[[Rows], Any]] = {
    "get": lambda rows: rows.get([5]),
    "list": lambda rows: list(rows.ledgers(0)),
    "put": lambda rows: rows.put(5, b"x", NEW),
    "delete": lambda rows: rows.delete(5, 1),
    "count": lambda rows: rows.next_number("n"),
    "position": lambda rows: rows.position("n"),
}
NOTHING: dict[str, Message] = {"Scan": pb.ScanResponse(), "Multi": pb.MultiResponse(), "Mutate": pb.MutateResponse()}


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"list"}))
def test_answers_without_their_parts_end_in_a_timeout(call: str) -> None:
    with (
        rows_of(lambda method, _: NOTHING.get(method, pb.ScanResponse())) as rows,
        pytest.raises(TimedOut, match=f"HBase at zk:1 did not answer within {LIMIT_S:g} s") as caught,
    ):
        CALLS[call](rows)
    assert caught.value.exit_code == 6


def test_counter_that_stays_below_its_position_ends_in_a_timeout() -> None:
    answers: dict[str, Message] = {"Multi": multi(pb.Result()), "Mutate": pb.MutateResponse(processed=True)}
    with (
        rows_of(lambda method, _: answers.get(method, pb.ScanResponse())) as rows,
        pytest.raises(TimedOut, match=f"HBase left counter n of table t at 0 for {LIMIT_S:g} s, below 7"),
    ):
        rows.advance("n", 7)


@pytest.mark.parametrize("node", [b"", b"PBUF", pb.ServerNode(server=pb.ServerName(host_name="h")).SerializeToString()])
def test_node_without_host_or_port_is_refused(node: bytes) -> None:
    with rows_of(to_all(pb.ScanResponse())) as rows:
        zookeeper: Any = rows._zookeeper
        zookeeper.run = lambda *_: (node, None)
        with pytest.raises(Unsupported, match="names no server of HBase"):
            rows.get([5])


def test_directory_without_its_regions_is_a_missing_table() -> None:
    answer = pb.ScanResponse(results=[pb.Result(), result(b"t,,1", regioninfo=b"PBUF", server=b"127.0.0.1:1")])
    with rows_of(lambda *_: answer) as rows, pytest.raises(TableMissing):
        rows.get([5])


def test_change_without_its_outcome_ends_in_a_timeout() -> None:
    after = pb.RegionActionResult(resultOrException=[pb.ResultOrException(index=0, result=pb.Result())])
    answer = pb.MultiResponse(regionActionResult=[pb.RegionActionResult(), after])
    for call in ("put", "delete"):
        with rows_of(to_all(answer)) as rows, pytest.raises(TimedOut, match="does not say if it changed a row"):
            CALLS[call](rows)


@pytest.mark.parametrize("answer", [pb.ProcedureResponse(), pb.ProcedureResponse(proc_id=3)])
@pytest.mark.parametrize("change", [Rows.create_table, lambda rows: rows.drop()], ids=["create", "drop"])
def test_procedures_without_their_state_are_refused(answer: Message, change: Callable[[Rows], Any]) -> None:
    nothing = pb.ProcedureResponse()  # the same bytes as an answer without a state
    with (
        rows_of(lambda method, _: nothing if method == "getProcedureResult" else answer) as rows,
        pytest.raises(BkctlError, match="without the procedure's state"),
    ):
        change(rows)


@pytest.mark.parametrize(
    "answer",
    [
        multi(result(FIRST, v=bytes(8)), index=7),
        pb.MultiResponse(regionActionResult=[pb.RegionActionResult(), pb.RegionActionResult()]),
    ],
    ids=["place 7 of 1", "empty"],
)
def test_results_at_other_places_end_in_a_timeout(answer: pb.MultiResponse) -> None:
    match = "lacks what it must have|were not answered"
    with rows_of(to_all(answer)) as rows, pytest.raises(TimedOut, match=match):
        rows.get([5])


@pytest.mark.parametrize("version", [b"", b"\1", b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(9), b"\1" * 100_000])
def test_version_that_is_no_number_is_corrupt(version: bytes) -> None:
    row = result(FIRST, v=version, d=b"x")
    with rows_of(to_all(multi(row, row))) as rows:
        for call in (lambda: rows.get([5]), lambda: rows.put(5, b"x", 1), lambda: rows.delete(5, 1)):
            with pytest.raises(Corrupt, match=f"Row {FIRST.hex()} of HBase") as caught:
                call()
            assert len(caught.value.message) < 200


def writing(first: pb.Result) -> Answer:
    """Apply each change, but give `first` as the row FIRST after it; deletions of that row are for good."""

    def answer(method: str, request: Any) -> Message:
        if method == "Meta":
            return pb.ScanResponse()
        if method == "Scan":
            deletion = pb.Cell(row=FIRST, timestamp=I64_MAX, cell_type=14)
            return pb.ScanResponse(results=[pb.Result(cell=[deletion])])
        results = []
        for action in request.regionAction[::2]:
            mutation = action.action[0].mutation
            (column,) = mutation.column_value
            values = {each.qualifier.decode(): each.value for each in column.qualifier_value}
            results += [pb.Result(), first if mutation.row == FIRST else result(mutation.row, **values)]
        return multi(*results)

    return answer


@pytest.mark.parametrize(
    ("first", "problem"),
    [(result(FIRST, v=b"\1", d=b"x"), "where a number has 8 bytes"), (pb.Result(), "deleted for good")],
    ids=["malformed", "deleted"],
)
def test_corrupt_row_fails_alone_among_those_written_with_it(first: pb.Result, problem: str) -> None:
    with rows_of(writing(first)) as rows:
        store: Any = HBaseStore.__new__(HBaseStore)
        store.name, store._rows = "test", rows
        store._put_many = list  # of ZooKeeper's nodes: there are none
        nodes = [(f"ledgers/{ledger:032x}", b"value", NEW) for ledger in (4, 5, 6)]
        before, corrupt, after = store.put_many(nodes)
    assert isinstance(corrupt, Corrupt)
    assert problem in corrupt.message
    assert isinstance(before, int)
    assert isinstance(after, int)


def test_a_refused_table_is_the_error_of_each_row_and_stops_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = HBaseStore.__new__(HBaseStore)
    error = Unauthorized("no right to write")
    store._rows = MagicMock()
    store._rows.put_many.side_effect = error
    monkeypatch.setattr(ZooKeeperStore, "put_many", lambda _, nodes: [0 for _ in nodes])
    row = (f"ledgers/{4:032x}", b"value", NEW)
    assert store.put_many([("cookies/a", b"", NEW), row, ("cookies/b", b"", NEW)]) == [0, error, 0]


def test_corrupt_row_fails_alone_among_those_read_and_watched_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "WATCH_POLL_S", 0.01)
    metadata = LedgerMetadata(1, 1, 1, None, None, (Fragment(0, ("b:1",)),), format_version=1).serialize()
    versions = {row_key(ledger): (1).to_bytes(8) for ledger in (4, 5, 6)}

    def answer(method: str, request: Any) -> Message:
        if method == "Meta":
            return pb.ScanResponse()
        gets = [action.get.row for action in request.regionAction[0].action]
        results = [
            pb.ResultOrException(index=at, result=result(row, v=versions[row], d=metadata))
            for at, row in enumerate(gets)
        ]
        return pb.MultiResponse(regionActionResult=[pb.RegionActionResult(resultOrException=results)])

    with rows_of(answer) as rows:
        store: Any = HBaseStore.__new__(HBaseStore)
        store.name, store._rows, store._connection = "test", rows, StoreConnection()
        store._watched = PolledWatches(store._versions)
        manager = HBaseLedgerManager(store)
        seen: dict[int, list[object]] = {ledger: [] for ledger in (4, 5, 6)}
        for ledger, reports in seen.items():
            manager.watch(LedgerId(0, ledger), lambda found, reports=reports: reports.append(found))
        versions[FIRST] = b"oops"
        eventually(lambda: isinstance(seen[5][-1], Corrupt))
        versions[row_key(6)] = (2).to_bytes(8)
        eventually(lambda: len(seen[6]) == 2)
        assert [len(seen[ledger]) for ledger in (4, 5)] == [1, 2]
        manager.watch(LedgerId(0, 5), seen[5].append)
        assert isinstance(seen[5][-1], Corrupt)
        read = dict(manager.read_many(LedgerId(0, ledger) for ledger in (4, 5, 6)))
        with pytest.raises(Corrupt):
            list(manager.values([LedgerId(0, 4), LedgerId(0, 5)]))
        store._connection.begin_close()
        store._connection.threads["rows"].join()
    assert [type(found) for found in read.values()] == [VersionedMetadata, Corrupt, VersionedMetadata]


def test_counter_that_is_no_number_is_corrupt() -> None:
    with rows_of(to_all(pb.MutateResponse(result=result(b"\xffn", c=b"\xff" * 30)))) as rows, pytest.raises(Corrupt):
        rows.next_number("n")


@pytest.mark.parametrize(
    "found",
    [[b"\0" * 17], [row_key(7)], [b"\xff" * 17], [b"\x09" + bytes(15) + b"\2", b"\x09" + bytes(15) + b"\1"]],
    ids=["always the first", "of another bucket", "of the last", "descending"],
)
def test_listing_ends_where_a_server_gives_rows_that_it_must_not(found: list[bytes]) -> None:
    answer = pb.ScanResponse(results=[result(row, v=bytes(8)) for row in found], more_results_in_region=True)
    with rows_of(to_all(answer)) as rows, pytest.raises(TimedOut, match="rows that were not asked for"):
        list(islice(rows.ledgers(0), 1000))


def test_directory_that_repeats_its_regions_for_ever_ends_in_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_META_PAGE_SIZE", 2)
    page = pb.ScanResponse(results=[region(b"127.0.0.1:1", row=row) for row in (b"t,a,1", b"t,b,1")])
    with rows_of(lambda *_: page) as rows, pytest.raises(TimedOut, match="rows that were not asked for"):
        rows.get([5])
    monkeypatch.setattr(regions, "_META_PAGE_SIZE", 1)
    monkeypatch.setattr(regions, "_REGIONS_MAX", 100)
    count = iter(range(1_000_000))

    def endless(method: str, request: Any) -> Message:
        return pb.ScanResponse(results=[region(b"127.0.0.1:1", row=b"t,%08d,1" % next(count))])

    with rows_of(endless, timeout_s=60) as rows, pytest.raises(BkctlError, match="more than 100 regions"):
        rows.get([5])
    assert next(count) < 200


@pytest.mark.parametrize(
    "server",
    [b"h" * 70 + b".example:1", b"a\0b:1", b"127.0.0.1:99999", b"127.0.0.1:" + b"9" * 5000, "h:²".encode(), b":1"],
    ids=["label too long", "zero byte", "port 99999", "port of 5,000 digits", "port ²", "no host"],
)
def test_address_that_no_server_has_ends_in_a_timeout(server: bytes) -> None:
    with (
        rows_of(lambda *_: pb.ScanResponse(results=[region(server)])) as rows,
        pytest.raises(TimedOut) as caught,
    ):
        rows.get([5])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("host", "port"), [("h" * 70 + ".example", 1), ("a\0b", 1), ("127.0.0.1", 1 << 31)])
def test_node_in_zookeeper_that_names_no_address_ends_in_a_timeout(host: str, port: int) -> None:
    meta = pb.ServerName(host_name=host, port=port, start_code=1)
    with rows_of(to_all(b""), meta=meta) as rows, pytest.raises(TimedOut):
        rows.get([5])


def test_exception_of_any_length_is_a_short_message() -> None:
    name, text = "x." + "y" * 1_000_000, "z" * 5_000_000
    final = pb.ExceptionResponse(exception_class_name=name, stack_trace=text, do_not_retry=True)
    with rows_of(to_all(final)) as rows, pytest.raises(BkctlError) as caught:
        rows.get([5])
    assert len(str(caught.value)) < 2000
    passing = pb.ExceptionResponse(exception_class_name=name, stack_trace=text)
    with rows_of(to_all(passing)) as rows, pytest.raises(TimedOut) as late:
        rows.get([5])
    assert len(str(late.value)) < 2000


def test_deletions_that_hide_every_version_end_a_write() -> None:
    def hiding(method: str, request: Any) -> Message:
        if method == "Meta":
            return pb.ScanResponse()
        if method == "Scan":
            later = pb.Cell(row=FIRST, timestamp=request_version[0] + 1, cell_type=14)
            return pb.ScanResponse(results=[pb.Result(cell=[later])])
        request_version[0] = request.regionAction[0].action[0].mutation.timestamp
        return multi(pb.Result(), pb.Result())

    request_version = [0]
    with (
        rows_of(hiding, timeout_s=60) as rows,
        pytest.raises(MetadataVersionConflict, match="hid 10 versions") as caught,
    ):
        rows.put(5, b"x", NEW)
    assert caught.value.may_be_applied
