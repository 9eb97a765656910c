"""Fail where the installed bkctl lacks a loop in C, a completion, a man page or a unit; run with its Python."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

FILES = (
    "man/man1/bkctl.1",
    "bash-completion/completions/bkctl.bash",
    "zsh/site-functions/_bkctl",
    "fish/vendor_completions.d/bkctl.fish",
    "bkctl/systemd/bkctl-bookie.service",
    "bkctl/prometheus/alerts.yml",
)


def main() -> None:
    """Check the environment of the Python that runs this."""
    program = Path(sysconfig.get_path("scripts"), "bkctl")
    done = subprocess.run([program, "version", "-o", "json"], capture_output=True, text=True, check=True)
    version = json.loads(done.stdout)
    share = Path(sysconfig.get_path("data"), "share")
    missing = [str(share / name) for name in FILES if not (share / name).is_file()]
    if version["uncompiledModules"] or missing:
        raise SystemExit(f"not compiled: {version['uncompiledModules']}; missing files: {missing}")
    print(f"bkctl {version['version']} on {sys.version.split()[0]}: {', '.join(version['compiledModules'])} in C")


if __name__ == "__main__":
    main()
