"""SIGINT or SIGTERM at any moment, in the middle of any import, ends a command with one line and code 130 or 143."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.commands.kit.command import Run
from bkctl.commands.main import GROUPS
from bkctl.errors import Unreachable

from .conftest import Cli

#: Runs a command line once for each number, each time in a fork of an interpreter that has imported nothing of bkctl,
#: and interrupts it at its import of that number. 0: not at all, and the number of imports is printed.
INTERRUPTER = """
import json, os, signal, sys
moments, words, number = map(json.loads, sys.argv[1:])

def interrupt_at(moment):
    def hook(event, arguments):
        if event == "import":
            seen[0] += 1
            if seen[0] == moment:
                os.kill(os.getpid(), number)
    seen = [0]
    from bkctl.__main__ import main
    sys.argv = ["bkctl", *words]
    sys.addaudithook(hook)
    try:
        main()
    finally:
        if not moment:
            print("imports", seen[0], flush=True)

for moment in moments:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 2)
        if moment:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        interrupt_at(moment)
    os.close(write)
    said = b""
    while chunk := os.read(read, 65536):
        said += chunk
    os.close(read)
    _, status = os.waitpid(child, 0)
    print(json.dumps([moment, os.waitstatus_to_exitcode(status), said.decode()]), flush=True)
"""


def interrupted_at(moments: list[int], *words: object, number: int) -> list[str]:
    """The lines that INTERRUPTER prints."""
    command = [sys.executable, "-c", INTERRUPTER, json.dumps(moments), json.dumps(list(map(str, words))), str(number)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def check(*words: object, count: int, number: int = signal.SIGINT) -> None:
    """Interrupt the command line at `count` of its imports, from the first to the last."""
    [counted] = [line for line in interrupted_at([0], *words, number=number) if line.startswith("imports ")]
    last = int(counted.split()[1])
    assert last > count
    moments = sorted({1 + (last - 1) * at // (count - 1) for at in range(count)})
    found: list[Any] = [json.loads(line) for line in interrupted_at(moments, *words, number=number)]
    assert found == [[moment, 128 + number, "bkctl: Interrupted\n"] for moment in moments]


@pytest.mark.parametrize("group", GROUPS)
def test_start_up_of_every_group_can_be_interrupted(group: str) -> None:
    check(group, "--help", count=8)


def test_a_command_can_be_interrupted_from_its_first_import_to_its_last(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path / 'metadata.db'}"
    subprocess.run([sys.executable, "-m", "bkctl", "cluster", "init", "-u", store], check=True)
    check("ledger", "list", "--all-scopes", "-u", store, count=40)
    check("bookies", "list", "-u", store, count=10)
    check("bookies", "list", "-u", store, count=10, number=signal.SIGTERM)


#: Gets SIGTERM twice, the second time as it puts things in order.
TERMINATED = """
import signal, sys
from bkctl.commands.kit import interrupts
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupts.end_at_once()
interrupts.REPEAT_S = float(sys.argv[2])
try:
    with interrupts.raised():
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGTERM)
    print("in order", flush=True)
    sys.exit(interrupts.exit_code())
"""


@pytest.mark.parametrize("parent", ["", "ignored"])
def test_a_second_sigterm_ends_at_once_unless_it_is_that_of_timeout(parent: str) -> None:
    for repeat_s, expected in ((LIMIT_S, (143, "in order\n", "")), (0, (143, "", "bkctl: Interrupted\n"))):
        command = [sys.executable, "-c", TERMINATED, parent, str(repeat_s)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == expected


def test_an_interrupt_that_a_finalizer_swallows_comes_again() -> None:
    program = (
        "import signal, sys, time\n"
        "from bkctl.commands.kit import interrupts\n"
        "interrupts.end_at_once()\n"
        "class Finalized:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "try:\n"
        "    with interrupts.raised():\n"
        "        Finalized()\n"
        "        time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_an_interrupt_that_our_parent_ignores_is_ignored() -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from bkctl.__main__ import main\n"
        "import bkctl.commands.main\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['bkctl', '--version']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "bkctl", "")


def test_an_interrupted_command_exits_with_130() -> None:
    """Python ends by the signal wherever a KeyboardInterrupt passed through `exec`."""
    program = (
        "import sys\n"
        "from bkctl.commands import main\n"
        "from bkctl.commands.kit import command, interrupts\n"
        "interrupts.end_at_once()\n"
        "def connection(run):\n"
        "    exec('raise KeyboardInterrupt')\n"
        "command.Run.connection = connection\n"
        "sys.argv = ['bkctl', 'ledger', 'list']\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bkctl: Interrupted\n")


def test_errors_during_an_interrupt_report_the_interrupt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def connection(run: Run) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise Unreachable("the store is away")

    monkeypatch.setattr(Run, "connection", connection)
    done = cli("ledger", "list")
    assert (done.code, done.out, done.err) == (130, "", "bkctl: Interrupted\n")


def test_an_interrupt_at_the_end_of_a_command_completes_its_audit(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from bkctl.commands import main\n"
        "from bkctl.commands.kit import audit, interrupts\n"
        "interrupts.end_at_once()\n"
        "plain_end = audit.Audit.end\n"
        "def end(log, *arguments):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    plain_end(log, *arguments)\n"
        "audit.Audit.end = end\n"
        "main.main()\n"
    )
    log = tmp_path / "audit"
    store = f"sqlite://{tmp_path / 'metadata.db'}"
    words = ["cluster", "init", "-u", store]
    environment = {**os.environ, "BKCTL_AUDIT_LOG": str(log)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["begin", "end"]
