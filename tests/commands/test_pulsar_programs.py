"""The programs that Pulsar's chart runs: settings from variables, and the names of the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bkctl.commands.main import run
from bkctl.commands.pulsar_programs import OPTIONS_OF_THE_SHELL, apply_env, shell_words
from bkctl.config import BookieConfig
from bkctl.errors import UsageError

IMAGE = Path(__file__).parents[2] / "image/pulsar"

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run bin/NAME in a directory with a conf/bookkeeper.conf on a store in a file."""
    conf = tmp_path / "conf/bookkeeper.conf"
    conf.parent.mkdir()
    conf.write_text(
        f"metadataServiceUri=sqlite://{tmp_path}/store.db\nbookieId=b1\nallowLoopback=true\nbookiePort=3181\n"
        f"journalDirectories={tmp_path}/journal\nledgerDirectories={tmp_path}/ledgers\n"
    )

    def run(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        state = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "PATH": path}
        return subprocess.run(
            [IMAGE / "bin" / name, *arguments], cwd=tmp_path, env=state | env, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip

    return run


def test_variables_replace_keys_in_comments_too_and_prefixed_ones_are_added(tmp_path: Path) -> None:
    path = tmp_path / "x.conf"
    path.write_text("# Prose = of a comment\na=1\n a=2\n#b=3\n# c = 4\n## d=5\n\nlast=6")
    env = {"a": " x=y \n", "b": "", "c": "4", "d": "no", "PULSAR_PREFIX_e": "a\\b", "PULSAR_PREFIX_a": "z", "PATH": "/"}
    done = apply_env(path, "PULSAR_PREFIX_", env | {"PULSAR_PREFIX_tlsPassword": "hidden"})
    assert path.read_text() == (
        "# Prose = of a comment\na=1\na=z\nb=\nc=4\n## d=5\n\nlast=6\ne=a\\b\ntlsPassword=hidden\n"
    )
    assert f"[{path}] Applying config a = x=y" in done
    assert f"[{path}] Updating config a = z" in done
    assert f"[{path}] Adding config e = a\\b" in done
    assert "hidden" not in str(done)


def test_the_program_takes_files_and_a_prefix(program: Program, tmp_path: Path) -> None:
    (tmp_path / "conf/other.conf").write_text("x=1\n")
    done = program("apply-config-from-env.py", "--prefix", "MINE_", "conf/other.conf", MINE_y="2", PULSAR_PREFIX_z="3")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "conf/other.conf").read_text() == "x=1\n\ny=2\n"
    assert program("apply-config-from-env.py").returncode != 0
    missing = program("apply-config-from-env.py", "conf/none.conf")
    assert missing.returncode == 4
    assert "conf/none.conf" in missing.stderr


def test_rocksdb_variables_reach_the_bookie_by_the_option_file(program: Program, tmp_path: Path) -> None:
    options = tmp_path / "conf/entry_location_rocksdb.conf"
    options.write_text((IMAGE / "conf/entry_location_rocksdb.conf").read_text())
    conf = tmp_path / "conf/rocksdb.conf"
    conf.write_text(f"entryLocationRocksdbConf={options}\ndbStorage_rocksDB_sstSizeInMB=3\n")
    assert BookieConfig.load(conf).warnings == ()
    before = options.read_text()
    assert program("update-rocksdb-conf-from-env.py").returncode == 0
    assert options.read_text() == before
    done = program(
        "update-rocksdb-conf-from-env.py", dbStorage_rocksDB_writeBufferSizeMB="8", dbStorage_rocksDB_numLevels="5",
        PULSAR_PREFIX_dbStorage_rocksDB_blockCacheSize="8388608", dbStorage_rocksDB_bloomFilterBitsPerKey="12",
        dbStorage_rocksDB_format_version="2", dbStorage_rocksDB_lz4CompressionEnabled="true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = BookieConfig.load(conf)
    assert config.db_storage_rocksdb_write_buffer_size_mb == 8
    assert config.db_storage_rocksdb_block_cache_size == 8388608
    assert config.db_storage_rocksdb_bloom_filter_bits_per_key == 12
    assert config.db_storage_rocksdb_format_version == 2
    assert config.db_storage_rocksdb_sst_size_mb == 64  # Of the file, as in Apache's.
    assert config.warnings == (f"{conf} line 1: of entryLocationRocksdbConf num_levels=5 in {options} have no effect",)
    wrong = program("update-rocksdb-conf-from-env.py", dbStorage_rocksDB_sstSizeInMB="many")
    assert wrong.returncode == 2
    assert "dbStorage_rocksDB_sstSizeInMB must be a whole number" in wrong.stderr


def test_option_files_with_units_comments_and_unknown_options_are_read(tmp_path: Path) -> None:
    options, conf = tmp_path / "o.conf", tmp_path / "bk.conf"
    conf.write_text(f"entryLocationRocksdbConf={options}\n")
    assert "there is no" in BookieConfig.load(conf).warnings[0]
    options.write_text(
        "[DBOptions]\n # a comment\n max_background_jobs=32\n create_if_missing=true\n"
        '[CFOptions "default"]\n compression=kNoCompression\n write_buffer_size=16M\n'
        '[TableOptions/BlockBasedTable "default"]\n filter_policy=nullptr\n block_size=4K\n'
    )
    config = BookieConfig.load(conf)
    assert config.db_storage_rocksdb_write_buffer_size_mb == 16
    assert config.db_storage_rocksdb_block_size == 4096
    assert config.db_storage_rocksdb_bloom_filter_bits_per_key == -1
    (warning,) = config.warnings
    assert "max_background_jobs=32, compression=kNoCompression in" in warning
    options.write_text("no section\n")
    with pytest.raises(UsageError, match="not a file of RocksDB's options"):
        BookieConfig.load(conf)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("listbookies -ro -h", "bookies list --state=ro"),
        ("listbookies --readwrite", "bookies list --state=rw"),
        ("ledgermetadata -ledgerid 12", "ledger show --ledger-id=12"),
        ("ledgermetadata -l=-3", "ledger show --ledger-id=-3"),
        ("listunderreplicated -missingreplica b1:3181 -pmr", "autorecovery list --missing=b1:3181"),
        ("autorecovery -disable", "autorecovery disable"),
        ("autorecovery", "autorecovery status"),
        ("simpletest -ensemble 1 -writeQuorum 1 -a 1", "ledger test --ensemble-size=1 --write-quorum=1 --ack-quorum=1"),
        ("decommissionbookie -bookieid b1", "bookies decommission -y b1"),
        ("recover -sk -dryrun b1", "bookies recover --skip-open --dry-run b1"),
        ("bookieinit", "bookie init"),
        ("bookieformat -nonInteractive -deleteCookie", "bookie format --delete-cookie"),
    ],
)
def test_the_shell_s_options_are_ours(typed: str, ours: str) -> None:
    name, *rest = typed.split()
    assert " ".join(shell_words(name, rest)[0]) == ours


@pytest.mark.parametrize(
    "typed", ["nothing", "listbookies -x", "ledgermetadata -l", "ledgermetadata -restorefromfile x"]
)
def test_unknown_commands_and_options_of_the_shell_are_refused_by_name(typed: str) -> None:
    name, *rest = typed.split()
    with pytest.raises(UsageError, match=rest[0] if rest else name):
        shell_words(name, rest)


def test_the_shell_s_exit_codes_are_those_that_jobs_wait_for(program: Program, tmp_path: Path) -> None:
    shell = ("bookkeeper", "shell")
    assert program(*shell, "whatisinstanceid").returncode != 0
    assert program(*shell, "initnewcluster").returncode == 0
    first = program(*shell, "whatisinstanceid")
    assert first.returncode == 0
    assert program(*shell, "initnewcluster").returncode != 0
    assert program(*shell, "listbookies", "-rw").returncode == 0
    assert program(*shell, "initbookie").returncode == 0
    cookie = program(*shell, "cookie_get", "b1")
    assert cookie.returncode == 0, cookie.stderr
    assert program(*shell, "bookieformat", "-nonInteractive", "-deleteCookie").returncode != 0
    done = program(*shell, "bookieformat", "-nonInteractive", "-force", "-deleteCookie")
    assert done.returncode == 0, done.stderr
    assert program(*shell, "cookie_get", "b1").returncode != 0
    again = program(*shell, "bookieformat", "-nonInteractive", "-force", "-deleteCookie")
    assert again.returncode == 0, again.stderr
    assert program(*shell, "metaformat", "-nonInteractive").returncode != 0
    assert program(*shell, "whatisinstanceid").stdout == first.stdout
    done = program(*shell, "metaformat", "-nonInteractive", "-force")
    assert done.returncode == 0, done.stderr
    second = program(*shell, "whatisinstanceid")
    assert second.returncode == 0
    assert second.stdout != first.stdout
    done = program(*shell, "nukeexistingcluster", "-zkledgersrootpath", "/ledgers", "-force")
    assert done.returncode == 0, done.stderr
    assert program(*shell, "whatisinstanceid").returncode != 0
    assert program(*shell, "metaformat", "-nonInteractive").returncode == 0


def test_other_programs_of_pulsar_are_refused_by_name(program: Program) -> None:
    done = program("pulsar", "broker")
    assert done.returncode == 2
    assert "bin/pulsar broker is not in the image of a bookie" in done.stderr
    assert program("bookkeeper", "localbookie").returncode == 2
    assert program("pulsar", "version").returncode == 0


def test_zookeeper_s_tls_options_for_a_jvm_become_ours(program: Program, tmp_path: Path) -> None:
    (tmp_path / "conf/bkenv.sh").write_text(
        'BOOKIE_EXTRA_OPTS="${BOOKIE_EXTRA_OPTS} -Dzookeeper.client.secure=true '
        f"-Dzookeeper.ssl.keyStore.location={tmp_path}/none.pem "
        f'-Dzookeeper.ssl.trustStore.location={tmp_path}/ca.crt"\n'
    )
    uri = "metadataServiceUri=zk+hierarchical://127.0.0.1:1/ledgers\n"
    (tmp_path / "conf/zk.conf").write_text(uri)
    done = program("bookkeeper", "shell", "whatisinstanceid", BOOKIE_CONF="conf/zk.conf")
    assert done.returncode != 0
    assert f"{tmp_path}" in done.stderr
    assert ".pem" in done.stderr or "ca.crt" in done.stderr


@pytest.mark.parametrize("name", sorted(OPTIONS_OF_THE_SHELL))
def test_options_of_the_shell_are_options_of_our_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, ours in OPTIONS_OF_THE_SHELL[name].items():
        command, given = shell_words(name, [f"-{option.split()[0]}", "1"])
        assert run([*command[:2], "--help"]) == 0
        shown = capsys.readouterr().out
        flag = ours.partition("=")[0]
        assert given == {option}
        if flag.startswith("-"):
            assert f"{flag} " in shown or f"{flag}," in shown, option
