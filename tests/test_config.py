from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from bkctl.config import BookieConfig, read_properties
from bkctl.errors import NotFound, Unsupported, UsageError
from bkctl.formats.record import RECORD_SIZE_BYTES_MAX


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_properties_read_as_java_reads_them(tmp_path: Path) -> None:
    write(tmp_path / "more.conf", "included = yes\n")
    path = write(
        tmp_path / "bk.conf",
        "# comment\n! comment too\n\n"
        "plain=1\ncolon : 2\nspace 3\n  indented=4\n"
        "long = a,\\\n   b, c\n"
        "repeated=x\nrepeated=y\n"
        r"escaped=tab\there\, and \u0041 back\\slash"
        "\n"
        "empty=\n"
        "base=/data\nderived=${base}/journal\nunknown=${nothing}\n"
        "include = more.conf\n",
    )
    properties = read_properties(path)
    assert properties["plain"] == "1"
    assert properties["colon"] == "2"
    assert properties["space"] == "3"
    assert properties["indented"] == "4"
    assert properties.list("long") == ("a", "b", "c")
    assert properties["repeated"] == "x"
    assert properties.list("repeated") == ("x", "y")
    assert properties["escaped"] == "tab\there, and A back\\slash"
    assert properties["empty"] == ""
    assert properties["derived"] == "/data/journal"
    assert properties["unknown"] == "${nothing}"
    assert properties["included"] == "yes"


def test_variables_that_grow_without_bound_are_refused(tmp_path: Path) -> None:
    """Each level of ten references multiplies the size by ten."""
    lines = [f"{name}={f'${{{below}}}' * 10}" for name, below in zip("abcdef", "bcdefj", strict=True)]
    (tmp_path / "bk.conf").write_text("\n".join(["# small", *lines, "j=xxxxxxxxxx"]))
    with pytest.raises(UsageError, match=r"bk\.conf line 2: a: variables make the file longer than 4194304"):
        read_properties(tmp_path / "bk.conf")
    (tmp_path / "bk.conf").write_text("\n".join([*lines[2:], "j=xxxxxxxxxx"]))
    assert read_properties(tmp_path / "bk.conf")["c"] == "x" * 100_000


def test_self_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="refers to itself"):
        read_properties(write(tmp_path / "bk.conf", "a=${b}x\nb=${a}y\n"))


def test_include_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="include"):
        read_properties(write(tmp_path / "bk.conf", "include=bk.conf\n"))


def test_defaults_are_javas(tmp_path: Path) -> None:
    config = BookieConfig.load(write(tmp_path / "bk.conf", "\n"))
    assert config.bookie_port == 3181
    assert config.journal_directories == ("/tmp/bk-txn",)
    assert config.journal_max_size_mb == 2048
    assert config.log_size_limit == 1 << 30
    assert config.netty_max_frame_size_bytes == 5242880
    assert config.ledger_storage == "sorted"
    assert config.index_directories == ()
    assert config.metadata_service_uri is None


def test_values_are_typed(tmp_path: Path) -> None:
    config = BookieConfig.load(
        write(
            tmp_path / "bk.conf",
            "bookiePort=0\nallowLoopback=true\ndiskUsageThreshold=0.99\njournalDirectories=/j1,/j2\n"
            "ledgerDirectories=/l1, /l2\nindexDirectories=\nbookieId=\n"
            "metadataServiceUri=zk+hierarchical://a:1,b:2/ledgers\n",
        )
    )
    assert (config.bookie_port, config.allow_loopback, config.disk_usage_threshold) == (0, True, 0.99)
    assert config.journal_directories == ("/j1", "/j2")
    assert config.ledger_directories == ("/l1", "/l2")
    assert config.index_directories == ()
    assert config.bookie_id is None
    assert config.metadata_service_uri == "zk+hierarchical://a:1,b:2/ledgers"


def test_settings_without_effect_are_warnings(tmp_path: Path) -> None:
    path = write(
        tmp_path / "bk.conf",
        "dataIntegrityChecking=True\nextraServerComponents=\nlocalScrubInterval=0\ntlsEnabledCipherSuites=A,B\n"
        "journalAdaptiveGroupWrites=false\nhttpServerTrustStorePassword=secret\n"
        "dbStorage_directIOEntryLogger=true\ndbStorage_rocksDB_numLevels=4\n",
    )
    assert BookieConfig.load(path).warnings == (
        f"{path} line 1: dataIntegrityChecking has no effect: entries that were lost are not fetched again",
        f"{path} line 7: dbStorage_directIOEntryLogger has no effect: entry logs are written through the page cache",
        f"{path} line 8: dbStorage_rocksDB_numLevels has no effect: RocksDB has 7 levels",
        f"{path} line 6: httpServerTrustStorePassword has no effect: the trust store is PEM, without a password",
        f"{path} line 5: journalAdaptiveGroupWrites has no effect: one sync serves all writes that wait for it",
        f"{path} line 4: tlsEnabledCipherSuites has no effect: the system's cipher suites are used",
    )


#: The settings of Pulsar's conf/bookkeeper.conf that are not comments.
PULSAR_SETTINGS = """
bookiePort=3181
journalDirectory=data/bookkeeper/journal
minUsableSizeForIndexFileCreation=1073741824
advertisedAddress=
allowLoopback=false
bookieDeathWatchInterval=1000
flushInterval=60000
useHostNameAsBookieID=false
gcWaitTime=900000
gcOverreplicatedLedgerWaitTime=86400000
numAddWorkerThreads=0
numReadWorkerThreads=8
numHighPriorityWorkerThreads=8
maxPendingReadRequestsPerThread=2500
maxPendingAddRequestsPerThread=10000
readWorkerThreadsThrottlingEnabled=true
enableBusyWait=false
forceAllowCompaction=true
tlsCertFilesRefreshDurationSeconds=300
auditorPeriodicBookieCheckInterval=86400
rereplicationEntryBatchSize=100
stickyReadSEnabled=true
reorderReadSequenceEnabled=true
openLedgerRereplicationGracePeriod=30000
autoRecoveryDaemonEnabled=true
lostBookieRecoveryDelay=0
useV2WireProtocol=true
reppDnsResolverClass=org.apache.pulsar.zookeeper.ZkBookieRackAffinityMapping
serverTcpNoDelay=true
nettyMaxFrameSizeBytes=5253120
journalFormatVersionToWrite=5
journalMaxSizeMB=2048
journalMaxBackups=5
journalPreAllocSizeMB=16
journalWriteBufferSizeKB=64
journalRemoveFromPageCache=true
journalWriteData=true
journalSyncData=true
journalAdaptiveGroupWrites=true
journalMaxGroupWaitMSec=1
journalBufferedWritesThreshold=524288
numJournalCallbackThreads=8
journalAlignmentSize=4096
journalFlushWhenQueueEmpty=false
ledgerStorageClass=org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage
ledgerDirectories=data/bookkeeper/ledgers
auditorPeriodicCheckInterval=604800
openFileLimit=0
fileInfoFormatVersionToWrite=0
pageLimit=0
zkLedgersRootPath=/ledgers
logSizeLimit=1073741824
entryLogFilePreallocationEnabled=true
flushEntrylogBytes=33554432
readBufferSizeBytes=4096
writeBufferSizeBytes=65536
compactionRate=1000
minorCompactionThreshold=0.2
minorCompactionInterval=3600
compactionMaxOutstandingRequests=100000
majorCompactionThreshold=0.5
majorCompactionInterval=86400
isThrottleByBytes=false
compactionRateByEntries=1000
compactionRateByBytes=1000000
statsProviderClass=org.apache.bookkeeper.stats.prometheus.PrometheusMetricsProvider
prometheusStatsHttpPort=8000
readOnlyModeEnabled=true
diskUsageThreshold=0.95
diskCheckInterval=10000
metadataServiceUri=
zkServers=localhost:2181
zkTimeout=30000
zkEnableSecurity=false
httpServerEnabled=false
httpServerPort=8000
httpServerClass=org.apache.bookkeeper.http.vertx.VertxHttpServer
dbStorage_writeCacheMaxSizeMb=
dbStorage_readAheadCacheMaxSizeMb=
dbStorage_readAheadCacheBatchSize=1000
dbStorage_rocksDB_blockCacheSize=
dbStorage_rocksDB_writeBufferSizeMB=64
dbStorage_rocksDB_sstSizeInMB=64
dbStorage_rocksDB_blockSize=65536
dbStorage_rocksDB_bloomFilterBitsPerKey=10
dbStorage_rocksDB_numLevels=-1
dbStorage_rocksDB_numFilesInLevel0=4
dbStorage_rocksDB_maxSizeInLevel1MB=256
"""


def test_the_file_that_pulsar_ships_is_read(tmp_path: Path) -> None:
    config = BookieConfig.load(write(tmp_path / "bookkeeper.conf", PULSAR_SETTINGS))
    default = BookieConfig()
    assert config.ledger_storage == "db"
    assert config.metadata_service_uri == "zk+null://localhost:2181/ledgers"
    assert config.advertised_address is None
    # Java does not look at it with this storage class.
    assert config.open_file_limit == default.open_file_limit
    # Nothing behind the `=`: Java's DbLedgerStorage takes its defaults.
    assert config.db_storage_write_cache_max_size_mb == default.db_storage_write_cache_max_size_mb
    assert config.db_storage_read_ahead_cache_max_size_mb == default.db_storage_read_ahead_cache_max_size_mb
    assert config.db_storage_rocksdb_block_cache_size is None
    warning = config.warnings[-1]
    assert "statsProviderClass has no effect: metrics are Prometheus text at /metrics of the HTTP server" in warning
    assert "httpServerEnabled=true" in warning
    assert any("prometheusStatsHttpPort" in each for each in config.warnings)
    assert any("numJournalCallbackThreads" in each for each in config.warnings)
    assert not [key for key in ("zkServers", "journalDirectory", "bookiePort") if key in str(config.warnings)]


IMAGE_CONF = Path(__file__).parents[1] / "image/pulsar/conf/bookkeeper.conf"
#: The variables that Pulsar's chart gives to bookies and auto-recovery, whatever its values are.
CHART_KEY_NAMES = """
autoRecoveryDaemonEnabled dbStorage_readAheadCacheMaxSizeMb dbStorage_rocksDB_blockCacheSize
dbStorage_rocksDB_format_version dbStorage_rocksDB_writeBufferSizeMB dbStorage_writeCacheMaxSizeMb defaultRocksdbConf
diskCheckInterval diskUsageLwmThreshold diskUsageThreshold diskUsageWarnThreshold entryLocationCompactionInterval
entryLocationRocksdbConf extraServerComponents gcWaitTime httpServerEnabled httpServerPort indexDirectories
isForceGCAllowWhenNoSpace journalDirectories journalMaxBackups ledgerDirectories ledgerMetadataRocksdbConf
majorCompactionInterval majorCompactionThreshold metadataServiceUri minorCompactionInterval minorCompactionThreshold
tlsCertFilesRefreshDurationSeconds tlsCertificatePath tlsKeyStore tlsKeyStoreType tlsProviderFactoryClass tlsTrustStore
tlsTrustStoreType useHostNameAsBookieID useV2WireProtocol zkLedgersRootPath zkServers zkTimeout
"""
#: Keys that the bookie's configuration does not hold: read where they count.
READ_ELSEWHERE = {"gcEntryLogMetadataCachePath", "zkEnableSecurity"}


def keys_of_pulsar() -> list[str]:
    commented = (line.removeprefix("# ").partition("=") for line in IMAGE_CONF.read_text().splitlines())
    return sorted({key for key, equals, _ in commented if equals and " " not in key})


def test_the_image_s_file_has_the_keys_of_pulsar_and_the_chart() -> None:
    ours = set(keys_of_pulsar())
    pulsars = {line.partition("=")[0] for line in PULSAR_SETTINGS.split()}
    assert pulsars | set(CHART_KEY_NAMES.split()) <= ours
    assert BookieConfig.load(IMAGE_CONF).warnings[1:] == ()  # Of the metrics, until there is an HTTP server.


@pytest.mark.parametrize("key", [key for key in keys_of_pulsar() if key not in READ_ELSEWHERE])
def test_every_key_of_pulsar_s_file_is_obeyed_or_named_in_a_warning(tmp_path: Path, key: str) -> None:
    base = "zkServers=h:1\nstatsProviderClass=PrometheusMetricsProvider\nenableStatistics=true\n"
    others = "".join(line for line in base.splitlines(keepends=True) if not line.startswith(key))
    default = BookieConfig.load(write(tmp_path / "bk.conf", base))
    values = ("true", "false", "0", "1", "4", "4096", "0.5", "other", "a.FlatLedgerManagerFactory")
    seen = False
    for value in values:
        with contextlib.suppress(UsageError):
            config = BookieConfig.load(write(tmp_path / "bk.conf", f"{others}{key}={value}\n"))
            seen |= config.with_changes(warnings=()) != default.with_changes(warnings=())
            seen |= config.warnings != default.warnings
    assert seen


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("compactionMaxOutstandingRequests=0", 1),
        ("maxBatchReadSize=0", 1),
        ("minNumRacksPerWriteQuorum=0", 1),
        ("maxAddsInProgressLimit=-1", 0),
        ("maxReadsInProgressLimit=-1", 0),
        ("numAddWorkerThreads=-1", 0),
        ("numReadWorkerThreads=-1", 0),
        ("maxPendingAddRequestsPerThread=-1", 0),
        ("maxPendingReadRequestsPerThread=-1", 0),
        ("journalMaxGroupWaitMSec=-1", 0),
        ("journalBufferedEntriesThreshold=-1", 0),
        ("journalBufferedWritesThreshold=-1", 0),
        ("journalPageCacheFlushIntervalMSec=-1", 0),
        ("auditorPeriodicCheckInterval=-1", 0),
        ("auditorPeriodicPlacementPolicyCheckInterval=-1", 0),
        ("auditorReplicasCheckInterval=-1", 0),
        ("underreplicatedLedgerRecoveryGracePeriod=-1", 0),
        ("minUsableSizeForEntryLogCreation=-1", 0),
        ("minUsableSizeForIndexFileCreation=-1", 0),
        ("minUsableSizeForHighPriorityWrites=-1", 0),
        ("dbStorage_readAheadCacheBatchSize=-1", 0),
        ("dbStorage_rocksDB_bloomFilterBitsPerKey=-2", -1),
        ("pageLimit=-2", -1),
    ],
)
def test_numbers_below_the_least_are_read_as_java_reads_them(tmp_path: Path, line: str, value: object) -> None:
    config = BookieConfig.load(write(tmp_path / "bk.conf", line))
    assert config.settings()[line.partition("=")[0]] == str(value)


def test_one_and_zero_are_true_and_false(tmp_path: Path) -> None:
    config = BookieConfig.load(write(tmp_path / "bk.conf", "allowLoopback=1\nreadOnlyModeEnabled=0\n"))
    assert (config.allow_loopback, config.read_only_mode_enabled) == (True, False)


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        ("statsProviderClass=org.apache.bookkeeper.stats.prometheus.PrometheusMetricsProvider", "which is off"),
        ("statsProviderClass=a.CodahaleMetricsProvider\nhttpServerEnabled=true", "/metrics of the HTTP server"),
        ("statsProviderClass=a.PrometheusMetricsProvider\nhttpServerEnabled=true", None),
        ("statsProviderClass=a.PrometheusMetricsProvider\nprometheusStatsHttpEnable=false", None),
        ("statsProviderClass=a.PrometheusMetricsProvider\nenableStatistics=false", None),
        ("statsProviderClass=org.apache.bookkeeper.stats.NullStatsProvider", None),
        ("prometheusStatsHttpPort=8000", None),
    ],
)
def test_metrics_that_are_not_served_as_asked_are_a_warning(tmp_path: Path, lines: str, warning: str | None) -> None:
    warnings = [each for each in BookieConfig.load(write(tmp_path / "bk.conf", lines)).warnings if "statsP" in each]
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


def test_the_old_choice_of_storage_is_read(tmp_path: Path) -> None:
    assert BookieConfig.load(write(tmp_path / "a", "sortedLedgerStorageEnabled=false")).ledger_storage == "interleaved"
    both = (
        "sortedLedgerStorageEnabled=false\nledgerStorageClass=org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage"
    )
    assert BookieConfig.load(write(tmp_path / "b", both)).ledger_storage == "db"


def test_lists_keep_all_their_values(tmp_path: Path) -> None:
    path = write(tmp_path / "bk.conf", "permittedStartupUsers=bk, root\ntlsEnabledProtocols=TLSv1.3,TLSv1.2\n")
    config = BookieConfig.load(path)
    assert config.permitted_startup_users == ("bk", "root")
    assert config.tls_enabled_protocols == ("TLSv1.3", "TLSv1.2")


def test_old_zookeeper_settings_make_a_uri(tmp_path: Path) -> None:
    config = BookieConfig.load(write(tmp_path / "bk.conf", "zkServers=a:1,b:2\nzkLedgersRootPath=/bk\n"))
    assert config.metadata_service_uri == "zk+null://a:1;b:2/bk"


@pytest.mark.parametrize(
    "line",
    [
        "bookiePort=x",
        "bookiePort=70000",
        "bookiePort=",
        "allowLoopback=maybe",
        "diskUsageThreshold=nan",
        f"nettyMaxFrameSizeBytes={RECORD_SIZE_BYTES_MAX + 1}",
    ],
)
def test_wrong_value_names_file_line_and_key(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "bk.conf", f"# first\n{line}\n")
    key = line.partition("=")[0]
    with pytest.raises(UsageError, match=rf"bk\.conf line 2: {key} must be"):
        BookieConfig.load(path)


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        BookieConfig.load(tmp_path / "none.conf")


def test_unknown_storage_class_is_unsupported(tmp_path: Path) -> None:
    config = BookieConfig.load(write(tmp_path / "bk.conf", "ledgerStorageClass=org.example.Mine\n"))
    with pytest.raises(Unsupported):
        _ = config.ledger_storage


def test_settings_by_javas_names_go_out_and_in() -> None:
    config = BookieConfig(http_server_enabled=True, flush_interval=5)
    settings = config.settings()
    assert settings["httpServerEnabled"] == "true"
    assert settings["flushInterval"] == "5"
    assert "httpServerToken" not in settings
    assert BookieConfig().with_settings(settings) == config
    with pytest.raises(UsageError, match="flushInterval must be a whole number"):
        config.with_settings({"flushInterval": "soon"})
