"""The names of Apache's tools, and ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands_reference import read_pages

from bkctl.commands.translations import GUESSES, PULSAR, TRANSLATIONS, Translation, find_elsewhere, translate

from .conftest import Cli

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page for page in read_pages().walk()}


def test_every_command_of_the_shell_and_of_java_bkctl_is_translated_once() -> None:
    shell = [each.shell.lower() for each in TRANSLATIONS if each.shell]
    java = [each.java for each in TRANSLATIONS if each.java]
    assert (len(shell), len(java)) == (47, 44)
    assert len({*shell}) == 47
    assert len({*java}) == 44
    for each in (*TRANSLATIONS, *PULSAR):
        assert not PAGES[each.ours].children, each
        for word in each.note.split("`")[1::2]:
            if word.startswith("--"):
                options = [name for option in PAGES[each.ours].options for name in option.names]
                assert word.split()[0] in options, each


@pytest.mark.parametrize("name", [each.shell for each in TRANSLATIONS if each.shell])
def test_a_name_of_the_shell_is_answered_with_ours(cli: Cli, name: str) -> None:
    answer = cli(name, "-x")
    if name in ("ledger", "autorecovery"):
        assert answer.code == 2  # These are groups of ours.
        return
    ours = next(each.ours for each in TRANSLATIONS if each.shell == name)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"bkctl: No such command '{name}'; it is 'bkctl {ours}' here\n"
    assert f"`{name}`" in (ROOT / "docs/from-the-shell.md").read_text()


@pytest.mark.parametrize("each", [each for each in TRANSLATIONS if each.java], ids=lambda each: each.java)
def test_a_name_of_javas_bkctl_is_ours_or_answered_with_ours(cli: Cli, each: Translation) -> None:
    if each.java == each.ours:
        return
    answer = cli(*each.java.split())
    group = each.java.partition(" ")[0]
    unknown = each.java.rpartition(" ")[2] if group in PAGES else group
    assert answer == (2, "", f"bkctl: No such command '{unknown}'; it is 'bkctl {each.ours}' here\n")


def test_other_words_are_not_translated() -> None:
    assert translate(["nonsense"]) is None
    assert translate(["bookie", "LISTLEDGERS"]) == "ledger list"
    assert find_elsewhere([], "list", ["ledger list", "bookies list", "cookie list", "journal list", "x y"]) == [
        "ledger list", "bookies list", "cookie list",
    ]  # fmt: skip
    assert find_elsewhere(["bookie"], "list", ["ledger list", "bookies list"]) == ["bookies list"]
    assert find_elsewhere(["bookie"], "nothing", ["ledger list"]) == []


@pytest.mark.parametrize(("words", "ours"), [each for each in GUESSES.items() if each[0] not in PAGES], ids=str)
def test_a_first_guess_is_answered_with_our_command(cli: Cli, words: str, ours: str) -> None:
    name, _, options = ours.partition(" --")
    name = name.removesuffix(" -f FILE").removesuffix(" FILE")
    assert not PAGES[name].children or name == "cluster health"  # a group that is a command, too
    known = {each for option in PAGES[name].options for each in option.names}
    assert not options or f"--{options.split()[0]}" in known
    answer = cli(*words.split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.endswith(f"it is 'bkctl {ours}' here\n")


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("get ledgers", "ledger list"),
        ("get ledger 7:1", "ledger show"),
        ("describe bookie b1", "bookies show"),
        ("delete ledger 1", "ledger delete"),
        ("list bookies", "bookies list"),
        ("get topics", "pulsar topics"),
        ("health --watch", "cluster health"),
    ],
)
def test_a_verb_before_its_noun_is_answered_with_our_command(cli: Cli, words: str, ours: str) -> None:
    answer = cli(*words.split())
    assert (answer.code, answer.err) == (2, f"bkctl: No such command '{words.split()[0]}'; it is 'bkctl {ours}' here\n")
