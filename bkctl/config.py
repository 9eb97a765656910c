"""Java's configuration files (`bk_server.conf`, Pulsar's `bookkeeper.conf`) → one typed, immutable value.

The file is read as Java reads it: comments, continuation lines, escapes, comma lists, repeated keys, `${key}` and
`include`. Names and defaults are Java's (ServerConfiguration); a value that does not parse is refused, never replaced.
Source: commons-configuration's PropertiesConfiguration, ServerConfiguration, AbstractConfiguration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from bkctl.errors import NotFound, Unsupported, UsageError

MEBIBYTE: Final = 1 << 20
CONF_SIZE_BYTES_MAX: Final = 4 * 1024 * 1024
INCLUDE_DEPTH_MAX: Final = 16
_INTERPOLATION_DEPTH_MAX: Final = 16

_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}
_VARIABLE = re.compile(r"\$\{([^${}]+)\}")
_PROPERTY = re.compile(r"((?:[^\\=:\s]++|\\.)*+)\s*[=:]?\s*(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
#: An item of a list with the comma behind it; a backslash makes a comma part of the item.
_LIST_ITEM = re.compile(r"((?:[^\\,]++|\\.)*+),", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Property:
    """One key's values in file order (commas and repeated keys make several) and where it was first set."""

    values: tuple[str, ...]
    where: str


class Properties(Mapping[str, str]):
    """The settings of a Java properties file: key → first value, as Java's getString gives it."""

    def __init__(self, path: Path, entries: Mapping[str, Property]) -> None:
        self.path = path
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> str:
        return self._entries[key].values[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def list(self, key: str) -> tuple[str, ...]:
        """Return the non-empty values of `key`; `()` if it is not set."""
        found = self._entries.get(key)
        return tuple(value for value in found.values if value) if found else ()

    def where(self, key: str) -> str:
        """Return `FILE line N` of the key's first appearance; the file alone if it is not set."""
        found = self._entries.get(key)
        return found.where if found else str(self.path)

    @property
    def metadata_service_uri(self) -> str | None:
        """`metadataServiceUri`, else the URI that the old `zkServers` and `zkLedgersRootPath` stand for, else None.

        Source: AbstractConfiguration.getMetadataServiceUri.
        """
        uris = self.list("metadataServiceUri")
        if uris:
            return ",".join(uris)
        servers = self.list("zkServers")
        if not servers:
            return None
        root = self.get("zkLedgersRootPath") or "/ledgers"
        return f"zk+{self._ledger_manager_type()}://{';'.join(servers)}{root}"

    def _ledger_manager_type(self) -> str:
        factory = self.get("ledgerManagerFactoryClass") or self.get("ledgerManagerType") or ""
        name = factory.rpartition(".")[2].removesuffix("LedgerManagerFactory").lower()
        return name if name in ("hierarchical", "flat", "longhierarchical") else "null"


def read_properties(path: str | os.PathLike[str]) -> Properties:
    """Read a Java properties file. Raises NotFound when it is missing, UsageError when it cannot be read as one."""
    location = Path(path)
    raw: dict[str, tuple[list[str], str]] = {}
    _read_into(location, raw, depth=0)
    variables = _Variables(raw)
    return Properties(
        location,
        {
            key: Property(tuple(variables.replace_in(value, f"{where}: {key}") for value in values), where)
            for key, (values, where) in raw.items()
        },
    )


def _read_into(path: Path, into: dict[str, tuple[list[str], str]], depth: int) -> None:
    if depth > INCLUDE_DEPTH_MAX:
        raise UsageError(f"{path}: more than {INCLUDE_DEPTH_MAX} files include one another")
    try:
        with open(path, "rb") as file:
            data = file.read(CONF_SIZE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFound(f"No configuration file {path}") from None
    except OSError as error:
        raise UsageError(f"Cannot read the configuration file {path}: {error.strerror}") from error
    if len(data) > CONF_SIZE_BYTES_MAX:
        raise UsageError(f"{path} is larger than {CONF_SIZE_BYTES_MAX} bytes", hint="is it a configuration file?")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("iso-8859-1")
    for line_number, line in _logical_lines(text):
        key, value = _split_property(line)
        where = f"{path} line {line_number}"
        if not key:
            raise UsageError(f"{where}: a value without a key")
        parts = [_unescape(part) for part in _split_list(value)]
        if key.lower() == "include":
            for name in parts:
                _read_into(path.parent / name, into, depth + 1)
            continue
        into.setdefault(key, ([], where))[0].extend(parts)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbers and texts of lines, joined over trailing backslashes, without comments and empty lines."""
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not pending and (not line or line[0] in "#!"):
            continue
        start = start or number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            pending += line[:-1]
            continue
        yield start, pending + line
        pending, start = "", 0
    if pending:
        yield start, pending


def _split_property(line: str) -> tuple[str, str]:
    """Return key and raw value: the key ends at the first `=`, `:` or white space that no backslash precedes."""
    found = _PROPERTY.fullmatch(line)
    assert found is not None
    return _ESCAPED.sub(r"\1", found[1]), found[2]


def _split_list(value: str) -> list[str]:
    return [part.replace("\\,", ",").strip() for part in _LIST_ITEM.findall(value + ",")]


def _unescape(value: str) -> str:
    def plain(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "u" and len(code) == 5:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8))
        return _ESCAPES.get(code, code)

    return _ESCAPE.sub(plain, value) if "\\" in value else value


class _Variables:
    """The keys of a file, for `${key}` in its values. All together add CONF_SIZE_BYTES_MAX characters at most."""

    def __init__(self, raw: Mapping[str, tuple[list[str], str]]) -> None:
        self._raw = raw
        self._size = 0

    def replace_in(self, value: str, what: str) -> str:
        """Replace `${key}` and `${env:NAME}`; an unknown name stays unchanged, as in commons-configuration."""
        for _ in range(_INTERPOLATION_DEPTH_MAX):
            replaced = _VARIABLE.sub(lambda match: self._value(match, what), value)
            if replaced == value:
                return value
            value = replaced
        raise UsageError(f"{what} refers to itself")

    def _value(self, match: re.Match[str], what: str) -> str:
        name = match[1]
        if name.startswith("env:"):
            value = os.environ.get(name[4:], match[0])
        else:
            value = self._raw[name][0][0] if name in self._raw else match[0]
        self._size += len(value)
        if self._size > CONF_SIZE_BYTES_MAX:
            raise UsageError(f"{what}: variables make the file longer than {CONF_SIZE_BYTES_MAX} characters")
        return value


def _setting(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    floor: int | None = None,
    unset: str | None = None,
    broker: str | None = None,
    key: str | None = None,
) -> Any:
    """Return a dataclass field that is read from its Java key: `key`, or the field's name in camel case.

    Numbers are checked against `least` and `most`; one below `floor` is read as `floor`, as Java treats it alike. The
    text `unset` stands for the default. `broker` is the key's name in Pulsar's broker.conf, where `bookkeeper_` before
    the key is another one.
    """
    bounds = {"least": least, "most": most, "floor": floor, "unset": unset}
    return field(default=default, metadata={"key": key, "broker": broker, **bounds})


def camel_case(name: str) -> str:
    """Return `lastRound` for `last_round`."""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def settings_of(kind: type[ClientConfig]) -> Iterator[tuple[tuple[str, ...], Field[Any]]]:
    """Yield the fields that are read from a file, each behind the names that it may have there: its Java key first."""
    for each in fields(kind):
        if each.metadata:
            key, broker = each.metadata["key"] or camel_case(each.name), each.metadata["broker"]
            yield (key, *([broker] if broker else []), f"bookkeeper_{key}"), each


_SORTED_LEDGER_STORAGE: Final = "org.apache.bookkeeper.bookie.SortedLedgerStorage"
_INTERLEAVED_LEDGER_STORAGE: Final = "org.apache.bookkeeper.bookie.InterleavedLedgerStorage"
_STORAGE_NAMES: Final = {
    _SORTED_LEDGER_STORAGE: "sorted",
    _INTERLEAVED_LEDGER_STORAGE: "interleaved",
    "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage": "db",
}
#: Java's keys that ask for what our bookie lacks, each with the value that does not, and what holds instead.
_WITHOUT_EFFECT: Final = {
    "dataIntegrityChecking": ("false", "entries that were lost are not fetched again"),
    "dbStorage_directIOEntryLogger": ("false", "entry logs are written through the page cache"),
    "dbStorage_rocksDB_numLevels": ("-1", "RocksDB has 7 levels"),
    "disableServerSocketBind": ("false", "the bookie listens on its port"),
    "enableLocalTransport": ("false", "the bookie is reached by TCP only"),
    "extraServerComponents": ("", "no other servers run in this bookie"),
    "httpServerTrustStorePassword": ("", "the trust store is PEM, without a password"),
    "journalAdaptiveGroupWrites": ("true", "one sync serves all writes that wait for it"),
    "localScrubInterval": ("0", "'bkctl bookie check' checks the bookie's files"),
    "tlsEnabledCipherSuites": ("", "the system's cipher suites are used"),
}
#: Reasons why keys have no effect, each with its keys, which nothing here reads.
_INSTEAD: Final = {
    "one event loop serves all requests, and waits for the disks in threads that the bookie sizes itself": (
        "enableBusyWait", "numHighPriorityWorkerThreads", "numJournalCallbackThreads", "numLongPollWorkerThreads",
        "readWorkerThreadsThrottlingEnabled", "requestTimerNumTicks", "requestTimerTickDurationMs",
    ),
    "buffers are sized by what is read and written": (
        "byteBufAllocatorSizeInitial", "byteBufAllocatorSizeMax", "byteBufAllocatorSizeMin", "flushEntrylogBytes",
        "journalWriteBufferSizeKB", "readBufferSizeBytes", "skipListArenaChunkSize", "skipListArenaMaxAllocSize",
        "writeBufferSizeBytes",
    ),
    "the bookie has an HTTP server of its own, which serves /metrics on httpServerPort": (
        "httpServerClass", "prometheusStatsHttpPort",
    ),
    "Nagle's algorithm is off, and answers are sent before a connection is closed": (
        "serverTcpLinger", "serverTcpNoDelay",
    ),
    "auto-recovery speaks version 3, and asks the next bookie after a failure": (
        "stickyReadSEnabled", "useV2WireProtocol",
    ),
    "the metadata store is retried as long as the session lasts": ("zkRetryBackoffMaxMs", "zkRetryBackoffStartMs"),
    "directories may share a disk": ("allowMultipleDirsUnderSameDiskPartition",),
    "port 0 is any free port": ("allowEphemeralPorts",),
    "the bookie's process ends by itself when it fails": ("bookieDeathWatchInterval",),
    "any layout of a known ledger manager is read": (
        "allowShadedLedgerManagerFactoryClass", "shadedLedgerManagerFactoryClassPrefix",
    ),
    "TLS is the system's OpenSSL": ("tlsProvider",),
    "the trust store is PEM, without a password": ("tlsTrustStorePasswordPath",),
    "RocksDB logs what it logs at INFO_LEVEL": ("dbStorage_rocksDB_logLevel",),
    "the database of ledgers has the options of Apache's bookie without that file": (
        "defaultRocksdbConf", "ledgerMetadataRocksdbConf",
    ),
    "the bookie does not know this key": (),
}  # fmt: skip
#: Keys that are read in another way than by a field's own.
_OTHER_KEYS: Final = frozenset({
    "enableStatistics", "entryLocationRocksdbConf", "gcEntryLogMetadataCachePath", "indexDirectories",
    "journalDirectories", "journalDirectory", "ledgerDirectories", "ledgerManagerFactoryClass", "ledgerManagerType",
    "ledgerStorageClass", "metadataServiceUri", "permittedStartupUsers", "prometheusStatsHttpEnable",
    "sortedLedgerStorageEnabled", "statsProviderClass", "tlsEnabledProtocols", "zkEnableSecurity",
    "zkLedgersRootPath", "zkServers",
})  # fmt: skip
#: logSizeLimit's own upper bound. Source: ServerConfiguration.validate.
LOG_SIZE_LIMIT_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """A client's settings under Java's names (in snake case) with Java's units and defaults: placement and reads.

    Built from a bookie's, a client's or a Pulsar broker's file. Source: ClientConfiguration; Pulsar's
    BookKeeperClientFactoryImpl.
    """

    #: A Java class; None: rack-aware, or what the switches of a broker say.
    ensemble_placement_policy: str | None = _setting(None)
    rackaware_policy_enabled: bool = _setting(True, key="bookkeeperClientRackawarePolicyEnabled")
    regionaware_policy_enabled: bool = _setting(False, key="bookkeeperClientRegionawarePolicyEnabled")
    #: Groups of Pulsar's racks, with commas between them: new entries go to their bookies only.
    isolation_bookie_groups: str = _setting("", broker="bookkeeperClientIsolationGroups")
    secondary_isolation_bookie_groups: str = _setting("", broker="bookkeeperClientSecondaryIsolationGroups")
    #: Racks of a write quorum, where it has as many bookies.
    min_num_racks_per_write_quorum: int = _setting(2, floor=1, broker="bookkeeperClientMinNumRacksPerWriteQuorum")
    #: Refuse ensembles with fewer racks, and do not use bookies without a rack.
    enforce_min_num_racks_per_write_quorum: bool = _setting(
        False, broker="bookkeeperClientEnforceMinNumRacksPerWriteQuorum"
    )
    #: Acknowledge an entry only once bookies in so many racks, or zones, have it.
    enforce_min_num_fault_domains_for_write: bool = _setting(False)
    #: A Java class; None: the script if there is one, and the metadata store's racks.
    repp_dns_resolver_class: str | None = _setting(None)
    #: Prints the racks of hosts, so that replicas come to several; None: the metadata store's racks only.
    network_topology_script_file_name: str | None = _setting(None)
    #: Bookies that left so lately may be chosen where others do not suffice.
    network_topology_stabilize_period_seconds: int = _setting(0, floor=0)
    ignore_local_node_in_placement_policy: bool = _setting(False)
    use_hostname_resolve_local_node_placement_policy: bool = _setting(False)
    #: `R1;R2;…`; none: regions give no durability.
    repp_regions_to_write: str = _setting("")
    repp_minimum_regions_for_durability: int = _setting(2, floor=0)
    repp_enable_durability_enforcement_in_replace: bool = _setting(True)
    min_num_zones_per_write_quorum: int = _setting(2, floor=1)
    desired_num_zones_per_write_quorum: int = _setting(3, floor=1)
    enforce_strict_zoneaware_placement: bool = _setting(True)

    #: Bookies with more free space are chosen more often.
    disk_weight_based_placement_enabled: bool = _setting(False, broker="bookkeeperDiskWeightBasedPlacementEnabled")
    #: The largest weight, in medians; 0 or less: no limit.
    bookie_max_weight_multiple_for_weight_based_placement: int = _setting(3)
    get_bookie_info_interval_seconds: int = _setting(
        86_400, least=0, broker="bookkeeperClientGetBookieInfoIntervalSeconds"
    )
    get_bookie_info_retry_interval_seconds: int = _setting(
        60, least=0, broker="bookkeeperClientGetBookieInfoRetryIntervalSeconds"
    )

    #: Put bookies with many errors in quarantine: new entries go to others.
    bookie_health_check_enabled: bool = _setting(False, broker="bookkeeperClientHealthCheckEnabled")
    bookie_health_check_interval_seconds: int = _setting(60, least=1, broker="bookkeeperHealthCheckIntervalSec")
    bookie_error_threshold_per_interval: int = _setting(
        100, floor=1, broker="bookkeeperClientHealthCheckErrorThresholdPerInterval"
    )
    bookie_quarantine_time_seconds: int = _setting(
        1800, least=0, broker="bookkeeperClientHealthCheckQuarantineTimeInSeconds"
    )
    #: The part of the bookies with many errors that comes into quarantine.
    bookie_quarantine_ratio: float = _setting(1.0, least=0.0, most=1.0, broker="bookkeeperClientQuarantineRatio")
    bookie_connection_error_quarantine_enabled: bool = _setting(False)

    #: Milliseconds without an answer after which another replica is asked too; 0 or less: never.
    speculative_read_timeout: int = _setting(2000, broker="bookkeeperClientSpeculativeReadTimeoutInMillis")
    #: None: `speculative_read_timeout`, the same for the longest.
    first_speculative_read_timeout: int | None = _setting(None)
    max_speculative_read_timeout: int | None = _setting(None)
    speculative_read_timeout_backoff_multiplier: float = _setting(2.0, least=0.01)
    #: Read from bookies that did not fail lately, and from the client's own region, before others.
    reorder_read_sequence_enabled: bool = _setting(True, broker="bookkeeperClientReorderReadSequenceEnabled")
    #: Read all entries of a ledger from one bookie, which reads ahead, where each has all of them. Java spells it so.
    sticky_reads_enabled: bool = _setting(False, broker="bookkeeperEnableStickyReads", key="stickyReadSEnabled")

    @classmethod
    def from_properties(cls, properties: Properties) -> Self:
        """Return the settings in `properties`, else Java's defaults. Raises UsageError, naming file, line and key."""
        return cls(**_given(cls, properties))

    def speculative_read_s(self, attempt_count: int = 0) -> float | None:
        """Return the wait for an answer before another replica is asked, after other attempts; None: no end.

        Source: DefaultSpeculativeRequestExecutionPolicy.
        """
        usual_ms, first_ms = self.speculative_read_timeout, self.first_speculative_read_timeout
        longest_ms = self.max_speculative_read_timeout
        wait_ms = float(usual_ms if first_ms is None else first_ms)
        if wait_ms <= 0:
            return None
        if attempt_count:
            growth = self.speculative_read_timeout_backoff_multiplier ** min(attempt_count, 32)
            wait_ms = min(wait_ms * growth, usual_ms if longest_ms is None else longest_ms)
        return max(wait_ms, 1.0) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieConfig(ClientConfig):
    """A bookie's settings under Java's names (in snake case) with Java's units and defaults.

    Built from a file with `load`, or by keyword. `conf_path` is the file, None when there is none.
    Source: ServerConfiguration.
    """

    metadata_service_uri: str | None = None
    bookie_id: str | None = _setting(None)
    bookie_port: int = _setting(3181, least=0, most=65535)
    listening_interface: str | None = _setting(None)
    advertised_address: str | None = _setting(None)
    allow_loopback: bool = _setting(False)
    use_host_name_as_bookie_id: bool = _setting(False, key="useHostNameAsBookieID")
    use_short_host_name: bool = _setting(False)
    zk_timeout: int = _setting(10_000, least=1)

    journal_directories: tuple[str, ...] = ("/tmp/bk-txn",)
    ledger_directories: tuple[str, ...] = ("/tmp/bk-data",)
    index_directories: tuple[str, ...] = ()
    allow_storage_expansion: bool = _setting(False)
    ledger_storage_class: str = _SORTED_LEDGER_STORAGE

    journal_format_version_to_write: int = _setting(6, least=4, most=6)
    journal_max_size_mb: int = _setting(2048, least=1, key="journalMaxSizeMB")
    journal_max_backups: int = _setting(5, least=0)
    journal_pre_alloc_size_mb: int = _setting(16, least=0, key="journalPreAllocSizeMB")
    journal_alignment_size: int = _setting(512, least=512, most=1 << 20)
    journal_sync_data: bool = _setting(True)
    journal_write_data: bool = _setting(True)
    journal_adaptive_group_writes: bool = _setting(True)
    journal_max_group_wait_msec: int = _setting(2, floor=0, most=60_000, key="journalMaxGroupWaitMSec")
    journal_buffered_writes_threshold: int = _setting(512 * 1024, floor=0)
    journal_buffered_entries_threshold: int = _setting(0, floor=0)
    journal_flush_when_queue_empty: bool = _setting(False)
    journal_queue_size: int = _setting(10_000, least=1)
    #: Entries that wait for the journals, in MiB; None: 256 (Java takes a part of its own memory).
    journal_max_memory_size_mb: int | None = _setting(None, least=1)
    #: Ours: requests that have not arrived whole, of all clients, in MiB; more wait in their clients. 0: no bound.
    unfinished_requests_max_memory_size_mb: int = _setting(256, least=0)
    journal_remove_from_page_cache: bool = _setting(True)
    #: The interval of a journal's syncs with `journal_sync_data` False, where none is required.
    journal_page_cache_flush_interval_msec: int = _setting(1000, floor=0, key="journalPageCacheFlushIntervalMSec")

    skip_replay_journal_invalid_record: bool = _setting(False)

    log_size_limit: int = _setting(LOG_SIZE_LIMIT_MAX, least=1, most=LOG_SIZE_LIMIT_MAX)
    entry_log_file_preallocation_enabled: bool = _setting(True)
    entry_log_per_ledger_enabled: bool = _setting(False)
    skip_list_size_limit: int = _setting(64 << 20, least=1)
    minor_compaction_threshold: float = _setting(0.2, most=1.0)
    major_compaction_threshold: float = _setting(0.8, most=1.0)
    #: Seconds; 0 or less: never.
    minor_compaction_interval: int = _setting(3600)
    major_compaction_interval: int = _setting(86_400)
    #: Longer than this no further log is begun; 0 or less: no limit.
    minor_compaction_max_time_millis: int = _setting(-1)
    major_compaction_max_time_millis: int = _setting(-1)
    #: Seconds; 0 or less: never.
    entry_location_compaction_interval: int = _setting(-1)
    is_throttle_by_bytes: bool = _setting(False)
    #: Entries a second. None: `compaction_rate`, its old name.
    compaction_rate_by_entries: int | None = _setting(None, least=1)
    compaction_rate: int = _setting(1000, least=1)
    compaction_rate_by_bytes: int = _setting(1_000_000, least=1)
    compaction_max_outstanding_requests: int = _setting(100_000, floor=1)
    use_transactional_compaction: bool = _setting(False)
    use_target_entry_log_size_for_gc: bool = _setting(False)
    force_allow_compaction: bool = _setting(False)
    is_force_gc_allow_when_no_space: bool = _setting(False, key="isForceGCAllowWhenNoSpace")
    gc_wait_time: int = _setting(600_000, least=1)
    #: Milliseconds; 0 or less: never.
    gc_overreplicated_ledger_wait_time: int = _setting(86_400_000)
    gc_metadata_op_rate_limit: int = _setting(1000, least=1)
    #: Accepted: what the logs hold is kept in memory, and every ledger is read again before it goes.
    gc_entry_log_metadata_cache_enabled: bool = _setting(False)
    verify_metadata_on_gc: bool = _setting(False, key="verifyMetadataOnGC")
    #: A round that would delete at least so many scoped ledgers, and more than this part of them, deletes none of them.
    gc_scoped_delete_count_min: int = _setting(100, least=1)
    gc_scoped_delete_ratio_max: float = _setting(0.5, least=0.0, most=1.0)
    flush_interval: int = _setting(10_000, least=1)
    page_size: int = _setting(8192, least=8, most=1 << 24)
    page_limit: int = _setting(-1, floor=-1)
    #: 0 is the default: Pulsar's file has it for DbLedgerStorage, where Java does not read it.
    open_file_limit: int = _setting(20_000, least=1, unset="0")
    file_info_format_version_to_write: int = _setting(1, least=0, most=1)

    #: Both caches of DbLedgerStorage are shared by its directories. Java's default is a quarter of the direct memory,
    #: also where nothing follows the `=`. Source: DbLedgerStorage.getLongVariableOrDefault.
    db_storage_write_cache_max_size_mb: int = _setting(128, least=1, unset="", key="dbStorage_writeCacheMaxSizeMb")
    db_storage_read_ahead_cache_max_size_mb: int = _setting(
        64, least=0, unset="", key="dbStorage_readAheadCacheMaxSizeMb"
    )
    db_storage_read_ahead_cache_batch_size: int = _setting(100, floor=0, key="dbStorage_readAheadCacheBatchSize")
    #: 0 or less: only the number of entries counts.
    db_storage_read_ahead_cache_batch_bytes_size: int = _setting(-1, key="dbStorage_readAheadCacheBatchBytesSize")
    #: Bytes, in each directory; None: 32 MiB. Java's default is a tenth of the direct memory.
    db_storage_rocksdb_block_cache_size: int | None = _setting(None, least=0, key="dbStorage_rocksDB_blockCacheSize")
    db_storage_rocksdb_write_buffer_size_mb: int = _setting(
        64, least=1, most=1 << 20, key="dbStorage_rocksDB_writeBufferSizeMB"
    )
    db_storage_rocksdb_sst_size_mb: int = _setting(64, least=1, most=1 << 20, key="dbStorage_rocksDB_sstSizeInMB")
    db_storage_rocksdb_block_size: int = _setting(64 * 1024, least=256, most=1 << 28, key="dbStorage_rocksDB_blockSize")
    db_storage_rocksdb_bloom_filter_bits_per_key: int = _setting(
        10, floor=-1, most=100, key="dbStorage_rocksDB_bloomFilterBitsPerKey"
    )
    db_storage_rocksdb_num_levels: int = _setting(-1, most=64, key="dbStorage_rocksDB_numLevels")
    db_storage_rocksdb_num_files_in_level0: int = _setting(
        4, least=1, most=1 << 20, key="dbStorage_rocksDB_numFilesInLevel0"
    )
    db_storage_rocksdb_max_size_in_level1_mb: int = _setting(
        256, least=1, most=1 << 20, key="dbStorage_rocksDB_maxSizeInLevel1MB"
    )
    db_storage_rocksdb_lz4_compression_enabled: bool = _setting(True, key="dbStorage_rocksDB_lz4CompressionEnabled")
    #: Every Apache bookie reads 2; bookies from 4.16 on read 5.
    db_storage_rocksdb_format_version: int = _setting(5, least=2, most=5, key="dbStorage_rocksDB_format_version")
    db_storage_rocksdb_log_path: str | None = _setting(None, key="dbStorage_rocksDB_logPath")

    #: At most RECORD_SIZE_BYTES_MAX: an entry that arrives must be readable in the journals and entry logs.
    netty_max_frame_size_bytes: int = _setting(5 * 1024 * 1024, least=1024, most=256 << 20)
    max_batch_read_size: int = _setting(5 * 1024 * 1024, floor=1)
    #: Of all connections together; 0: no limit.
    max_adds_in_progress_limit: int = _setting(0, floor=0)
    max_reads_in_progress_limit: int = _setting(0, floor=0)
    num_add_worker_threads: int = _setting(1, floor=0)
    num_read_worker_threads: int = _setting(8, floor=0)
    #: The most requests that wait for each of the threads above; further ones are refused. 0: no limit.
    max_pending_add_requests_per_thread: int = _setting(10_000, floor=0)
    max_pending_read_requests_per_thread: int = _setting(10_000, floor=0)
    #: The longest time that a client may leave answers unread; negative: no limit.
    wait_timeout_on_response_backpressure_ms: int = _setting(-1)
    close_channel_on_response_timeout: bool = _setting(False)
    #: Ours: clients that are connected at once, and never more than half of the process's open files. 0: that half.
    server_max_connections: int = _setting(20_000, least=0)
    #: Ours, milliseconds, 0: no deadline. A connection ends when its first request does not come; when a request has
    #: begun and its rest does not come; and after so long without a request while no answer is due.
    server_first_request_timeout_ms: int = _setting(60_000, least=0)
    server_request_timeout_ms: int = _setting(60_000, least=0)
    server_idle_timeout_ms: int = _setting(0, least=0)
    #: Ours, milliseconds: how long a TLS handshake may take; 10 s is Netty's own default.
    server_tls_handshake_timeout_ms: int = _setting(10_000, least=1)
    server_sock_keepalive: bool = _setting(True)
    server_tcp_keep_idle: int = _setting(-1)
    server_tcp_keep_intvl: int = _setting(-1)
    server_tcp_keep_cnt: int = _setting(-1)
    bookie_auth_provider_factory_class: str | None = _setting(None)

    disk_usage_threshold: float = _setting(0.95, least=0.0, most=1.0)
    disk_usage_warn_threshold: float = _setting(0.90, least=0.0, most=1.0)
    #: A full directory is used again below this; None: `disk_usage_threshold`.
    disk_usage_lwm_threshold: float | None = _setting(None, least=0.0, most=1.0)
    disk_check_interval: int = _setting(10_000, least=1)
    read_only_mode_enabled: bool = _setting(True)
    read_only_mode_on_any_disk_full_enabled: bool = _setting(True)
    #: The free bytes that a full directory needs for files that must be created; None: `log_size_limit`.
    min_usable_size_for_entry_log_creation: int | None = _setting(None, floor=0)
    min_usable_size_for_index_file_creation: int = _setting(100 << 20, floor=0)
    #: None: that for entry logs.
    min_usable_size_for_high_priority_writes: int | None = _setting(None, floor=0)
    force_read_only_bookie: bool = _setting(False)
    #: Keep the mode in BOOKIE_STATUS over a restart.
    persist_bookie_status_enabled: bool = _setting(False)

    #: Also run auto-recovery in the bookie's process.
    auto_recovery_daemon_enabled: bool = _setting(False)
    #: Seconds, where the metadata store has none: what is stored there counts.
    lost_bookie_recovery_delay: int = _setting(0, least=0)
    #: Seconds between the auditor's checks; 0: never (lost bookies: once, when it starts).
    auditor_periodic_bookie_check_interval: int = _setting(86_400, least=0)
    auditor_periodic_check_interval: int = _setting(604_800, floor=0)
    auditor_periodic_placement_policy_check_interval: int = _setting(0, floor=0)
    auditor_replicas_check_interval: int = _setting(0, floor=0)
    #: Of the entries between the first and the last of a fragment, which are always read.
    auditor_ledger_verification_percentage: int = _setting(0, least=0, most=100)
    auditor_max_number_of_concurrent_open_ledger_operations: int = _setting(500, least=1)
    #: Reads in flight while ledgers are checked; 0 or less: a bound of ours.
    in_flight_read_entry_num_in_ledger_checker: int = _setting(-1)
    #: Seconds; marks that are older are counted by the placement check. 0: none are.
    underreplicated_ledger_recovery_grace_period: int = _setting(0, floor=0)
    #: Milliseconds that a writer has to replace a lost bookie itself, before its ledger is fenced.
    open_ledger_rereplication_grace_period: int = _setting(30_000, least=0)
    #: Milliseconds until a ledger that could not be replicated is tried again; the first times sooner.
    lock_release_of_failed_ledger_grace_period: int = _setting(300_000, least=0)
    rw_rereplicate_backoff_ms: int = _setting(5000, least=0)
    #: Entries of a fragment that are copied at once.
    rereplication_entry_batch_size: int = _setting(10, least=1)
    #: The placement check also marks ledgers with entries in too few racks, and a worker moves replicas to others.
    repaired_placement_policy_not_adhering_bookie_enabled: bool = _setting(False)
    #: Bytes a second; 0 or less: no limit.
    replication_rate_by_bytes: int = _setting(-1)

    tls_provider_factory_class: str | None = _setting(None)
    tls_key_store_type: str = _setting("JKS")
    tls_key_store: str | None = _setting(None)
    tls_key_store_password_path: str | None = _setting(None)
    tls_certificate_path: str | None = _setting(None)
    tls_trust_store_type: str = _setting("JKS")
    tls_trust_store: str | None = _setting(None)
    tls_client_authentication: bool = _setting(False)
    #: Ours: Apache's bookie serves clients without TLS too, whatever the other settings say.
    tls_required: bool = _setting(False)
    #: TLS files that change (also of the HTTP server) are loaded again after so many seconds; 0: by a restart.
    tls_cert_files_refresh_duration_seconds: int = _setting(0, least=0)
    #: As `TLSv1.3`; none: TLS 1.2 and later.
    tls_enabled_protocols: tuple[str, ...] = ()
    #: Nobody else may start the bookie; none: anybody may.
    permitted_startup_users: tuple[str, ...] = ()

    http_server_enabled: bool = _setting(False)
    http_server_port: int = _setting(8080, least=0, most=65535)
    #: None: every address, as Apache's; all but probes on loopback only, where no token or certificate is asked for.
    http_server_host: str | None = _setting(None)
    http_server_tls_enable: bool = _setting(False)
    #: PEM: the private key and the certificate.
    http_server_key_store_path: str | None = _setting(None)
    http_server_key_store_password: str | None = _setting(None)
    #: PEM: the authorities whose client certificates are let in.
    http_server_trust_store_path: str | None = _setting(None)
    http_server_trust_store_password: str | None = _setting(None)
    #: Ours: what a client sends as `Authorization: Bearer`; better in a file.
    http_server_token: str | None = _setting(None)
    http_server_token_file: str | None = _setting(None)
    #: Ours: the token of clients that may read, and get no secrets.
    http_server_read_only_token_file: str | None = _setting(None)
    #: Ours: /heartbeat, /metrics, bookie/state and bookie/is_ready need no token.
    http_server_open_probes: bool = _setting(True)

    conf_path: Path | None = None
    #: Settings of the file that have no effect here, a sentence each.
    warnings: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BookieConfig:
        """Read a `bk_server.conf`. Raises NotFound for a missing file, or UsageError (naming file, line and key)."""
        return cls.from_properties(read_properties(path))

    @classmethod
    def from_properties(cls, properties: Properties) -> Self:
        """Return the settings in `properties`, else Java's defaults. Raises UsageError, naming file, line and key."""
        given = {"conf_path": properties.path, **_given(cls, properties)}
        given["metadata_service_uri"] = properties.metadata_service_uri
        journals = properties.list("journalDirectories") or properties.list("journalDirectory")[:1]
        lists = {
            "journal_directories": journals,
            "ledger_directories": properties.list("ledgerDirectories"),
            "index_directories": properties.list("indexDirectories"),
            "tls_enabled_protocols": properties.list("tlsEnabledProtocols"),
            "permitted_startup_users": properties.list("permittedStartupUsers"),
        }
        given |= {name: values for name, values in lists.items() if values}
        given["warnings"] = tuple(
            f"{properties.where(key)}: {key} has no effect: {instead}"
            for key, (nothing, instead) in _WITHOUT_EFFECT.items()
            if properties.get(key, nothing).lower() not in ("", nothing)
        )
        storage = properties.list("ledgerStorageClass")
        if storage:
            given["ledger_storage_class"] = storage[0]
        # Java's way to choose before ledgerStorageClass. Source: ServerConfiguration.getLedgerStorageClass.
        is_sorted = given.get("ledger_storage_class", _SORTED_LEDGER_STORAGE) == _SORTED_LEDGER_STORAGE
        if is_sorted and properties.get("sortedLedgerStorageEnabled", "").lower() == "false":
            given["ledger_storage_class"] = _INTERLEAVED_LEDGER_STORAGE
        declared_keys = {key for keys, _ in settings_of(cls) for key in keys}
        unread = set(properties) - declared_keys - _WITHOUT_EFFECT.keys() - _OTHER_KEYS
        given["warnings"] += _unread_warnings(properties, sorted(unread))
        given["warnings"] += _metrics_warning(properties, given.get("http_server_enabled", False))
        if rocksdb_conf := properties.get("entryLocationRocksdbConf"):
            given["warnings"] += _take_rocksdb_conf(Path(rocksdb_conf), properties, given)
        config = cls(**given)
        for key, name in (("journalDirectory", "journal_directories"), ("ledgerDirectories", "ledger_directories")):
            if len(set(getattr(config, name))) != len(getattr(config, name)):
                raise UsageError(f"{properties.where(key)}: {key} names a directory twice")
        if config.page_size % 8:
            where = properties.where("pageSize")
            raise UsageError(f"{where}: pageSize must be a multiple of 8, not {config.page_size}")
        if config.journal_alignment_size % 512:
            where = properties.where("journalAlignmentSize")
            size = config.journal_alignment_size
            raise UsageError(f"{where}: journalAlignmentSize must be a multiple of 512, not {size}")
        return config

    def with_changes(self, **changes: Any) -> BookieConfig:
        """Return a copy with some settings changed."""
        return replace(self, **changes)

    def with_settings(self, settings: Mapping[str, str]) -> BookieConfig:
        """Return a copy with other settings, given by Java's names. Raises UsageError for a value that does not parse.

        Only names of `settings()` can be given.
        """
        declared = {keys[0]: each for keys, each in settings_of(type(self))}
        return replace(self, **{declared[key].name: _parse(declared[key], text, key) for key, text in settings.items()})

    def settings(self) -> dict[str, str]:
        """Return every setting of one value, by Java's name, as in a file, without those that are None."""
        values = {keys[0]: getattr(self, each.name) for keys, each in settings_of(type(self))}
        given = {key: value for key, value in values.items() if value is not None}
        return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in given.items()}

    @property
    def index_or_ledger_directories(self) -> tuple[str, ...]:
        """The directories of the indexes: `indexDirectories`, else `ledgerDirectories`."""
        return self.index_directories or self.ledger_directories

    @property
    def ledger_storage(self) -> str:
        """`sorted`, `interleaved` or `db`. Raises Unsupported for a class that is none of Apache's."""
        name = _STORAGE_NAMES.get(self.ledger_storage_class)
        if name is None:
            raise Unsupported(
                f"Unknown ledgerStorageClass {self.ledger_storage_class}", hint=f"one of {', '.join(_STORAGE_NAMES)}"
            )
        return name


def _unread_warnings(properties: Properties, keys: Iterable[str]) -> tuple[str, ...]:
    """Return a sentence for each reason why some of `keys`, which nothing reads, have no effect."""
    reason = {key: instead for instead, known in _INSTEAD.items() for key in known}
    unknown = next(instead for instead, known in _INSTEAD.items() if not known)
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(reason.get(key, unknown), []).append(key)
    return tuple(
        f"{properties.where(each[0]) if len(each) == 1 else properties.path}: {', '.join(each)} "
        f"{'has' if len(each) == 1 else 'have'} no effect: {instead}"
        for instead, each in found.items()
    )


def _take_rocksdb_conf(path: Path, properties: Properties, given: dict[str, Any]) -> tuple[str, ...]:
    """Let the options in `path` take the place of dbStorage_rocksDB_* in `given`, as in Apache's. Return warnings."""
    from bkctl.rocksdb_conf import read_options

    where = properties.where("entryLocationRocksdbConf")
    if not path.exists():
        return (f"{where}: entryLocationRocksdbConf has no effect: there is no {path}; dbStorage_rocksDB_* count",)
    settings, without_effect = read_options(path)
    names = {keys[0]: each for keys, each in settings_of(BookieConfig)}
    given |= {names[key].name: _parse(names[key], text, f"{path}: {key}") for key, text in settings.items()}
    if not without_effect:
        return ()
    return (f"{where}: of entryLocationRocksdbConf {', '.join(without_effect)} in {path} have no effect",)


def _metrics_warning(properties: Properties, is_http_enabled: bool) -> tuple[str, ...]:
    """Return the warning that metrics which the file asks for are not served. Source: PrometheusMetricsProvider."""
    provider = properties.get("statsProviderClass", "").rpartition(".")[2]
    is_prometheus = provider == "PrometheusMetricsProvider"
    switches = ("enableStatistics", "prometheusStatsHttpEnable") if is_prometheus else ("enableStatistics",)
    is_off = any(properties.get(key, "").lower() == "false" for key in switches)
    if provider in ("", "NullStatsProvider") or is_off or (is_prometheus and is_http_enabled):
        return ()
    where = "metrics are Prometheus text at /metrics of the HTTP server"
    if not is_http_enabled:
        where += ", which is off; set httpServerEnabled=true and httpServerPort"
    return (f"{properties.where('statsProviderClass')}: statsProviderClass has no effect: {where}",)


def _given(cls: type[ClientConfig], properties: Properties) -> dict[str, Any]:
    """Return the settings of `cls` that `properties` has, by field name."""
    given = {}
    for keys, declared in settings_of(cls):
        key = next((key for key in keys if key in properties), None)
        if key is None or ("None" in str(declared.type) and properties[key] == ""):
            continue
        # A list, as of groups, has commas that the file's reader took for its own.
        text = ",".join(properties.list(key)) if declared.type == "str" and declared.default == "" else properties[key]
        given[declared.name] = _parse(declared, text, f"{properties.where(key)}: {key}")
    return given


def _parse(declared: Field[Any], text: str, what: str) -> Any:
    if text == declared.metadata["unset"]:
        return declared.default
    kind = str(declared.type).removesuffix(" | None")
    if kind == "str":
        return text
    if kind == "bool":
        word = text.lower()
        if word in ("true", "yes", "on", "t", "y", "1"):
            return True
        if word in ("false", "no", "off", "f", "n", "0"):
            return False
        raise UsageError(f"{what} must be true or false, not {text!r}")
    value: int | float
    try:
        value = _whole_number(text) if kind == "int" else float(text)
    except ValueError:
        words = "a whole number" if kind == "int" else "a number"
        raise UsageError(f"{what} must be {words}, not {text!r}") from None
    least, most, floor = (declared.metadata[name] for name in ("least", "most", "floor"))
    if value != value or (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        bounds = f"at most {most}" if least is None else bounds
        raise UsageError(f"{what} must be {bounds}, not {text}")
    return value if floor is None else max(value, floor)


def _whole_number(text: str) -> int:
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", text, re.ASCII):
        return int(text, 16)
    raise ValueError(text)


assert all(declared.default is not MISSING for declared in fields(BookieConfig)), "every setting has a default"
