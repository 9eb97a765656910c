"""`--watch`: what is printed at first, and when something changes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from support.command_line import CommandLine
from support.waiting import LIMIT_S

from bkctl.formats.metadata import Cookie
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW

from .conftest import Cli


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        cluster.cookies.write("b1", Cookie("b1", ("/j",), ("/l",)), NEW)
    return uri


@pytest.fixture
def watching(uri: str) -> Iterator[object]:
    """Starts a command that watches."""
    made: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> IO[bytes]:
        process = CommandLine(uri).process(*words)
        made.append(process)
        assert process.stdout is not None
        return process.stdout

    yield start
    for process in made:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, err) == (130, b"bkctl: Interrupted\n")


def test_ndjson_reports_added_changed_and_removed_rows(uri: str, watching: object) -> None:
    # A bookie that comes and goes is seen by the store's watches, long before the minute is over.
    out = watching("bookies", "list", "--watch", "60", "-o", "ndjson")  # type: ignore[operator]
    assert json.loads(out.readline())["bookieId"] == "b1"
    with open_cluster(uri) as cluster:
        from bkctl.formats.metadata import BookieServiceInfo

        cluster.bookies.register("b2", BookieServiceInfo(()))
        row = json.loads(out.readline())
        assert (row["bookieId"], row["state"]) == ("b2", "rw")
        cluster.bookies.register("b1", BookieServiceInfo(()), read_only=True)
        row = json.loads(out.readline())
        assert (row["bookieId"], row["state"]) == ("b1", "ro")
        cluster.bookies.unregister("b2")
        gone = json.loads(out.readline())
        assert (gone["bookieId"], gone["removed"]) == ("b2", True)


def test_a_table_is_printed_again_below(uri: str, watching: object) -> None:
    out = watching("bookies", "list", "--watch")  # type: ignore[operator]
    first = [out.readline(), out.readline()]
    assert first[1].split()[:2] == [b"b1", b"down"]
    with open_cluster(uri) as cluster:
        from bkctl.formats.metadata import BookieServiceInfo

        cluster.bookies.register("b1", BookieServiceInfo(()))
        assert [out.readline(), out.readline()] == [b"\n", first[0]]
        assert out.readline().split()[:2] == [b"b1", b"rw"]


def test_watch_requires_a_form_without_an_end(cli: Cli, uri: str) -> None:
    assert "-o ndjson" in cli("bookies", "list", "--watch", "-o", "json", "-u", uri).err
    assert cli("bookies", "list", "--watch=0", "-u", uri).code == 2
    assert cli("bookies", "list", "--watch=soon", "-u", uri).code == 2
    # Where arguments are taken, a word behind --watch is one.
    assert cli("ledger", "show", "--watch", "5", "-u", uri).code == 4
    assert cli("ledger", "show", "--watch=5", "-u", uri).code == 2
