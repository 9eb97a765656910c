"""Fixtures for the whole test tree. The servers start when the first test asks for them, once a test run."""

from __future__ import annotations

import errno
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support import compiled, servers
from support.own_bookies import OwnBookie
from support.servers import ApacheBookie, ApacheCluster, EtcdServer, HBaseServer, Java, JavaOnEtcd, ZooKeeperServer
from support.waiting import LIMIT_S

from bkctl.bookie.local import LocalCluster
from bkctl.client.ledger import BookKeeper
from bkctl.http.client import ApiClient
from bkctl.metadata.backends import sqlite
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import BookieConnection

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background of a script inherits that, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # So does a run below `nohup`, which continues without its terminal: programs get the default of a handled signal.
    signal.signal(signal.SIGHUP, lambda *_: None)


# Keep the commands of tests out of the user's audit log.
os.environ["BKCTL_AUDIT_LOG"] = "none"
# Nor are their servers' tokens, undo files and progress kept among the user's; removed at the end.
_DATA = tempfile.TemporaryDirectory(prefix="bkctl-test-")
os.environ["XDG_DATA_HOME"] = _DATA.name
os.environ["XDG_STATE_HOME"] = _DATA.name


# Time limits suit a busy machine. Tests of time-outs name their own.
os.environ["BKCTL_TIMEOUT"] = f"{LIMIT_S}s"
for function in (
    open_cluster, sqlite.SqliteStore.__init__, BookKeeper.__init__, BookieConnection.open.__func__, ApiClient.__init__,
    LocalCluster.up, LocalCluster.down,
):  # fmt: skip
    assert function.__kwdefaults__["timeout_s"]
    function.__kwdefaults__["timeout_s"] = LIMIT_S
# SQLite tells at once that a process of this machine is dead; one that is only slow is not taken for dead.
sqlite.SESSION_EXPIRY_MS = int(LIMIT_S * 1000)  # type: ignore[misc]


# The same examples in each run, and as much time as a busy machine takes; `--hypothesis-profile searching` for others.
hypothesis.settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("searching", deadline=None)
hypothesis.settings.load_profile("steady")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out, unless BKCTL_TEST_LONG asks for them, and put tests of slow servers first."""
    if not os.environ.get("BKCTL_TEST_LONG"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items[:] = _slow_servers_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _slow_servers_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests so that one process begins with Spark, and another with HBase.

    Each process has an equal part of the tests in this order, and takes others from the ends of what is left. So one
    server of each serves most of the slow tests, and none of these is the last.
    """
    spark, hbase, others = [], [], []
    for item in items:
        (spark if "tests/spark/" in item.nodeid else hbase if "hbase" in item.nodeid else others).append(item)
    share, rest = len(items) // processes, iter(others)
    ordered: list[pytest.Item] = []
    for number, group in enumerate((spark, hbase), 1):
        ordered += group
        ordered += islice(rest, max(0, number * share - len(ordered)))
    return [*ordered, *rest]


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Lets the disk fail at these bytes of a file, 512 at once as a sector does."""
    lost: dict[int, int] = {}
    pread = os.pread

    def failing(fd: int, size: int, at: int) -> bytes:
        offset = lost.get(os.fstat(fd).st_ino)
        if offset is not None and at < offset + 512 and at + size > offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", failing)
    return lambda path, offset: lost.__setitem__(os.stat(path).st_ino, offset)


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop that async tests run on: asyncio's own."""
    return "asyncio"


@pytest.fixture(scope="session")
def java() -> Java:
    """Java with Apache BookKeeper on its class path: `run_source`, `shell`, `start`."""
    return Java()


@pytest.fixture(scope="session")
def java_on_etcd() -> JavaOnEtcd:
    """As `java`, of the release whose etcd driver is published, with that driver."""
    return JavaOnEtcd()


@pytest.fixture(scope="session")
def zookeeper(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """One ZooKeeper for the test run. Use `new_root()`, and leave it running."""
    server = ZooKeeperServer(java, tmp_path_factory.mktemp("zookeeper"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def zookeeper_server(java: Java, tmp_path: Path) -> Iterator[Callable[[], ZooKeeperServer]]:
    """Makes started ZooKeepers that belong to the test alone, to be killed and started again."""
    made: list[ZooKeeperServer] = []

    def make() -> ZooKeeperServer:
        made.append(ZooKeeperServer(java, tmp_path / f"zookeeper-{len(made)}"))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for the test run. Use `new_root()`, and leave it running."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def etcd_server(tmp_path: Path) -> Iterator[Callable[..., EtcdServer]]:
    """Makes started etcds that belong to the test alone, to be killed and started again."""
    made: list[EtcdServer] = []

    def make(**options: Any) -> EtcdServer:
        made.append(EtcdServer(tmp_path / f"etcd-{len(made)}", **options))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture(scope="session")
def hbase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HBaseServer]:
    """One HBase for the test run, with the ZooKeeper that it has. Use `new_root()`, and leave it running."""
    server = HBaseServer(tmp_path_factory.mktemp("hbase"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def hbase_server(tmp_path: Path) -> Iterator[Callable[[], HBaseServer]]:
    """Makes started HBases that belong to the test alone, to be killed and started again."""
    made: list[HBaseServer] = []

    def make() -> HBaseServer:
        made.append(HBaseServer(tmp_path / f"hbase-{len(made)}"))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def own_bookie(tmp_path: Path) -> Iterator[Callable[..., OwnBookie]]:
    """Makes bookies of our own as child processes, not started: `own_bookie(metadata_uri, storage=…, settings=…)`."""
    made: list[OwnBookie] = []

    def make(metadata_uri: str, **options: Any) -> OwnBookie:
        made.append(OwnBookie(metadata_uri, tmp_path / f"own-{len(made)}", **options))
        return made[-1]

    yield make
    for bookie in made:
        bookie.kill()


@pytest.fixture(scope="session")
def _apache_cluster(
    java: Java, zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApacheCluster]:
    cluster = ApacheCluster(java, zookeeper, tmp_path_factory.mktemp("apache"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def apache_cluster(_apache_cluster: ApacheCluster) -> ApacheCluster:
    """Three Apache bookies (Sorted, Interleaved, Db storage) on one ZooKeeper root, all up; shared by the test run.

    A test may stop or kill bookies: what is down is started before the next test that asks for the cluster.
    """
    _apache_cluster.ensure_up()
    return _apache_cluster


@pytest.fixture(scope="session")
def apache_ledgers(_apache_cluster: ApacheCluster, java: Java) -> list[dict[str, Any]]:
    """The known ledgers that WriteLedgers.java wrote into `apache_cluster` in v3 and v2, as it printed them."""
    cluster = _apache_cluster
    ledgers: list[dict[str, Any]] = []
    for protocol in ("v3", "v2"):
        cluster.ensure_up()
        stop = lambda bookie_id: cluster.by_id(bookie_id).stop()  # noqa: E731
        ledgers += servers.write_ledgers(java, cluster.metadata_uri, protocol, stop=stop)
    cluster.ensure_up()
    return ledgers


@pytest.fixture
def apache_bookie(java: Java, tmp_path: Path) -> Iterator[Callable[..., ApacheBookie]]:
    """Makes Apache bookies of the test's own, not started: `apache_bookie(metadata_uri, storage, port=…, settings=…)`.

    Settings name directories of somebody else's bookie to take them over; each gets its own below tmp_path else.
    """
    made: list[ApacheBookie] = []

    def make(metadata_uri: str, storage: str = servers.SORTED, **options: Any) -> ApacheBookie:
        made.append(ApacheBookie(java, metadata_uri, tmp_path / f"apache-bookie-{len(made)}", storage, **options))
        return made[-1]

    yield make
    for bookie in made:
        bookie.kill()


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and its own certificate for 127.0.0.1."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bookie")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "bookie.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


_log_sizes: pytest.StashKey[dict[Path, int]] = pytest.StashKey()


def pytest_collection_finish() -> None:
    """Leave the collected tests, ten thousand, out of the searches for unreachable objects that many tests start."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiled"):
        compiled.require_compiled()
    item.stash[_log_sizes] = {server.log: server.log.stat().st_size for server in servers.running_servers()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show what the servers logged during a test that failed."""
    report = yield
    if report.failed:
        sizes = item.stash.get(_log_sizes, {})
        for server in servers.running_servers():
            text = server.log_tail(sizes.get(server.log, 0))
            if text:
                report.sections.append((f"log of {server.name} ({server.log})", text))
    return report
