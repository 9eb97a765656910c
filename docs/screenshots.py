"""Take the pictures of docs/console.md in Chromium, from the console of a live cluster: a part of `make picture`.

Start a local cluster in a temporary directory, kill a bookie of a ledger that is written, and save pages under load.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from picture import background, pid_of
from playwright.sync_api import sync_playwright

#: Pages by the name of their picture, the width in pixels, and the scheme of colours.
PAGES: tuple[tuple[str, str, int, Literal["dark", "light"]], ...] = (
    ("console", "", 1280, "light"), ("console-ledger", "ledger/0", 1280, "light"),
    ("console-bookie", "bookie/bookie-0", 390, "dark"),
)  # fmt: skip
LEDGER = (
    "(seq 400; sleep 15; seq 900) | bkctl -q ledger write --ensemble-size 3 --custom-metadata application=orders -o id"
)
LOAD = (
    "while :; do seq 9000 | bkctl -q ledger write -o id | xargs -I{} bkctl -q ledger read {} -o id >/dev/null; "
    "sleep 1; done"
)
VIEWED_S = 200


def main() -> None:
    """Write the pictures to the directory that the command line names."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("BKCTL_", "XDG_"))}
        environment |= dict.fromkeys(("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"), directory)
        local = ["bkctl", "-q", "local"]
        subprocess.run([*local, "up", "--bookies", "5"], env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            words = ["bkctl", "-q", "console", "--no-browser", "-o", "ndjson"]
            with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as console:
                assert console.stdout is not None
                take(target, json.loads(console.stdout.readline())["url"], environment)
                console.terminate()
        finally:
            subprocess.run([*local, "down", "--yes"], env=environment, check=True, stdout=subprocess.DEVNULL)


def take(target: Path, url: str, environment: dict[str, str]) -> None:
    """Save the pages of the console that `url` opens once."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(url)
        with subprocess.Popen(["sh", "-c", LEDGER], env=environment, stdout=subprocess.DEVNULL) as writer:
            time.sleep(8)
            show = ["bkctl", "-q", "ledger", "show", "0", "-o", "json"]
            shown = subprocess.run(show, env=environment, check=True, stdout=subprocess.PIPE)
            os.kill(pid_of(max(json.loads(shown.stdout)["ensembles"]["0"]), environment), signal.SIGKILL)
            writer.wait()
        with background(LOAD, environment):
            time.sleep(VIEWED_S)
        for name, path, width, scheme in PAGES:
            page.set_viewport_size({"width": width, "height": 500})
            page.emulate_media(color_scheme=scheme)
            page.goto(f"{url.partition('/enter')[0]}/{path}")
            page.screenshot(path=target / f"{name}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
