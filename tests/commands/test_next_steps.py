"""Every finding ends in a command that exists, and says why that one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bkctl.checks.findings import FindingKind
from bkctl.client.verify import ReplicaState
from bkctl.commands.kit.next_steps import STEPS, next_step
from bkctl.commands.main import GROUPS, root
from bkctl.files.scan import ScanState
from bkctl.formats.metadata import _COOKIE_FIELDS
from bkctl.metadata.admin.health import health_finding
from bkctl.metadata.admin.health_codes import HealthCode

ROOT = Path(__file__).resolve().parent.parent.parent
SOUND = {ScanState.END_OF_FILE, ScanState.ZEROS, ScanState.EMPTY}


def declared() -> Iterator[tuple[str, str]]:
    yield from ((code.value, code.next) for code in HealthCode)
    for check, steps in STEPS.items():
        yield from ((f"{check} {kind}", step.command) for kind, step in steps.items())


def command_of(line: str) -> Any:
    """Return the parser's command of a line, and fail for words that it does not know."""
    words = shlex.split(re.sub(r"\{\w+\}", "X", line))
    assert words.pop(0) == "bkctl"
    node: Any = root()
    if words[0] in GROUPS:
        node.get_command(None, words[0])
    else:
        node.load_program()
    while words and words[0] in getattr(node, "commands", {}):
        node = node.commands[words.pop(0)]
    assert not getattr(node, "commands", {}), f"{line} is a group"
    options = {name for each in node.params for name in (*each.opts, *each.secondary_opts)}
    for word in words:
        assert not word.startswith("--") or word in options, f"{line}: {word}"
    return node


@pytest.mark.parametrize(("finding", "line"), list(declared()), ids=lambda each: each if "bkctl" not in each else "")
def test_the_next_command_of_each_finding_exists(finding: str, line: str) -> None:
    command_of(line)


def test_each_kind_of_finding_has_a_next_command() -> None:
    assert {code.value for code in HealthCode if not (code.next and code.what and code.why)} == set()
    assert {code.severity for code in HealthCode} == {"error", "warning"}
    assert {kind.value for kind in FindingKind} == STEPS["bookie check"].keys()
    states = {state.value for state in ReplicaState} - {"ok"}
    assert states | {"length"} == STEPS["ledger verify"].keys()
    damaged = {state.value for state in ScanState if state not in SOUND}
    assert damaged | {"mismatch"} == STEPS["journal verify"].keys() == STEPS["entrylog verify"].keys()
    source = (ROOT / "bkctl/metadata/admin/check.py").read_text()
    codes = set(re.findall(r'(?:MetadataFinding\(\s*|yield |append\(\(|_code\(\w+, |return )"([a-z-]+)"', source))
    assert codes == STEPS["metadata check"].keys()
    assert {"cookie", *_COOKIE_FIELDS} == STEPS["cookie verify"].keys()


def test_next_commands_are_quoted_for_the_shell() -> None:
    assert next_step("ledger verify", "missing", ledger="7:12", bookie="a b") == (
        "bkctl autorecovery mark 7:12 --missing 'a b'"
    )
    assert next_step("ledger verify", "ok", ledger=1, bookie=None) is None


def test_advice_names_its_command_where_the_reason_says_it() -> None:
    for code in HealthCode:
        finding = health_finding(code, "b1:1", "", ledger="7:12")
        assert not finding.advice.startswith("it ")
        assert finding.advice.startswith(f"'{finding.command}' ") == code.why.startswith("it ")
    given = health_finding(HealthCode.BOOKIE_DOWN, "b1:1", "", advice="start it")
    assert (given.advice, given.why) == ("start it", HealthCode.BOOKIE_DOWN.why)
    assert health_finding(HealthCode.MARK_DAMAGED, "5", "", ledger="5").command == "bkctl autorecovery unmark 5 --yes"
