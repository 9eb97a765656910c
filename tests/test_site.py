"""The site of the documentation: every link and anchor leads somewhere, and nothing comes from another host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Addresses that a page fetches; plain links may lead anywhere.
_FETCHED = re.compile(r'<(?:(?:script|img|iframe)[^>]*src|link[^>]*rel="stylesheet"[^>]*href)="(https?:[^"]+)')


def test_the_site_builds_without_a_broken_link_or_another_host(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "site/mkdocs.yml", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {str(page.relative_to(tmp_path)): page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    assert {"index.html", "commands.html", "guides/dead-bookie.html", "changelog.html"} <= pages.keys()
    paths = json.loads((tmp_path / "openapi.json").read_text())["paths"]
    assert len(paths) > 20
    assert [path for path in paths if path not in pages["openapi.html"]] == []
    assert {page: _FETCHED.findall(text) for page, text in pages.items() if _FETCHED.search(text)} == {}
