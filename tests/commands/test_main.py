from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.waiting import LIMIT_S

from bkctl import __version__
from bkctl.commands.kit.access import connect_to, parse_bookie_addresses
from bkctl.commands.kit.settings import SETTINGS, GlobalOptions
from bkctl.commands.kit.values import parse_duration, parse_number, parse_size
from bkctl.commands.main import error_report
from bkctl.errors import EXIT_CODES, Corrupt, NotFound, UsageError
from bkctl.formats.metadata import DigestType, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

from .conftest import Cli

HEAVY = ("kazoo", "grpc", "rocksdict", "pyspark", "asyncio", "google.protobuf", "sqlite3", "pydantic", "rich")
#: Groups whose commands use much of the library.
GROUPS = ("autorecovery", "bookie", "bookies", "cluster", "cookie", "entrylog", "ledger", "metadata", "pipeline")


def bkctl(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bkctl", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **settings,
    )  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("arguments", [["--help"], ["journal", "read", "--help"], ["top", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['bkctl', *{arguments!r}]\n"
        "from bkctl.commands.main import main\n"
        "try: main()\n"
        f"except SystemExit as e: print([m for m in {HEAVY!r} if m in sys.modules], e.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group_imports_no_settings_clusters_or_checksums(group: str) -> None:
    code = (
        f"import sys; sys.argv = ['bkctl', {group!r}, '--help']\n"
        "from bkctl.commands.main import main\n"
        "unused = ('bkctl.config', 'bkctl.metadata.cluster', 'google_crc32c')\n"
        "try: main()\n"
        "except SystemExit as e: print([m for m in unused if m in sys.modules], e.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_offline_commands_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "1.txn").write_bytes(b"")
    code = (
        f"import sys; sys.argv = ['bkctl', 'journal', 'read', {str(tmp_path)!r}, '-o', 'ndjson']\n"
        "from bkctl.commands.main import main\n"
        "try: main()\n"
        f"except SystemExit as e: print([m for m in {HEAVY!r} if m in sys.modules], e.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "No such command 'nope'"),
        (["jornal"], "No such command 'jornal'; did you mean 'journal'?"),
        (["listledgers"], "No such command 'listledgers'; it is 'bkctl ledger list' here"),
        (["listledgers", "-m"], "it is 'bkctl ledger list' here"),
        (["updateBookieInLedger", "-sb", "a"], "it is 'bkctl metadata replace-bookie' here"),
        (["bookie", "listledgers"], "it is 'bkctl ledger list' here"),
        (["bookie", "converttodbstorage"], "it is 'bkctl bookie convert' here"),
        (["bookies", "list-bookies"], "it is 'bkctl bookies list' here"),
        (["bookies", "nukeexistingcluster"], "it is 'bkctl cluster nuke' here"),
        (["bookie", "list"], "No such command 'list'; did you mean 'bkctl bookies list'?"),
        (["bookies", "gc"], "did you mean 'bkctl bookie gc'?"),
        (["ledger", "create"], "did you mean 'bkctl ledger write'?"),
        (["ledger", "info"], "did you mean 'bkctl ledger show'?"),
        (["metadata", "dump"], "did you mean 'bkctl metadata export'?"),
        (["decommission"], "did you mean 'bkctl bookies decommission'?"),
        (["ledger", "replace-bookie"], "did you mean 'bkctl metadata replace-bookie'?"),
        (["journals", "list"], "it is 'bkctl journal list' here"),
        (["bookie", "rebuild"], "did you mean 'bkctl bookie index rebuild'?"),
        (["-v"], "Missing command; try 'bkctl --help'"),
        (["journal", "read", "--nope"], "No such option: --nope"),
        (["journal", "read", "x", "--limit", "x"], "--limit: not a number: 'x'"),
        (["journal", "read", "x", "--limit", "0"], "must be 1 or more"),
        (["journal", "read", "x", "--type", "x"], "'x' is not one of entry"),
        (["journal", "read", "-o", "xml"], "'xml' is not one of table"),
        (["journal", "read", "-o", "jsn"], "ndjson, yaml, csv, id; did you mean 'json'?"),
        (["cluster", "health", "mute", "disk-ful"], "values; did you mean 'disk-full'?"),
        (["ledger", "show"], "No ledger is given"),
        (["ledger", "show", "-5"], "put a negative id after -- or in --ledger-id"),
        (["ledger", "show", "zz"], "Not a ledger id: 'zz'"),
        (["ledger", "show", "7:1", "--ledger-scope-id", "8"], "in scope 7, but the scope id given is 8"),
        (["ledger", "show", "1", "--ledger-id", "2"], "name different ledgers"),
        (["ledger", "tail", "1", "2"], "unexpected extra argument"),
        (["ledger", "list"], "No cluster is named"),
        (["ledger", "list", "-u", "nonsense"], "Not a metadata URI"),
        (["ledger", "list", "--all-scopes", "--ledger-scope-id", "7"], "--all-scopes and --ledger-scope-id"),
        (["ledger", "list", "--timeout", "soon"], "--timeout: not a duration: 'soon'"),
        (["ledger", "read", "1", "--from", "5", "--to", "4"], "--from 5 is after --to 4"),
        (["ledger", "read", "1", "--format", "raw", "-o", "json"], "--format raw"),
        (["ledger", "write", "--digest-type", "MD5"], "Not a digest type"),
        (["ledger", "write", "--custom-metadata", "x"], "not KEY=VALUE"),
        (["ledger", "write", "--uuid", "--ledger-id", "1"], "--uuid generates an id"),
        (["ledger", "write", "-", "-"], "- (stdin) is given twice"),
        (["ledger", "write", "--record-size", "0"], "record size"),
        (["ledger", "read", "1", "--password", "a", "--password-file", "b"], "--password and --password-file"),
        (["ledger", "list", "--bookie-address", "x"], "not ID=HOST:PORT"),
        (["bookie", "index", "show", "1"], "No directory is given"),
        (["bookie", "start"], "No bookie configuration"),
        (["bookie", "files", "/", "--kind", "x"], "--kind 'x'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(cli: Cli, arguments: list[str], words: str) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert words in result.err
    assert result.err.startswith('{"error": {"code": "usage"' if "json" in arguments else "bkctl: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("form", [["-o", "json"], ["-ojson"], ["--output=json"], ["--output", "json"]])
def test_errors_are_json_where_the_output_is(cli: Cli, form: list[str], tmp_path: Path) -> None:
    def error(*arguments: object) -> dict[str, Any]:
        result = cli(*arguments)
        assert result.out == ""
        found: dict[str, Any] = json.loads(result.err)["error"]
        assert found["exitCode"] == result.code
        return found

    refused = error("ledger", "list", "--no-such-option", *form)
    assert (refused["code"], refused["hint"]) == ("usage", "try 'bkctl ledger list --help'")
    assert error(*form, "ledger", "list", "-u", f"sqlite://{tmp_path}/none.db")["code"] == "notFound"
    assert error("entrylog", "list", tmp_path / "none", *form)["exitCode"] == 4
    assert error("cookie", "create", "b", tmp_path / "none", *form)["code"] == "ENOENT"
    for other in ("yaml", "ndjson"):
        assert cli("ledger", "list", "--no-such-option", "-o", other).err.startswith("bkctl: ")


def test_columns_of_a_change_are_checked_before_it(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    assert cli("cluster", "init", "-u", uri).code == 0

    def refused(*words: str) -> str:
        result = cli("autorecovery", "disable", "-u", uri, *words)
        assert (result.code, result.out) == (2, "")
        monkeypatch.delenv("BKCTL_OUTPUT", raising=False)
        assert cli("autorecovery", "status", "-u", uri, "-o", "json").json["enabled"] is True
        return result.err

    for option in ("--columns", "--sort"):
        problem = f"{option} 'colour': not a column of this command; name some of enabled, changed"
        assert problem in refused(option, "colour")
    assert "-o id: the rows of this command have no ids" in refused("-o", "id")
    assert "--columns and -o id are given" in refused("--columns", "enabled", "-o", "id")
    monkeypatch.setenv("BKCTL_OUTPUT", "id")
    assert "have no ids" in refused()


def test_columns_of_a_file_are_checked_before_it_is_written(cli: Cli, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    assert cli("cluster", "init", "-u", uri).code == 0
    assert cli("metadata", "export", "-f", tmp_path / "export", "-u", uri, "--columns", "colour").code == 2
    assert not (tmp_path / "export").exists()


def test_columns_of_a_job_are_checked_before_it(cli: Cli) -> None:
    # Only the rows of applications have no ids.
    assert "have no ids" in cli("pipeline", "inventory", "--by", "application", "-o", "id").err
    assert "not a column" in cli("pipeline", "inventory", "--by", "scope", "--sort", "fileSize").err


def test_columns_of_a_table_alone_may_be_named(cli: Cli, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    assert cli("cluster", "init", "-u", uri).code == 0
    assert cli("ledger", "list", "-u", uri, "--columns", "e/w/a,digest", "--sort", "digest").out == "E/W/A  DIGEST\n"
    assert cli("ledger", "list", "-u", uri, "--columns", "e/w/a", "-o", "csv").code == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ledger", "list", "-u", "sqlite:///nonexistent/file"], 4),
        (["ledger", "list", "-c", "/nonexistent/file"], 4),
        (["ledger", "list", "-x", "nowhere"], 4),
        (["ledger", "list", "-u", "ms://host/x"], 8),
        (["ledger", "list", "-u", "zk+hierarchical://127.0.0.1:1/ledgers", "--timeout", "2"], 6),
        (["ledger", "write", "/nonexistent", "-u", "sqlite:///x"], 4),
        (["ledger", "write", "/", "-u", "sqlite:///x"], 2),
        (["journal", "read", "/nonexistent/1.txn"], 4),
        (["journal", "list", "/nonexistent"], 4),
        (["entrylog", "read", "7", "--dir", "/"], 4),
        (["bookie", "index", "show", "7:1", "--dir", "/"], 4),
        (["journal", "lastmark", "/"], 4),
    ],
)
def test_errors_are_one_line_with_their_exit_code(cli: Cli, arguments: list[str], code: int) -> None:
    result = cli(*arguments)
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("bkctl: ")
    assert result.err.count("\n") == 1


def test_debug_shows_the_traceback_and_the_line(cli: Cli) -> None:
    result = cli("--debug", "ledger", "show", "zz")
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("bkctl: Not a ledger id")


def test_operating_system_errors_have_exit_codes() -> None:
    codes = {errno.ENOENT: 4, errno.EACCES: 1, errno.ENOSPC: 1, errno.EEXIST: 5, errno.ECONNREFUSED: 6, errno.EISDIR: 2}
    for number, code in codes.items():
        assert error_report(OSError(number, "x")).exit_code == code
    assert error_report(TimeoutError()).exit_code == 6
    assert error_report(MemoryError()).line.startswith("Not enough memory; ")
    report = error_report(OSError(errno.EACCES, "Permission denied", "/x"))
    assert (report.line, report.exit_code, report.code) == ("/x: Permission denied", 1, "EACCES")
    assert set(codes.values()) <= set(EXIT_CODES)
    assert error_report(Corrupt("Bad", hint="look")).line == "Bad; look"


def test_global_options_stand_before_the_group_or_after_the_command(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "1.txn").write_bytes(b"")
    assert cli("-o", "json", "journal", "list", tmp_path).json[0]["journalId"] == 1
    assert cli("journal", "list", tmp_path, "-o", "json").json[0]["journalId"] == 1
    assert cli("-o", "json", "journal", "list", tmp_path, "-o", "id").out == "1\n"


def test_the_environment_gives_the_form_of_output(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.txn").write_bytes(b"")
    monkeypatch.setenv("BKCTL_OUTPUT", "id")
    assert cli("journal", "list", tmp_path).out == "1\n"
    assert cli("-o", "ndjson", "journal", "list", tmp_path).rows[0]["version"] == 1
    monkeypatch.setenv("BKCTL_OUTPUT", "xml")
    assert cli("journal", "list", tmp_path).code == 2


def test_the_environment_gives_the_flags_of_the_program(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BKCTL_DEBUG", "1")
    assert "Traceback" in cli("ledger", "show", "zz").err
    monkeypatch.setenv("BKCTL_DEBUG", "0")
    assert "Traceback" not in cli("ledger", "show", "zz").err
    assert "Traceback" in cli("ledger", "show", "zz", "--debug").err
    monkeypatch.setenv("BKCTL_DEBUG", "perhaps")
    refused = cli("ledger", "show", "zz")
    assert (refused.code, "BKCTL_DEBUG='perhaps'" in refused.err) == (2, True)
    monkeypatch.delenv("BKCTL_DEBUG")
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    for text, says_more in (("yes", True), ("no", False), ("", False)):
        monkeypatch.setenv("BKCTL_VERBOSE", text)
        assert (f"cluster {uri}" in cli("ledger", "list", "-u", uri).err) is says_more


def test_connection_order(tmp_path: Path) -> None:
    conf = tmp_path / "bk.conf"
    conf.write_text("zkServers=h:1\nzkLedgersRootPath=/l\n")
    empty = tmp_path / "empty.conf"
    empty.write_text("")
    contexts = tmp_path / "config.toml"
    contexts.write_text(
        'current-context = "b"\n[contexts.a]\nmetadata-uri = "zk://a/x"\n[contexts.b]\nmetadata-uri = "zk://b/x"\n'
    )
    environment = {"BKCTL_CONFIG": str(contexts)}

    def uri(*levels: GlobalOptions) -> str:
        return connect_to([("", level) for level in levels], environment).uri

    nothing = GlobalOptions()
    assert uri(GlobalOptions(metadata_uri="u"), GlobalOptions(metadata_uri="v")) == "u"
    assert uri(nothing, GlobalOptions(metadata_uri="v"), GlobalOptions(metadata_uri="w")) == "v"
    assert uri(GlobalOptions(conf=conf), GlobalOptions(metadata_uri="v")) == "zk+null://h:1/l"
    assert uri(GlobalOptions(metadata_uri="u", conf=conf)) == "u"
    assert uri(GlobalOptions(context="a"), GlobalOptions(metadata_uri="v")) == "zk://a/x"
    assert uri(nothing) == "zk://b/x"
    assert uri(GlobalOptions(conf=empty), GlobalOptions(metadata_uri="v")) == "v"
    with pytest.raises(UsageError, match="no metadataServiceUri"):
        uri(GlobalOptions(conf=empty))
    with pytest.raises(NotFound, match="'c' is not in"):
        uri(GlobalOptions(context="c"))
    contexts.write_text("]")
    with pytest.raises(UsageError, match="not TOML"):
        uri(nothing)


def test_missing_cluster_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="No cluster is named"):
        connect_to([("", GlobalOptions())], {"BKCTL_CONFIG": "/nonexistent/config"})


def test_numbers_with_units() -> None:
    assert [parse_size(text, "x") for text in ("0", "10", "1k", "1KiB", "2KB", "3 MiB")] == [
        0,
        10,
        1024,
        1024,
        2000,
        3 << 20,
    ]
    assert [parse_duration(text, "x") for text in ("1", "1.5s", "200ms", "2m", "1h", "1d")] == [
        1,
        1.5,
        0.2,
        120,
        3600,
        86400,
    ]
    for text in ("", "x", "-1", "1x", "1e3", "٣"):
        with pytest.raises(UsageError):
            parse_size(text, "x")
        with pytest.raises(UsageError):
            parse_duration(text, "x")


@pytest.mark.parametrize("number", [-(1 << 63), 0, (1 << 64) - 1])
def test_numbers_have_64_bits(number: int) -> None:
    assert parse_number(str(number), "x") == number
    for text in (str(-(1 << 63) - 1), str(1 << 64), "1" * 21, hex(1 << 64)):
        with pytest.raises(UsageError, match="at most 64 bits"):
            parse_number(text, "x")


def test_bookie_addresses() -> None:
    assert parse_bookie_addresses(("a:3181=h:1", "b=[::1]:2")) == {"a:3181": ("h", 1), "b": ("::1", 2)}


def test_a_reader_that_goes_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "1.txn").write_bytes(b"")
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [sys.executable, "-m", "bkctl", "journal", "list", str(tmp_path)], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert process.communicate(timeout=LIMIT_S) == (None, b"")
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "1.txn").write_bytes(b"")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bkctl", "journal", "list", str(tmp_path)],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "bkctl: stdout: No space left on device\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_in_the_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    fifo = tmp_path / "password"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [sys.executable, "-m", "bkctl", "ledger", "read", "1", "--password-file", str(fifo)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # Opening the other end succeeds once the command waits there.
    writer = os.open(fifo, os.O_WRONLY)
    time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT_S)
    os.close(writer)
    assert process.returncode == 128 + number
    assert err == "bkctl: Interrupted\n"


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ([], ["--help"]),
        (["-h"], ["--help"]),
        (["help"], ["--help"]),
        (["journal"], ["journal", "--help"]),
        (["bookie", "index"], ["bookie", "index", "--help"]),
        (["journal", "-h"], ["journal", "--help"]),
        (["help", "journal"], ["journal", "--help"]),
        (["journal", "read", "-h"], ["journal", "read", "--help"]),
        (["help", "journal", "read"], ["journal", "read", "--help"]),
    ],
)
def test_help_has_several_names(cli: Cli, words: list[str], same: list[str]) -> None:
    assert cli(*words) == cli(*same)
    assert cli(*words).code == 0
    assert cli(*words).out


def test_help_of_a_command_has_its_own_options_and_a_line_for_the_others(cli: Cli) -> None:
    shown = cli("ledger", "list", "--help").out
    assert "--metadata-uri" not in shown
    assert shown.index("--min-age") < shown.index("Examples:") < shown.index("'bkctl help connection'")
    assert "--conf" in cli("journal", "list", "--help").out
    everything = cli("help", "connection").out
    for setting in SETTINGS:
        assert setting.flag in everything
    assert cli("help", "nonsense").code == 2


def test_flags_of_the_program_stand_anywhere(cli: Cli, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    assert cli("cluster", "init", "-u", uri).code == 0
    for words in (
        ["cluster", "id", "-v"],
        ["cluster", "-v", "id"],
        ["-v", "cluster", "id"],
        ["cluster", "id", "-q", "-v"],
    ):
        assert f"cluster {uri} (" in cli(*words, "-u", uri).err
    assert "healthy" not in cli("cluster", "health", "-u", uri, "--no-bookies", "--quiet", "--no-color").err
    # Neither the value of an option nor a word behind -- is a flag.
    assert cli("ledger", "show", "-u", uri, "--", "-v").code == 2
    assert "context '-v'" in cli("cluster", "id", "--context", "-v").err.lower()
    traced = cli("ledger", "show", "zz", "--debug").err
    assert "Traceback" in traced
    # Nor is a flag the value of an option that may stand without one.
    for words, text in (
        (["bookies", "list", "--watch", "-q"], "No cluster is named"),
        (["ledger", "show", "5", "--watch", "--no-color"], "No cluster is named"),
        (["entrylog", "verify", "--digest", "--debug"], "No directory is given"),
        (["bookie", "gc", "--suspend", "-v"], "No bookie is named"),
    ):
        assert text in cli(*words).err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_of_a_shell(cli: Cli, shell: str) -> None:
    name = {"bash": "bkctl.bash", "zsh": "_bkctl", "fish": "bkctl.fish"}[shell]
    assert cli("completion", shell).out == (Path(__file__).parents[2] / "completions" / name).read_text()


def test_help_on_a_terminal_of_60_columns_fits(cli: Cli) -> None:
    for words in (["help"], ["help", "connection"], ["bookies"], ["help", "bookies", "drain"]):
        code, seen = CommandLine(None).terminal("--no-color", *words, columns=60)
        assert code == 0
        assert max(map(len, seen.splitlines())) <= 60, seen
        assert not [line for line in seen.splitlines()[1:] if line.endswith("...")], "sentences are whole"


def test_version_in_each_form(cli: Cli) -> None:
    assert cli("--version").out == f"bkctl {__version__}\n"
    assert cli("version", "-o", "json").json["version"] == __version__
    assert cli("version").out.splitlines()[0] == f"bkctl {__version__}"


def test_version_says_which_inner_loops_are_compiled(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    build = cli("version", "-o", "json").json
    project = tomllib.loads((Path(__file__).resolve().parent.parent.parent / "pyproject.toml").read_text())
    modules = {module["name"] for module in project["tool"]["setuptools"]["ext-modules"]}
    assert {*build["compiledModules"], *build["uncompiledModules"]} == modules
    monkeypatch.setattr("bkctl.files.scan.compiled", None)
    slow = cli("version", "-o", "json").json
    assert slow["compiledModules"] == [name for name in build["compiledModules"] if name != "bkctl.files._scan"]
    assert "bkctl.files._scan" in slow["uncompiledModules"]
    assert "of 2; in Python: " in cli("version").out


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write fails, not the open."""
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from bkctl.disk import atomic_write\n"
        "from pathlib import Path\n"
        "from bkctl.commands.main import error_report\n"
        "try:\n"
        "    with atomic_write(Path(sys.argv[1])) as file: file.write(bytes(100_000))\n"
        "except OSError as error: print(error_report(error).line)\n"
    )
    file = tmp_path / "export.ndjson"
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == f"{file}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_completion_imports_nothing_that_other_stores_need(tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    with open_cluster(uri, create=True) as cluster:
        metadata = LedgerMetadata(
            1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b1:1",)),), LedgerState.CLOSED, 0, -1, None, {}
        )
        cluster.ledgers.create(LedgerId(7, 12), metadata)
    code = (
        "import os, sys\n"
        f"heavy = {' '.join(HEAVY)!r}\n"
        f"sys.argv = ['bkctl', '-u', {uri!r}, 'ledger', 'show', '7:']\n"
        "import bkctl.__main__ as program\n"
        "import bkctl.commands.kit.completion as completion\n"
        "completion.TIME_LIMIT_S = 60\n"
        "completion.os = type('Os', (), {**vars(os), '_exit': lambda code: (\n"
        "    print([m for m in heavy.split() if m in sys.modules]), os._exit(sys.stdout.flush() or 0))})\n"
        "program.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "_BKCTL_COMPLETE": "bash", "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "7:12\n['sqlite3']\n"
