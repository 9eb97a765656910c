"""Names and texts from the network: they steer neither the terminal nor the shell."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.bookie_load import api_of, register, replies
from support.fake_http import FakeServer, Reply

from bkctl.columns import Column, Columns
from bkctl.commands.kit.columns import Output
from bkctl.commands.kit.completion import candidates
from bkctl.commands.kit.job import _make_plain
from bkctl.commands.kit.output import RowWriter
from bkctl.commands.kit.texts import plain
from bkctl.commands.top_screen import Screen
from bkctl.formats.metadata import BookieServiceInfo
from bkctl.http.bookie_load import LoadWatch
from bkctl.metadata.cluster import VERSION_PROPERTY, open_cluster
from bkctl.metadata.store import NEW

from .conftest import Cli

TITLE = "\x1b]0;mine\x07"
#: A name that is read from right to left behind its first letter, and one of two lines.
REVERSED, LINES = "a\u202eb:1818", "a\u2028b"
STEERING = re.compile("[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e\u2028]|\x1b(?!\\[[0-9;]*[mKJH])")


def test_plain_texts_have_no_character_that_a_terminal_acts_on() -> None:
    for text in (TITLE, REVERSED, LINES, "\x9b31m", "\u2066x\u2069", "\u200fx", "a\nb", "\udc80\x1b"):
        assert not STEERING.search(plain(text)), repr(text)
    assert plain(REVERSED) == "a\\u202eb:1818"
    assert plain("日本 äöü") == "日本 äöü"


def test_csv_on_a_terminal_is_plain_and_in_a_file_as_it_is() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    columns = Columns(Column("NAME", "name", lambda row: row))
    for stream, expected in ((Terminal(), plain(TITLE)), (io.StringIO(), TITLE)):
        with RowWriter(columns, Output.CSV, stream=stream) as writer:
            writer.row(TITLE)
        assert stream.getvalue() == f"name\n{expected}\n"


def test_page_of_a_bookie_in_top_shows_its_version_as_it_is(tmp_path: Path) -> None:
    fake = FakeServer()
    fake.replies = replies(Reply(b""))
    version = f"9 {TITLE} [bold]b[/] [link=file:///etc]c[/link]"
    screen, out = Screen(), io.StringIO()
    try:
        with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
            register(cluster, "b1", fake.url)
            info = cluster.bookies.list()[0].info
            assert info is not None
            cluster.bookies.register("b1", BookieServiceInfo(info.endpoints, {VERSION_PROPERTY: version}))
            screen.take(LoadWatch(cluster, api_of, wait_s=60).look(), f"gone {TITLE}")
    finally:
        fake.close()
    screen.press("enter")
    Console(file=out, width=120, height=40, force_terminal=True, highlight=False).print(screen, height=40)
    assert not STEERING.search(out.getvalue().replace("\n", ""))
    assert f"9 {plain(TITLE)} [bold]b[/] [link=file:///etc]c[/link]" in out.getvalue()


def test_metrics_on_a_terminal_are_plain(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer()
    fake.replies = {"GET /metrics": Reply(f'a{{b="{TITLE}"}} 1\n'.encode())}
    try:
        words = ("bookie", "metrics", "--raw", "--bookie-url", fake.url)
        assert cli(*words).out == f'a{{b="{TITLE}"}} 1\n'
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
        assert cli(*words).out == f'a{{b="{plain(TITLE)}"}} 1\n'
    finally:
        fake.close()


def test_notes_and_questions_are_plain(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    open_cluster(uri, create=True).close()
    noted = cli(
        "bookies", "racks", "set", "b1", "--rack", "/r", "--group", TITLE, "--undo", tmp_path / "u\x1bx", "-u", uri
    )
    assert noted.code == 0, noted.err
    assert "u\\x1bx" in noted.err
    assert "\x1b" not in noted.err


def test_log_records_are_one_line_each() -> None:
    record = logging.makeLogRecord({"msg": "Bookie %s is here", "args": (f"{TITLE}\n2026-01-01 INFO forged",)})
    assert _make_plain(record)
    assert record.getMessage() == f"Bookie {plain(TITLE)}\\x0a2026-01-01 INFO forged is here"
    bad = logging.makeLogRecord({"msg": "%d", "args": ("x",)})
    assert _make_plain(bad)


def test_completions_hold_nothing_that_a_shell_expands(tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    good = ["10.0.0.1:3181", "[::1]:3181", "bk_1.example-a"]
    with open_cluster(uri, create=True) as cluster:
        for name in (
            *good,
            "--yes",
            "x;touch y",
            "$(touch y)",
            "`touch y`",
            "x|y",
            "x&y",
            "x>y",
            "'x",
            "~",
            "x y",
        ):
            cluster.store.put(f"cookies/{name}", b"", NEW)
    assert list(candidates("bookie", {"g_metadata_uri": [uri]}, "")) == sorted(good)
