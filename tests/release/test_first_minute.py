"""From nothing but the wheel: a cluster, a scoped ledger, and the console in a browser, within a minute."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from release.test_dist import try_install, without_compiler
from support.servers import require

LIMIT_S = 60


@contextmanager
def console(command: list[str], env: dict[str, str]) -> Iterator[str]:
    """Run `bkctl console`; yield the link that it prints."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            printed = ""
            while (link := re.search(r"http://\S+", printed)) is None:
                line = process.stdout.readline()
                assert line, f"no link: {printed}"
                printed += line
            yield link[0]
        finally:
            process.terminate()


@pytest.mark.long
def test_a_cluster_a_scoped_ledger_and_the_console_within_a_minute(
    wheel: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chromium = shutil.which("chromium")
    if find_spec("playwright") is None or chromium is None:
        require("chromium", "playwright and chromium are needed")
    from playwright.sync_api import sync_playwright

    env = without_compiler(tmp_path)
    env |= {"PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))}
    wheels = tmp_path / "wheels"
    run = [sys.executable, "-m", "pip", "wheel", "-q", "-w", str(wheels), f"{wheel}[http]"]
    try_install(run, env)  # the download, which does not count

    def bkctl(*words: str, text: str = "") -> str:
        done = subprocess.run([program, *words], env=env, input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    began_s = time.monotonic()
    program = str(tmp_path / "bkctl/bin/bkctl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "bkctl"], env=env, check=True)
    pip = [str(tmp_path / "bkctl/bin/pip"), "install", "-q", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*pip, "bkctl[http]"], env=env, check=True)
    installed_s = time.monotonic()
    try:
        bkctl("local", "up")
        ledger = bkctl("ledger", "write", "--ledger-scope-id", "7", "-o", "id", text="kept\n").strip()
        assert ledger.startswith("0000000000000007")
        assert "kept" in bkctl("ledger", "read", ledger, "--body", "--format", "utf8")
        with console([program, "console", "--no-browser"], env) as link, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(link)
            assert page.locator("h1").first.is_visible()
            page.get_by_role("link", name="Ledgers", exact=True).first.click()
            assert ledger in page.inner_text("main")
            spent_s = time.monotonic() - began_s
            browser.close()
    finally:
        bkctl("local", "down")
    print(f"installed in {installed_s - began_s:.1f} s, all of it in {spent_s:.1f} s")
    record_property("first_minute_s", round(spent_s, 1))
    # Other processes that wait for a core take their share: the limit is for a machine that has none.
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    assert spent_s < LIMIT_S * max(1.0, waiting), f"{spent_s:.0f} s, {waiting:.1f} processes a core"
