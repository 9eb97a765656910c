from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest
from commands_reference import Page, command_schema, generated_files, read_pages
from support.waiting import LIMIT_S

from bkctl.bookie.local import LocalCluster, data_directory
from bkctl.commands.kit import completion
from bkctl.commands.kit.audit import audit_file, state_directory
from bkctl.commands.kit.columns import Output
from bkctl.commands.kit.command import ASKS
from bkctl.commands.kit.contexts import config_file
from bkctl.commands.kit.work import progress_directory
from bkctl.commands.main import root
from bkctl.errors import EXIT_CODES
from bkctl.http.local_token import token_path
from bkctl.ids import LedgerId

from .conftest import Cli
from .files import make

ROOT = Path(__file__).parents[2]
PAGES = list(read_pages().walk())
DECLARED = {page.name: page.declaration for page in PAGES if page.declaration is not None}
DRY_RUNS = sorted(name for name, each in DECLARED.items() if each.has_dry_run and each.prints)
FILES = generated_files()


@pytest.mark.parametrize("name", FILES)
def test_generated_files_are_current(name: str) -> None:
    assert (ROOT / name).read_text() == FILES[name], "run `make generate`"


def commands_by_declaration() -> tuple[set[str], set[str]]:
    """Return the commands that start an audit or ask a bookie for a change, and all others."""
    changing = {name for name, each in DECLARED.items() if each.changes}
    return changing, DECLARED.keys() - changing


def test_security_page_names_every_command_that_changes_something() -> None:
    changing, others = commands_by_declaration()
    section = (ROOT / "docs/security.md").read_text().split("\n## What commands change\n")[1].split("\n###")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    shown = [words for cell in cells for words in re.findall(r"`([a-z][^`]+)`", cell) if words != "pipeline"]
    # Without an option or value behind the name.
    named = [re.sub(r" (--\S+|[A-Z]+)$", "", words) for words in shown]
    assert len(named) == len(set(named))
    assert changing - set(named) == set(), "add a row to docs/security.md, 'What commands change'"
    # Servers, commands that write files alone, and the one whose bookie does it.
    undeclared = {
        "api serve", "autorecovery run", "bookie start", "cookie generate", "entrylog extract",
        "metadata export", "pipeline export", "pipeline extract", "progress pause", "progress rate", "progress resume",
    }  # fmt: skip
    unknown = set(named) - changing - undeclared
    assert unknown == set(), "declare `changes`, `undo` or `dry_run` in @command, or add what they do not change"
    assert undeclared - set(named) == set(), "no command has these names any more"
    assert undeclared < others


def test_no_generated_file_is_left_behind() -> None:
    directories = ("man", "docs/schemas")
    there = {str(path.relative_to(ROOT)) for directory in directories for path in (ROOT / directory).iterdir()}
    generated = {name for name in FILES if name.startswith(directories)}
    assert there - generated == set(), "no command has these any more: remove them"
    assert generated - there == set(), "run `make generate`"


def test_every_command_declares_what_it_prints() -> None:
    silent = {name for name, each in DECLARED.items() if not each.prints}
    # They print what a server answers, or text.
    assert silent <= {"api get", "api put", "api delete", "completion"}, "add prints=rows_of(…) to @command"


@pytest.mark.parametrize("name", DRY_RUNS)
def test_rows_of_a_command_with_a_dry_run_say_whether_it_was_applied(name: str) -> None:
    rows = [row for key, row in command_schema(DECLARED[name], name)["$defs"].items() if key != "row"]
    assert all("applied" in row["properties"] for row in rows)


#: Commands whose dry run has fields of its own: the plan; and those with several forms of one change, or with lists.
OTHER_FORMS = {"ledger recover", "bookies recover", "bookie init", "autorecovery audit", "metadata undo"}


@pytest.mark.parametrize("name", sorted({*DRY_RUNS} - OTHER_FORMS))
def test_a_dry_run_prints_the_fields_of_the_run(name: str) -> None:
    assert set(command_schema(DECLARED[name], name)["$defs"]) == {"row", "row1"}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("docs/schemas/")])
def test_schemas_are_schemas(name: str) -> None:
    jsonschema_rs.meta.validate(json.loads(FILES[name]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name or "bkctl")
def test_every_command_has_help_and_stands_in_the_documents(cli: Cli, page: object) -> None:
    assert page.help  # type: ignore[attr-defined]
    for option in (*page.options, *page.arguments):  # type: ignore[attr-defined]
        assert option.help, option
    result = cli(*page.path, "--help")  # type: ignore[attr-defined]
    assert result.code == 0
    assert result.err == ""
    shown = " ".join(result.out.split())
    assert page.usage in shown  # type: ignore[attr-defined]
    for option in page.own_options:  # type: ignore[attr-defined]
        for name in option.names:
            assert name in shown
    if page.path and not page.children:  # type: ignore[attr-defined]
        assert f"### bkctl {page.name}\n" in FILES["docs/commands.md"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name or "bkctl")
def test_help_begins_with_a_line_and_its_examples_are_commands(page: Page) -> None:
    summary = page.help.split("\n")[0]
    assert len(summary) <= 60, "the help's first line has more than 60 characters: move some to the paragraph below it"
    assert summary.endswith(".")
    names = {name for option in page.options for name in option.names}
    for example in page.examples:
        words = example[example.index("bkctl ") :].split()
        assert tuple(words[1 : 1 + len(page.path)]) == page.path
        assert {word.split("=")[0] for word in words if word.startswith("-")} <= names, example


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name or "bkctl")
def test_help_fits_a_terminal_of_80_columns(page: Page, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli(*page.path, "--help").out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    cut = [line for line in lines if line.endswith("...") and not line.startswith("Usage:")]
    assert cut == [], "the first line of these commands' help is too long for the list of commands"


def test_exit_codes_come_from_the_error_tree() -> None:
    for code, meaning in EXIT_CODES.items():
        assert f"\\fB{code}\\fR\n{meaning}" in FILES["man/bkctl.1"]
        assert f"| {code} | {meaning} |" in FILES["docs/commands.md"]


def test_files_name_every_place_that_bkctl_keeps_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("BKCTL_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/h")
    places = [
        config_file({}), audit_file({}), state_directory({}) / "undo", progress_directory({}),
        LocalCluster().directory, data_directory() / "local-cluster", token_path("127.0.0.1", 1).parent,
        completion._cache_file("", "").parent,
    ]  # fmt: skip
    section = FILES["docs/commands.md"].split("\n## Files\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    for place in places:
        path = str(place).replace("/h/", "~/", 1)
        assert [row for row in rows if row == path or f"{path}/".startswith(row)], path
        assert place.name in section, path
    assert [row for row in rows if f"\\fI{row}\\fR" not in FILES["man/bkctl.1"].replace("\\-", "-")] == []


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("man/")])
def test_man_pages_are_good_troff(name: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(ROOT / name)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stderr == ""


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """A PATH where `bkctl` is this one."""
    binary = tmp_path / "bin" / "bkctl"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m bkctl "$@"\n')
    binary.chmod(0o755)
    return {**os.environ, "PATH": f"{binary.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def complete_bash(line: str, environment: dict[str, str]) -> list[str]:
    script = 'source "$1"; COMP_LINE=$2; COMP_POINT=${#2}; _bkctl; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "_", str(ROOT / "completions/bkctl.bash"), line],
        capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def complete_fish(line: str, environment: dict[str, str]) -> list[str]:
    script = "source $argv[1]; complete -C $argv[2]"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script, str(ROOT / "completions/bkctl.fish"), line],
        capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    return [each.split("\t")[0] for each in done.stdout.splitlines()]


#: Prints what zsh, on a terminal of its own, offers for the line $2 with the functions in the directory $1.
CAPTURE_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
setup=$HOME/setup.zsh
cat > $setup <<'END'
PROMPT=''
autoload -Uz compinit && compinit -D -u
bindkey '^M' undefined-key; bindkey '^J' undefined-key; bindkey '^I' complete-word
mark() { print -rn -- $'\0' }
compprefuncs=(mark) comppostfuncs=(mark exit)
compadd() {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then builtin compadd "$@"; return; fi
  local -a hits
  builtin compadd -A hits "$@"
  (( $#hits )) && print -rl -- $hits
}
END
zpty -w shell "fpath=(${(q)1} \$fpath); source $setup; print -rn RE''ADY"
zpty -r shell answer '*READY*'
zpty -w -n shell "$2"$'\t'
zpty -r shell answer $'*\0*\0*'
print -r -- ${${answer#*$'\0'}%%$'\0'*}
zpty -d shell
"""


def complete_zsh(line: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        ["zsh", "-f", "-c", CAPTURE_ZSH, "_", str(ROOT / "completions"), line],
        capture_output=True, text=True, timeout=LIMIT_S, check=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


SHELLS = [
    pytest.param(complete, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name, complete in (("bash", complete_bash), ("fish", complete_fish), ("zsh", complete_zsh))
]


@pytest.mark.parametrize("complete", SHELLS)
def test_shells_complete_commands_options_and_values(complete: object, shell_environment: dict[str, str]) -> None:
    def words(line: str) -> set[str]:
        return set(complete(line, shell_environment))  # type: ignore[operator]

    assert {"ledger", "journal", "cluster"} <= words("bkctl ")
    assert words("bkctl led") == {"ledger"}
    assert {"write", "read", "tail"} <= words("bkctl ledger ")
    assert "show" in words("bkctl bookie index ")
    assert words("bkctl ledger list -o ") == set(Output)
    assert words("bkctl -o json ledger read --protocol ") == {"v2", "v3"}
    assert words("bkctl ledger read --no-v") == {"--no-verify"}


@pytest.mark.parametrize("complete", SHELLS)
def test_completion_offers_the_values_of_an_option_of_that_command(
    complete: object, shell_environment: dict[str, str]
) -> None:
    def words(line: str) -> set[str]:
        return set(complete(line, shell_environment))  # type: ignore[operator]

    assert words("bkctl bookies list --state ") == {"rw", "ro", "down", "all"}
    assert words("bkctl entrylog list --sort ") == {"id", "size", "garbage", "age"}
    assert words("bkctl bookie convert --to ") == {"db", "interleaved"}
    assert words("bkctl bookie readonly --dry-run ") == {"on", "off"}
    assert words("bkctl bookie index sh") == {"show"}
    assert words("bkctl bookies list --lim") == set()
    assert words("bkctl ledger list --state ") == {"OPEN", "IN_RECOVERY", "CLOSED"}
    assert words("bkctl ledger write --digest-type ") == {"CRC32C", "CRC32", "HMAC", "DUMMY"}
    assert words("bkctl ledger read 1 --format ") == {"base64", "utf8", "hex", "raw"}
    assert words("bkctl local up --storage ") == {"sorted", "interleaved", "db"}
    assert "no-auditor" in words("bkctl cluster health mute ")
    assert words("bkctl completion ") >= {"bash", "zsh", "fish"}
    assert {"bookieId", "state"} <= words("bkctl bookies list --columns ")
    assert words("bkctl bookies list --columns bookieId,st") == {"bookieId,state"}
    assert words("bkctl bookies list --sort -st") == {"-state"}
    assert words("bkctl autorecovery audit --reset-clock all-ledgers,p") == {"all-ledgers,placement"}
    assert {"ledger", "exit-codes"} <= words("bkctl help ")
    assert words("bkctl help bookies ra") == {"racks"}
    assert words("bkctl help bookies racks s") == {"set"}


@pytest.mark.parametrize("complete", SHELLS)
def test_completion_offers_values_behind_an_equals_sign(complete: object, shell_environment: dict[str, str]) -> None:
    def words(line: str) -> set[str]:
        found = complete(line, shell_environment)  # type: ignore[operator]
        return {each.rpartition("=")[2] for each in found}

    assert words("bkctl ledger list --output=") == set(Output)
    assert words("bkctl ledger list --output=nd") == {"ndjson"}
    assert words("bkctl ledger list --state=") == {"OPEN", "IN_RECOVERY", "CLOSED"}
    assert words("bkctl bookies list --state=r") == {"rw", "ro"}


@pytest.mark.parametrize("complete", SHELLS)
def test_completion_leaves_out_what_is_given(complete: object, shell_environment: dict[str, str]) -> None:
    def words(line: str) -> set[str]:
        return set(complete(line, shell_environment))  # type: ignore[operator]

    assert "--count" in words("bkctl ledger list --c")
    assert "--count" not in words("bkctl ledger list --count --c")
    assert "--output" not in words("bkctl ledger list --output=json --o")
    assert "--state" in words("bkctl ledger list --state OPEN --s")


def candidates_of(*words: str) -> list[str] | None:
    found = completion.CommandLine(root(), [*words]).candidates()
    return None if found is None else sorted(each.text for each in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name or "bkctl")
def test_completion_offers_the_options_of_each_command(page: Page) -> None:
    names = [name for option in page.options for name in option.names if name.startswith("--")]
    assert candidates_of(*page.path, "-") == sorted(names)
    if page.children:
        assert candidates_of(*page.path, "") == sorted(child.path[-1] for child in page.children)
    for option in page.options:
        for name in option.names:
            if option.choices:
                assert candidates_of(*page.path, name, "") == sorted(option.choices)
            elif option.metavar in ("FILE", "DIR"):
                line = completion.CommandLine(root(), [*page.path, name, ""])
                assert (line.candidates(), line.takes_files) == ([], True)


def test_completion_reads_the_words_before_as_the_command_does() -> None:
    assert candidates_of("-o", "json", "ledger", "tai") == ["tail"]
    assert candidates_of("--quiet", "ledger", "list", "--count", "--cou") == []
    assert candidates_of("progress", "--wa") == ["--watch"], "the options of the default command"
    assert candidates_of("ledger", "nothing", "") == []
    assert candidates_of("ledger", "list", "--nothing=") == []
    assert candidates_of("cookie", "rename", "--", "b1:3181", "b2:3181", "") == candidates_of("cookie", "rename", "--")
    assert candidates_of("ledger", "show", "") is None, "the cluster has them"


@pytest.mark.parametrize("words", [["-u{}"], ["-q", "-u", "{}"], ["--metadata-uri={}"]], ids=" ".join)
def test_completion_asks_the_cluster_that_the_line_names(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bkctl.formats.entry import DigestType
    from bkctl.formats.metadata import Fragment, LedgerMetadata
    from bkctl.metadata.cluster import open_cluster

    uri = f"sqlite://{tmp_path}/m.db"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_cluster(uri, create=True) as cluster:
        fragments = (Fragment(0, ("b1:3181",)),)
        cluster.ledgers.create(LedgerId(0, 12), LedgerMetadata(1, 1, 1, DigestType.DUMMY, b"", fragments))
    line = completion.CommandLine(root(), [*(word.format(uri) for word in words), "ledger", "show", ""])
    monkeypatch.setattr(completion, "TIME_LIMIT_S", LIMIT_S)
    assert [each.text for each in line.asked()] == ["12"]


@pytest.mark.parametrize(
    ("words", "takes_files"),
    [("-x", False), ("ledger list --ledger-scope-id", False), ("-c", True), ("journal read", True)],
)
def test_shells_complete_file_names_only_where_a_file_may_stand(words: str, takes_files: bool) -> None:
    assert completion.CommandLine(root(), [*words.split(), ""]).takes_files is takes_files


@pytest.mark.parametrize("complete", SHELLS)
def test_shells_complete_ids_and_file_names(
    complete: object, shell_environment: dict[str, str], tmp_path: Path
) -> None:
    from bkctl.formats.entry import DigestType
    from bkctl.formats.metadata import Fragment, LedgerMetadata
    from bkctl.metadata.cluster import open_cluster

    make(tmp_path)
    uri = f"sqlite://{tmp_path}/m.db"
    with open_cluster(uri, create=True) as cluster:
        for ledger in (LedgerId(0, 12), LedgerId(0, 34), LedgerId(7, 1)):
            cluster.ledgers.create(ledger, LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b:1",)),)))

    def completes(line: str, *expected: str) -> bool:
        # The limit of 300 ms may end a try on a busy machine: then nothing is offered, or files instead.
        tries = (complete(line, shell_environment) for _ in range(20))  # type: ignore[operator]
        return any(sorted(each.rpartition("=")[2] for each in found) == [*expected] for found in tries)

    assert completes(f"bkctl -u {uri} ledger show ", "00000000000000070000000000000001", "12", "34")
    assert completes(f"bkctl ledger read -u {uri} 1", "12")
    assert completes(f"bkctl ledger delete -u {uri} 12 ", "00000000000000070000000000000001", "34")
    assert completes(f"bkctl ledger list -u {uri} --ledger-scope-id ", "0", "7")
    assert completes(f"bkctl ledger list -u {uri} --ledger-scope-id=", "0", "7")
    assert completes(f"bkctl journal read --dir {tmp_path}/journal ", "a.txn", "b.txn")
    assert completes(f"bkctl entrylog read --dir {tmp_path}/ledgers ", "1f.log", "scoped/1f.log")


@pytest.mark.parametrize("complete", SHELLS[1:])
def test_shells_complete_files(complete: object, shell_environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bk_server.conf").touch()
    for line in (f"bkctl ledger list --conf {tmp_path}/bk_s", f"bkctl ledger list --conf={tmp_path}/bk_s"):
        found = complete(line, shell_environment)  # type: ignore[operator]
        assert [each.rpartition("/")[2] for each in found] == ["bk_server.conf"]


def test_answers_of_a_cluster_are_kept_for_a_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bkctl.formats.entry import DigestType
    from bkctl.formats.metadata import Fragment, LedgerMetadata
    from bkctl.metadata.cluster import open_cluster

    uri = f"sqlite://{tmp_path}/m.db"

    def create(*ids: int) -> None:
        with open_cluster(uri, create=True) as cluster:
            for ledger_id in ids:
                metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b:1",)),))
                cluster.ledgers.create(LedgerId(0, ledger_id), metadata)

    def offered(text: str) -> list[str]:
        return list(completion.candidates("ledger", {"g_metadata_uri": [uri]}, text))

    create(12, 13, 34)
    assert offered("1") == ["12", "13"]
    create(14)
    assert offered("1") == offered("1") == ["12", "13"]
    assert offered("13") == ["13"], "narrowed without the cluster"
    assert offered("") == ["12", "13", "14", "34"]
    (files,) = {path.parent for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    for path in files.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        os.utime(path, (1, 1))
    assert offered("1") == ["12", "13", "14"]
    assert len(list(files.iterdir())) == 1, "old answers are removed"
    monkeypatch.setattr(completion, "CANDIDATES_MAX", 2)
    assert len(offered("")) == 2
    create(35)
    assert offered("3") == ["34", "35"], "kept answers that are not all do not answer for longer words"
    files.chmod(0o500)
    try:
        create(36)
        os.utime(next(files.iterdir()))
        assert "36" in offered("36")
    finally:
        files.chmod(0o700)


def test_completion_is_silent_and_ends_when_nothing_answers(tmp_path: Path) -> None:
    environment = {**os.environ, "_BKCTL_COMPLETE": "bash"}
    for uri in ("zk://127.0.0.1:1/ledgers", "nonsense", f"sqlite://{tmp_path}/none"):
        done = subprocess.run(
            [sys.executable, "-m", "bkctl", "ledger", "show", "-u", uri, ""],
            capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_commands_that_ask_say_that_yes_is_required_without_a_terminal() -> None:
    for page in PAGES:
        names = {name for option in page.options for name in option.names}
        asks = bool(page.path) and "--yes" in names and "--yes-really" not in names
        assert page.help.endswith(ASKS) is asks, page.name


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("before", ["", "autoload -Uz compinit; compinit -u -D; "])
def test_zsh_takes_the_script_as_it_is_printed(before: str, shell_environment: dict[str, str]) -> None:
    line = f"{before}source <(bkctl completion zsh) && print -r -- $_comps[bkctl]"
    done = subprocess.run(
        ["zsh", "-f", "-c", line], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=shell_environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "_bkctl\n", "")


def test_lists_show_their_columns_and_order_in_their_help(cli: Cli) -> None:
    listings = [page for page in PAGES if page.declaration and any(each.is_list for each in page.declaration.prints)]
    for page in listings:
        text = cli(*page.path, "--help").out
        assert "--columns" in text, page.name
        assert "--sort" in text, page.name
    assert "--sort" not in cli("version", "--help").out


def test_examples_of_help_stand_in_lines_of_their_own(cli: Cli) -> None:
    assert "\nExamples:\n  bkctl help ledger list\n  bkctl help connection\n" in cli("help", "--help").out
