from __future__ import annotations

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
