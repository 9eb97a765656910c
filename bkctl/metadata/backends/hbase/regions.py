"""One table of HBase: where its regions are, calls to them that outlive a move or a restart, its creation and removal.

Source: ClientMetaTableAccessor, ZKConnectionRegistry, ConnectionUtils, HMaster.
"""

from __future__ import annotations

import contextlib
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

from google.protobuf.message import DecodeError, Message
from kazoo.exceptions import NoNodeError

from bkctl.errors import BkctlError, NotFound, TimedOut, Unauthorized, Unreachable, Unsupported
from bkctl.metadata.backends.hbase import hbase_pb2 as pb
from bkctl.metadata.backends.hbase import rpc
from bkctl.metadata.store import NO_CLUSTER_HINT

if TYPE_CHECKING:
    from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_META_REGION: Final = pb.RegionSpecifier(type=pb.RegionSpecifier.REGION_NAME, value=b"hbase:meta,,1")
_META_PAGE_SIZE: Final = 1000
#: More than any table has.
_REGIONS_MAX: Final = 100_000
_ADDRESS: Final = re.compile(r"(.+):([0-9]{1,5})", re.ASCII)
_PROTOBUF_MAGIC: Final = b"PBUF"
_ZNODE_MAGIC: Final = b"\xff"
#: Exceptions that HBase marks as final although another attempt may succeed: elsewhere, or once a procedure is done.
_PASSING: Final = frozenset(
    (
        "NotServingRegionException",
        "RegionMovedException",
        "RegionServerStoppedException",
        "ServerNotRunningYetException",
        "UnknownScannerException",
        "OutOfOrderScannerNextException",
    )
)


class TableMissing(NotFound):
    """The table does not exist: taken for an empty one, it would have bookies delete every ledger."""

    def __init__(self, table: HBaseTable) -> None:
        super().__init__(f"No table {table.name} in {table.where}", hint=f"restore it, or {NO_CLUSTER_HINT}")


class RegionLost(Exception):
    """The region is not where it was, or not there yet: ask again."""


class Region(NamedTuple):
    """The rows from `start` to before `end` (b"": to the last), and the server that has them."""

    name: bytes
    start: bytes
    end: bytes
    server: rpc.RegionServer

    @property
    def specifier(self) -> pb.RegionSpecifier:
        """The region as requests name it."""
        return pb.RegionSpecifier(type=pb.RegionSpecifier.REGION_NAME, value=self.name)


class HBaseTable:
    """The table `NAMESPACE:NAME`, or `NAME`, of the HBase whose znodes are below `znode` in this ZooKeeper."""

    def __init__(self, zookeeper: ZooKeeperConnection, znode: str, name: str) -> None:
        namespace, colon, qualifier = name.rpartition(":")
        self.name = name
        namespace = namespace if colon else "default"
        self._table_name = pb.TableName(namespace=namespace.encode(), qualifier=qualifier.encode())
        #: The HBase, for messages.
        self.where = f"HBase at {zookeeper.hosts}"
        self._zookeeper = zookeeper
        self._znode = znode
        self._rpc = rpc.Rpc()
        self._lock = threading.Lock()
        self._regions: list[Region] = []

    @property
    def timeout_s(self) -> float:
        """The longest wait of an operation."""
        return self._zookeeper.timeout_s

    def close(self) -> None:
        """Close the connections to HBase's servers."""
        self._rpc.close()

    # operations

    def attempt(self, work: Callable[[rpc.Retries, bool], T]) -> T:
        """Return what `work` returns, which is called again while HBase's servers or regions come, go or move.

        Its second argument is true where an earlier attempt may have been executed. Raises TimedOut, Unauthorized,
        and BkctlError for other refusals; TableMissing.
        """
        retries, repeated = rpc.Retries(self.timeout_s), False
        problem: Exception | None = None
        while True:
            try:
                return work(retries, repeated)
            except TimedOut as error:  # ZooKeeper's, for want of time
                raise error if problem is None else self._timed_out(problem) from error
            except RegionLost as error:
                problem = error
            except rpc.CallLost as error:
                repeated, problem = True, error
            except IndexError as error:
                repeated, problem = True, rpc.CallLost("an answer lacks what it must have")
                problem.__cause__ = error
            except rpc.CallRefused as error:
                if error.kind == "TableNotFoundException":
                    raise TableMissing(self) from error
                if error.is_final and error.kind not in _PASSING:
                    self._refuse(error)
                repeated, problem = True, error
            self.forget()
            if self._rpc.is_closed:
                raise Unreachable(f"The connection to {self.where} is closed") from problem
            if not retries.pause():
                raise self._timed_out(problem) from problem

    def _timed_out(self, problem: Exception) -> TimedOut:
        return TimedOut(f"{self.where} did not answer within {self.timeout_s:g} s: {problem}")

    def _refuse(self, error: rpc.CallRefused) -> NoReturn:
        if error.kind == "AccessDeniedException":
            raise Unauthorized(
                f"{self.where} refuses access to table {self.name}",
                hint="bkctl gives HBase the name of its system user, without Kerberos",
            ) from error
        raise BkctlError(f"{self.where} refused a request to table {self.name}: {error}") from error

    def call(self, server: rpc.RegionServer, method: str, request: Message, answer: type[M], retries: rpc.Retries) -> M:
        """Return a region server's answer. Raises CallLost, CallRefused."""
        return self._rpc.call(server, rpc.CLIENT_SERVICE, method, request, answer, retries.remaining_s)

    def scan(
        self, server: rpc.RegionServer, region: pb.RegionSpecifier, count: int, retries: rpc.Retries, **options: Any
    ) -> pb.ScanResponse:
        """Return up to `count` rows of a region; the scanner is closed then. Raises CallLost, CallRefused."""
        request = pb.ScanRequest(region=region, scan=pb.Scan(**options), number_of_rows=count, close_scanner=True)
        return self.call(server, "Scan", request, pb.ScanResponse, retries)

    def forget(self) -> None:
        """Look the regions up again at the next use."""
        with self._lock:
            self._regions = []

    def region(self, row: bytes, retries: rpc.Retries) -> Region:
        """Return the region of the row. Raises TableMissing, RegionLost, CallLost, CallRefused."""
        regions = self.regions(retries)
        at = bisect_right(regions, row, key=lambda region: region.start) - 1
        if at < 0 or (regions[at].end and row >= regions[at].end):
            raise RegionLost(f"a region of table {self.name} is not assigned")
        return regions[at]

    def regions(self, retries: rpc.Retries) -> list[Region]:
        """Return the table's regions that are assigned, by their first row. Raises as `region`."""
        with self._lock:
            if not self._regions:
                self._regions = self._read_regions(retries)
            return self._regions

    def _read_regions(self, retries: rpc.Retries) -> list[Region]:
        name = self.name.removeprefix("default:").encode()
        meta = self._server_in("meta-region-server", retries)
        start, end = name + b",,", name + b" ,,"
        columns = [pb.Column(family=b"info", qualifier=[b"regioninfo", b"server"])]
        is_known = False
        found: list[Region] = []
        while True:
            options = {"start_row": start, "stop_row": end, "caching": _META_PAGE_SIZE, "column": columns}
            page = self.scan(meta, _META_REGION, _META_PAGE_SIZE, retries, **options)
            for result in page.results:
                values = {cell.qualifier: cell.value for cell in result.cell}
                info = values.get(b"regioninfo", b"")
                try:
                    region = pb.RegionInfo.FromString(info.removeprefix(_PROTOBUF_MAGIC))
                except DecodeError:
                    continue
                if not region.HasField("table_name"):  # not checked by the parser
                    continue
                is_known = True
                server = _ADDRESS.fullmatch(values.get(b"server", b"").decode("utf-8", "replace"))
                if server is not None and not (region.offline or region.split):
                    place = rpc.RegionServer(server[1], int(server[2]))
                    found.append(Region(result.cell[0].row, region.start_key, region.end_key, place))
            if len(found) > _REGIONS_MAX:
                raise Unsupported(f"Table {self.name} has more than {_REGIONS_MAX:,} regions")
            if len(page.results) < _META_PAGE_SIZE:
                break
            last = page.results[-1].cell[0].row
            if last < start:
                raise rpc.CallLost(f"{meta} gave rows that were not asked for")
            start = last + b"\0"
        if not is_known:
            raise TableMissing(self)
        if not found:
            raise RegionLost(f"no region of table {self.name} is assigned")
        return found

    def _server_in(self, name: str, retries: rpc.Retries) -> rpc.RegionServer:
        """Return the server that the znode names. Raises RegionLost while there is none; NotFound without an HBase."""
        zookeeper, path = self._zookeeper, f"{self._znode}/{name}"
        try:
            data, _ = zookeeper.run(zookeeper.client.get_async, path, retries.remaining_s)
        except NoNodeError as error:
            if zookeeper.run(zookeeper.client.exists_async, self._znode, retries.remaining_s) is None:
                raise NotFound(
                    f"No HBase in ZooKeeper at {zookeeper.hosts}: it has no node {self._znode}",
                    hint="check the quorum, and name HBase's zookeeper.znode.parent as ?znode=/PATH",
                ) from error
            raise RegionLost(f"no server is registered at {path}") from error
        # 0xFF, the length of a process's name in four bytes, that name, "PBUF", the message.
        if data.startswith(_ZNODE_MAGIC):
            data = data[5 + int.from_bytes(data[1:5]) :]
        try:
            server = pb.ServerNode.FromString(data.removeprefix(_PROTOBUF_MAGIC)).server
            if not server.host_name or not server.port:
                raise DecodeError("no host and port")
        except DecodeError as error:
            raise Unsupported(f"{path} in ZooKeeper at {zookeeper.hosts} names no server of HBase") from error
        return rpc.RegionServer(server.host_name, server.port)

    # the table itself

    def exists(self) -> bool:
        try:
            self.attempt(lambda retries, _: self.regions(retries))
        except TableMissing:
            return False
        return True

    def create(self, family: bytes, splits: Sequence[bytes]) -> bool:
        """Create the table with one family and these borders of regions, and wait for it; return False if it exists."""
        schema = pb.TableSchema(
            table_name=self._table_name,
            column_families=[
                pb.ColumnFamilySchema(name=family, attributes=[pb.BytesBytesPair(first=b"VERSIONS", second=b"1")])
            ],
        )
        request = pb.CreateTableRequest(table_schema=schema, split_keys=splits)
        created = self._run_procedure("CreateTable", request, "TableExistsException")

        def wait(retries: rpc.Retries, _: bool) -> None:
            try:
                regions = self.regions(retries)
            except TableMissing as error:
                raise RegionLost(f"table {self.name} is not there yet") from error
            if len(regions) <= len(splits) and created:
                raise RegionLost(f"a region of table {self.name} is not assigned")

        self.attempt(wait)
        return created

    def drop(self) -> None:
        """Remove the table with all its rows; do nothing without one."""
        request = pb.TableRequest(table_name=self._table_name)
        with contextlib.suppress(TableMissing):
            self._run_procedure("DisableTable", request, "TableNotEnabledException")
            self._run_procedure("DeleteTable", request, "TableNotFoundException")
        self.forget()

    def _run_procedure(self, method: str, request: Message, done: str) -> bool:
        """Have the master run a procedure to its end; return False where it answers by the exception `done`."""

        def call(name: str, message: Message, answer: type[M]) -> M:
            def work(retries: rpc.Retries, _: bool) -> M:
                master = self._server_in("master", retries)
                return self._rpc.call(master, rpc.MASTER_SERVICE, name, message, answer, retries.remaining_s)

            return self.attempt(work)

        try:
            procedure = call(method, request, pb.ProcedureResponse)
        except TableMissing:
            if done == "TableNotFoundException":
                return False
            raise
        except BkctlError as error:
            if isinstance(error.__cause__, rpc.CallRefused) and error.__cause__.kind == done:
                return False
            raise
        if not procedure.HasField("proc_id"):
            raise self._incomplete(method)
        retries = rpc.Retries(self.timeout_s)
        question = pb.GetProcedureResultRequest(proc_id=procedure.proc_id)
        while (result := call("getProcedureResult", question, pb.GetProcedureResultResponse)).state == result.RUNNING:
            if not retries.pause():
                raise TimedOut(f"{self.where} did not end {method} within {self.timeout_s:g} s")
        if not result.HasField("state"):
            raise self._incomplete(method)
        if result.HasField("exception"):
            problem = result.exception.generic_exception
            if problem.class_name.endswith(done):
                return False
            raise BkctlError(
                f"{self.where} failed {method} of table {self.name}: {problem.class_name}: {problem.message}"[
                    : rpc.REFUSAL_LENGTH_MAX
                ]
            )
        return True

    def _incomplete(self, method: str) -> BkctlError:
        return BkctlError(
            f"{self.where} answered {method} of table {self.name} without the procedure's state",
            hint="look for the table in HBase's shell, and try again",
        )
