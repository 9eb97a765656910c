"""A signal at any moment, in the middle of any import, ends a command with one line and its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.commands.kit.access import Access
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
    for number in (signal.SIGTERM, signal.SIGHUP):
        check("bookies", "list", "-u", store, count=10, number=number)


#: Gets a signal, and more of it as it puts things in order: in a command at work, and in asynchronous work.
REPEATED = """
import asyncio, signal, sys
from bkctl.commands.kit import interrupts
from bkctl.commands.kit.job import LongWork
from bkctl.tasks import run_to_end
number, parent, repeat_s, kind = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
if parent == "ignores SIGINT":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupts.end_at_once()
interrupts.REPEAT_S = repeat_s
interrupts.begin_work()

async def clean_up():
    for _ in range(3):
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        await asyncio.sleep(0.01)
    print("in order", flush=True)

try:
    if kind == "asynchronous":
        LongWork.complete(None, run_to_end(clean_up()))
    else:
        signal.raise_signal(number)
except KeyboardInterrupt:
    if kind != "asynchronous":
        signal.raise_signal(number)
        print("in order", flush=True)
    sys.exit(interrupts.exit_code())
"""


def repeated(number: int, parent: str, repeat_s: float, kind: str) -> tuple[int, str, str]:
    """Run REPEATED, and return its exit code and what it printed."""
    command = [sys.executable, "-c", REPEATED, str(int(number)), parent, str(repeat_s), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stdout, done.stderr


#: `timeout -s` knows all of them; a job in the background of a script does not get SIGINT.
SIGNALS = [
    (signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGHUP, ""),
    (signal.SIGTERM, "ignores SIGINT"), (signal.SIGHUP, "ignores SIGINT"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("number", "parent"), SIGNALS)
def test_signals_that_come_together_interrupt_once(number: int, parent: str, kind: str) -> None:
    assert repeated(number, parent, LIMIT_S, kind) == (128 + number, "in order\n", "")


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("number", "parent"), SIGNALS[1:])
def test_a_later_signal_ends_the_process(number: int, parent: str, kind: str) -> None:
    assert repeated(number, parent, 0, kind) == (128 + number, "", "bkctl: Interrupted\n")


def test_a_later_sigint_interrupts_again() -> None:
    code, out, err = repeated(signal.SIGINT, "", 0, "asynchronous")
    assert (code, out) == (130, ""), err


def test_an_interrupt_that_a_finalizer_swallows_comes_again() -> None:
    program = (
        "import signal, sys, time\n"
        "from bkctl.commands.kit import interrupts\n"
        "interrupts.end_at_once()\n"
        "class Finalized:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "try:\n"
        "    interrupts.begin_work()\n"
        "    Finalized()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_our_parent_ignores_is_ignored(number: int) -> None:
    program = (
        "import signal, sys\n"
        "number = int(sys.argv[1])\n"
        "signal.signal(number, signal.SIG_IGN)\n"
        "from bkctl.__main__ import main\n"
        "from bkctl.commands import main as commands\n"
        "from bkctl.commands.kit import interrupts\n"
        "def run(arguments):\n"
        "    signal.raise_signal(number)\n"
        "    with interrupts.ignored():\n"
        "        pass\n"
        "    signal.raise_signal(number)\n"
        "    return plain_run(['--version'])\n"
        "plain_run, commands.run = commands.run, run\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "bkctl", "")


def test_an_interrupted_command_exits_with_130() -> None:
    """Python ends by the signal wherever a KeyboardInterrupt passed through `exec`."""
    program = (
        "import sys\n"
        "from bkctl.commands import main\n"
        "from bkctl.commands.kit import access, interrupts\n"
        "interrupts.end_at_once()\n"
        "def connection(run):\n"
        "    exec('raise KeyboardInterrupt')\n"
        "access.Access.connection = connection\n"
        "sys.argv = ['bkctl', 'ledger', 'list']\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bkctl: Interrupted\n")


def test_errors_during_an_interrupt_report_the_interrupt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def connection(access: Access) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise Unreachable("the store is away")

    monkeypatch.setattr(Access, "connection", connection)
    done = cli("ledger", "list")
    assert (done.code, done.out, done.err) == (130, "", "bkctl: Interrupted\n")


#: Runs a command line, and gets a signal at a call of main.py, as the end of the output is held up, or of audit.py.
SIGNALLED = """
import signal, sys
from bkctl.commands import main
from bkctl.commands.kit import audit, interrupts
number, names = int(sys.argv.pop(1)), sys.argv.pop(1).split()
interrupts.end_at_once()
interrupts.REPEAT_S = 0

def signalled(owner, name):
    plain = getattr(owner, name)
    def call(*arguments):
        signal.raise_signal(number)
        plain(*arguments)
    setattr(owner, name, call)

for name in names:
    signalled(audit.Audit if name == "end" else main, name)
main.main()
"""


@pytest.mark.parametrize(
    ("names", "number", "code", "result"),
    [
        ("end", signal.SIGINT, 0, "done"),
        ("end", signal.SIGTERM, 0, "done"),
        ("flush", signal.SIGINT, 130, "interrupted"),
        ("flush", signal.SIGHUP, 129, "interrupted"),
        ("flush say", signal.SIGTERM, 143, "interrupted"),
        ("say", signal.SIGINT, 130, "failed"),
    ],
)
def test_an_interrupt_at_the_end_of_a_command_completes_its_audit(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, number: int, code: int, result: str
) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(tmp_path / "audit"))
    store = f"sqlite://{tmp_path / 'metadata.db'}"
    if result == "failed":
        cli("cluster", "init", "-u", store)
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), names, "cluster", "init", "-u", store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, done.stderr
    assert [row["result"] for row in cli("audit", "list", "-o", "ndjson").rows][-1] == result
