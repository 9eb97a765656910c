"""Draw docs/terminal.svg, the picture in README.md, from what bkctl prints on a terminal: `make picture`.

Start a local cluster in a temporary directory, run STEPS on a terminal of their own, and export the screen.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS = 100
#: What is typed; `$id` stands for the ledger that the first `ledger write` made.
STEPS = (
    "bkctl bookies list",
    "printf 'one\\ntwo\\nthree\\n' | bkctl -q ledger write --uuid -o id",
    "bkctl ledger read $id --body",
    "bkctl ledger verify $id",
    "bkctl cluster health",
)


def main() -> None:
    """Write the SVG to the file that the command line names."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("BKCTL_", "XDG_", "NO_COLOR"))
        } | {"XDG_DATA_HOME": directory, "XDG_STATE_HOME": directory, "XDG_CONFIG_HOME": directory}
        subprocess.run(["bkctl", "-q", "cluster", "up"], env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            screen = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
            ledger = ""
            for step in STEPS:
                command = step.replace("$id", ledger)
                shown = run(command, environment)
                ledger = ledger or next(iter(re.findall(r"\b[0-9a-f]{32}\b", shown)), "")
                screen.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
                screen.print(Text.from_ansi(shown.rstrip("\n")))
                if step != STEPS[-1]:
                    screen.print()
        finally:
            subprocess.run(["bkctl", "-q", "cluster", "down", "--yes"], env=environment, check=True)
    # The fonts of the default format are fetched from the network; a monospaced font of the reader's does as well.
    svg_format = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    Path(sys.argv[1]).write_text(screen.export_svg(title="bkctl", code_format=svg_format, unique_id="terminal"))


def run(command: str, environment: dict[str, str]) -> str:
    """Return what a shell command writes to a terminal of COLUMNS columns."""
    leader, follower = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    with subprocess.Popen(
        ["sh", "-c", command], env=environment | size, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                data = os.read(leader, 1 << 16)
            except OSError:  # The shell has ended.
                break
            if not data:
                break
            shown += data
        if process.wait() != 0:
            raise SystemExit(f"{command}: exit code {process.returncode}:\n{shown.decode()}")
    os.close(leader)
    return shown.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    main()
