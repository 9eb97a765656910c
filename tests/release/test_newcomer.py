"""The README's commands, as they are printed, on a machine that has never had bkctl."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from release.conftest import BIN, ROOT, copy_checkout
from release.test_dist import OFFLINE
from support.servers import require


def commands(page: str, section: str) -> list[str]:
    """Return the lines of the indented blocks of a section, comments left out."""
    text = (ROOT / page).read_text()
    part = text[text.index(f"\n## {section}\n") :].removeprefix("\n## ").partition("\n## ")[0]
    return [re.sub(r"\s{2,}# .*", "", line[4:]) for line in part.splitlines() if line.startswith("    ")]


def test_install_demo_first_cluster_backup_metrics_and_uninstall_work_as_typed(tmp_path: Path) -> None:
    root = copy_checkout(tmp_path / "checkout")
    home = tmp_path / "home"
    home.mkdir()
    lines = commands("README.md", "Install")
    install = lines[: lines.index("make demo")]
    first = lines[lines.index("make demo") : lines.index("bkctl local down") + 1]
    assert [line.split()[0] for line in install] == ["python3", "mkdir", "export", "source"]
    assert any(line.startswith("curl ") for line in first)
    assert any("metadata export" in line for line in first)
    checks = [
        "complete -p bkctl >/dev/null",
        'case "$(command -v bkctl)" in "$HOME"/.local/bin/bkctl) ;; *) exit 9 ;; esac',
        "MANPATH= man -w -M ~/bkctl/share/man bkctl >/dev/null || ls ~/bkctl/share/man/man1/bkctl.1 >/dev/null",
    ]
    after = ["! test -e ~/bkctl", "! test -L ~/.local/bin/bkctl", "test -z \"$(find ~ -name '*bkctl*' -print -quit)\""]
    after.append('test -z "$(find ~ -xtype l -print -quit)"')
    script = ["set -eE", "trap 'echo \"failed: $BASH_COMMAND\" >&2' ERR"]
    script += [*install, *checks, *first, *commands("docs/install.md", "Uninstall"), *after]
    env = {name: value for name, value in os.environ.items() if re.match(r"(PIP_|SSL_|HTTPS?_|NO_PROXY|LANG)", name)}
    # ~/.local/bin is not in it: Debian adds that only where it exists at the login.
    env |= {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    env["PIP_CACHE_DIR"] = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
    if shutil.which("python3", path=env["PATH"]) is None or shutil.which("curl") is None:
        require("newcomer", "python3 and curl in /usr/bin are needed")
    done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=root, env=env, capture_output=True, text=True)
    if done.returncode and OFFLINE.search(done.stderr):
        require("registry", done.stderr[-300:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "bookie_SERVER_STATUS" in done.stdout
    assert (root / "metadata.ndjson").stat().st_size > 0


def test_demo_prints_the_commands_that_it_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = tmp_path / "bkctl"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "bkctl $*" >>{log}\nexec {BIN}/bkctl "$@"\n')
    program.chmod(0o755)
    env = os.environ | {"BKCTL": str(program), "TMPDIR": str(tmp_path)}
    done = subprocess.run([ROOT / "demo/run.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.findall(r"\x1b\[32m\$ (.*)\x1b\[0m", done.stdout)
    shown = [line.rpartition(" | ")[2] for line in printed]
    assert len(shown) > 12
    ran = log.read_text().splitlines()
    assert [line for line in shown if line not in ran] == []
    writes = [line for line in ran if " ledger write " in line]
    assert writes == [line for line in shown if " ledger write " in line]
