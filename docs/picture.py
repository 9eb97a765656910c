"""Draw the pictures in README.md and docs/pictures.md, from what bkctl prints on a terminal: `make picture`.

Start a local cluster in a temporary directory, run the steps of each picture on a terminal of their own, and export the
screen: at the end of the last step, or in the middle of one that works for long.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 100, 14
#: The commands in docs/terminal.svg; `$id` stands for the ledger that the first `ledger write` made.
STEPS = (
    "bkctl bookies list",
    "printf 'one\\ntwo\\nthree\\n' | bkctl -q ledger write --uuid -o id",
    "bkctl ledger read $id --body",
    "bkctl ledger verify $id",
    "bkctl cluster health",
)
#: Ledgers to list and to drain: 32 entries of 32 KiB each, and what an application notes in their metadata.
LEDGERS = "for app in orders invoices mail search; do {} done; for i in 1 2 3 4 5 6 7 8; do {} done".format(
    *(
        "head -c 786432 /dev/zero | tr '\\0' x | fold -w 32768 | bkctl -q ledger write "
        f"--ensemble-size 3 {more}-o id >/dev/null;"
        for more in ("--custom-metadata application=$app ", "")
    )
)
#: Writes and reads, for `top` to show.
LOAD = (
    "for size in 2000 9000; do while :; do seq $size | bkctl -q ledger write -o id | "
    "xargs -I{} bkctl ledger read {} -o id >/dev/null; done & done; wait"
)

Shown = list[tuple[str, str]]


def main() -> None:
    """Write the SVGs to the directory that the command line names."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("BKCTL_", "XDG_", "NO_COLOR"))
        } | {"XDG_DATA_HOME": directory, "XDG_STATE_HOME": directory, "XDG_CONFIG_HOME": directory}

        def step(command: str, **settings: object) -> tuple[str, str]:
            shown = run(command, environment, **settings)  # type: ignore[arg-type]
            return command, shown.replace(directory, "~/.local/share")

        try:
            draw(target / "local-up.svg", [step("bkctl local up --bookies 4")])
            draw(target / "terminal.svg", steps := list(terminal_steps(step)))
            step(f"bkctl -q ledger delete {steps[1][1].strip()} --yes")
            step(LEDGERS)
            draw(target / "ledger-list.svg", [step("bkctl ledger list --limit 8")])
            with background(LOAD, environment):
                draw(target / "top.svg", [step("bkctl top", after_s=36.0, key="q")])
            # In the middle of the work: what is on the screen then.
            draw(target / "drain.svg", [step("bkctl bookies drain bookie-3 --yes --rate 1MiB/s", until=r"\b[4-9]\d%")])
            os.kill(pid_of("bookie-2", environment), signal.SIGKILL)
            time.sleep(2)
            draw(target / "health.svg", [step("bkctl cluster health", codes=(3,))])
        finally:
            down = ["bkctl", "-q", "local", "down", "--yes"]
            subprocess.run(down, env=environment, check=True, stdout=subprocess.DEVNULL)


def terminal_steps(step: Callable[[str], tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield STEPS with what they print."""
    ledger = ""
    for each in STEPS:
        command, shown = step(each.replace("$id", ledger))
        ledger = ledger or next(iter(re.findall(r"\b[0-9a-f]{32}\b", shown)), "")
        yield command, shown


def draw(target: Path, steps: Shown) -> None:
    """Write a picture of commands and what they print."""
    screen = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for number, (command, shown) in enumerate(steps):
        if number:
            screen.print()
        screen.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        screen.print(Text.from_ansi(shown.rstrip("\n")))
    # The fonts of the default format are fetched from the network; a monospaced font of the reader's does as well.
    svg_format = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    target.write_text(screen.export_svg(title="bkctl", code_format=svg_format, unique_id=target.stem))


@contextmanager
def background(script: str, environment: dict[str, str]) -> Iterator[None]:
    """Run a shell script during the block, and end all of its processes."""
    process = subprocess.Popen(["sh", "-c", script], env=environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def pid_of(bookie: str, environment: dict[str, str]) -> int:
    """Return the process id of a bookie of the local cluster."""
    done = subprocess.run(
        ["bkctl", "-q", "local", "status", "-o", "json"], env=environment, stdout=subprocess.PIPE, check=True
    )
    return next(row["pid"] for row in json.loads(done.stdout) if row["bookieId"] == bookie)


def run(
    command: str,
    environment: dict[str, str],
    *,
    codes: tuple[int, ...] = (0,),
    until: str | None = None,
    after_s: float | None = None,
    key: str = "",
) -> str:
    """Return what a shell command leaves on a terminal of COLUMNS columns; its exit code must be one of `codes`.

    `until`: what is on the screen as soon as it matches this; the command then continues to its end. `after_s`: press
    `key` after that time, and return the last page that was drawn before.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES if key else 50, COLUMNS, 0, 0))
    began, shown, found = time.monotonic(), "", None
    with subprocess.Popen(
        ["sh", "-c", command], env=environment | {"TERM": "xterm-256color"}, stdin=follower, stdout=follower,
        stderr=follower, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:  # fmt: skip
        os.close(follower)
        data = b""
        while True:
            try:
                data += os.read(leader, 1 << 16)
            except OSError:  # The shell has ended.
                break
            shown = data.decode("utf-8", "ignore").replace("\r\n", "\n")
            if until is not None and found is None and re.search(until, shown):
                found = visible(shown)
            if after_s is not None and time.monotonic() - began > after_s:
                os.write(leader, key.encode())
                after_s = None
        if process.wait() not in codes:
            raise SystemExit(f"{command}: exit code {process.returncode}:\n{shown}")
    os.close(leader)
    if until is not None and found is None:
        raise SystemExit(f"{command}: {until!r} was never on the screen:\n{shown}")
    return found or visible(shown)


def visible(shown: str) -> str:
    """Return the screen: the last page of a program that draws pages, or lines that are not erased."""
    page = shown.rpartition("\x1b[H")[2] if "\x1b[?1049h" in shown else shown
    lines = [line.rpartition("\r\x1b[K")[2] for line in page.split("\n")]
    return re.sub(r"\x1b\[[0-9;?]*[a-ln-zA-Z]", "", "\n".join(lines))


if __name__ == "__main__":
    main()
