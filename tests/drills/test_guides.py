"""The commands of docs/guides, each section on a local cluster that is broken as its page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.command_line import CommandLine, script_of
from support.waiting import LIMIT_S, eventually

from bkctl.bookie.local import LocalCluster
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

PAGES = Path(__file__).parents[2] / "docs" / "guides"
TEXT = "".join(f"entry {number} of a guide\n" for number in range(40))


class Line(NamedTuple):
    """A command, its exit code, and a part of what it prints; `command` begins with # for what is done outside."""

    command: str
    code: int
    prints: str

    @classmethod
    def parse(cls, line: str) -> Line:
        if line.startswith("#"):
            return cls(line, 0, "")
        command, _, comment = line.partition("  #")
        code, colon, prints = comment.strip().partition(": ")
        return cls(command.strip(), int(code), prints) if colon and code.isdigit() else cls(command.strip(), 0, comment)


class Broken:
    """A local cluster with one ledger, and the bookie and ledger that a guide is about."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shell = CommandLine(None)
        self.up()
        written = self.shell.run("ledger", "write", "--ensemble-size", "2", "-o", "ndjson", input=TEXT.encode())
        assert written.code == 0, written.err
        self.ledger = str(written.rows[-1]["ledgerId"])
        (row,) = self.shell("ledger", "show", self.ledger, "-o", "ndjson").rows
        self.bookie = next(iter(row["ensembles"].values()))[0]
        self.store = f"sqlite:///{directory.parent / self.ledger}.db"

    @property
    def conf(self) -> Path:
        return self.directory / self.bookie / "bk_server.conf"

    def up(self) -> None:
        """Start the cluster, and whatever of it does not run."""
        self.shell("local", "up", "--dir", self.directory, "--bookies", 4, "--autorecovery")
        eventually(lambda: self.shell("cluster", "health", "--threshold", 100).out == b"OK\n")

    def stop(self) -> None:
        assert self.shell("local", "down", "--bookie", self.bookie).code == 0

    def stop_all(self) -> None:
        for bookie in LocalCluster(self.directory).bookies():
            assert self.shell("local", "down", "--bookie", bookie.bookie_id).code == 0

    def lose_volume(self) -> None:
        self.stop()
        for name in ("journal", "ledgers"):
            shutil.rmtree(self.directory / self.bookie / name)
        assert self.shell("local", "up").code != 0

    def start_empty(self) -> None:
        shutil.rmtree(self.directory / self.bookie)
        self.up()

    def fill_disk(self) -> None:
        limits = ("--set", "diskUsageThreshold=0.00002", "--set", "diskUsageWarnThreshold=0.00001")
        assert self.shell("bookie", "config", "--bookie", self.bookie, *limits).code == 0
        eventually(lambda: b"disk-full-no-way-out" in self.shell("cluster", "health", "--threshold", 100).out)

    def disable(self) -> None:
        assert self.shell("autorecovery", "disable").code == 0
        assert self.shell("autorecovery", "mark", self.ledger, "--missing", self.bookie).code == 0

    def lose_cookie(self) -> None:
        self.stop()
        with open_cluster(LocalCluster(self.directory).metadata_uri) as cluster:
            cookie = cluster.cookies.read(self.bookie)
            cluster.cookies.remove(self.bookie, cookie.version)

    def begin_recovery(self) -> None:
        with open_cluster(LocalCluster(self.directory).metadata_uri) as cluster:
            ledger = LedgerId.parse(self.ledger)
            found = cluster.ledgers.read(ledger)
            stuck = found.metadata._replace(state=LedgerState.IN_RECOVERY, length=0, last_entry_id=-1)
            cluster.ledgers.write(ledger, stuck, found.version)

    def corrupt(self) -> None:
        assert self.shell("autorecovery", "delay", "1h").code == 0
        self.stop()
        entry = int(self.ledger).to_bytes(8, "big") + (3).to_bytes(8, "big")
        for path in (self.directory / self.bookie / "ledgers").rglob("*.log"):
            data = bytearray(path.read_bytes())
            if (at := data.find(entry)) >= 0:
                data[at + 40] ^= 0xFF
            path.write_bytes(data)
        self.up()
        assert self.shell("autorecovery", "delay", "0").code == 0

    def run(self, line: Line) -> None:
        environment = {**os.environ, "B": self.bookie, "L": self.ledger, "C": str(self.conf), "NEW": self.store}
        done: subprocess.CompletedProcess[str]

        def is_as_told() -> bool:
            nonlocal done
            done = subprocess.run(
                ["bash", "-ec", script_of(line.command)], capture_output=True, text=True, timeout=LIMIT_S,
                env=environment, cwd=self.directory.parent,
            )  # fmt: skip
            return done.returncode == line.code and line.prints.strip() in done.stdout + done.stderr

        if "cluster health" in line.command or "ledger verify" in line.command:
            eventually(is_as_told)  # what bookies and auto-recovery do takes its time
        else:
            assert is_as_told(), (line, done)


FAULTS: dict[str, Callable[[Broken], None]] = {
    "dead-bookie": Broken.stop,
    "full-disk": Broken.fill_disk,
    "under-replication": Broken.disable,
    "cookie-mismatch": Broken.lose_cookie,
    "lost-volume": Broken.lose_volume,
    "stuck-recovery": Broken.begin_recovery,
    "corrupted-log": Broken.corrupt,
    "moved-metadata": lambda broken: None,
}
OUTSIDE: dict[str, Callable[[Broken], None]] = {
    "# start the bookie": Broken.up,
    "# empty all its directories, and start the bookie": Broken.start_empty,
    "# stop all bookies and writers": Broken.stop_all,
    "# set metadataServiceUri of all bookies and clients to the new store, and start them": Broken.up,
}


def sections() -> Iterator[tuple[str, str, list[Line]]]:
    """(page, title, what is done) of each section that begins with If; the page's first commands go before them."""
    for page in sorted(PAGES.glob("*.md")):
        first, *others = page.read_text("utf-8").split("\n## ")
        for section in others:
            title = section.partition("\n")[0]
            lines = re.findall(r"^    (\S.*)$", first + section, re.MULTILINE)
            yield page.stem, title, [Line.parse(line) for line in lines]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("guides") / "cluster"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("BKCTL_METADATA_URI", raising=False)
        try:
            yield directory
        finally:
            LocalCluster(directory).down()


@pytest.mark.parametrize(("page", "title", "lines"), [*sections()])
def test_commands_of_a_guide_end_its_incident(directory: Path, page: str, title: str, lines: list[Line]) -> None:
    broken = Broken(directory)
    FAULTS[page](broken)
    for line in lines:
        print(line.command)
        if line.command.startswith("#"):
            OUTSIDE[line.command](broken)
        else:
            broken.run(line)
    read = broken.shell("ledger", "read", broken.ledger, "--body", "--format", "utf8", "-o", "ndjson")
    assert [row["payload"] for row in read.rows] == TEXT.splitlines()


def test_every_guide_has_a_fault_and_a_row_in_the_list() -> None:
    pages = {page.stem for page in PAGES.glob("*.md")} - {"index"}
    assert pages == FAULTS.keys()
    assert pages == set(re.findall(r"\]\((\S+)\.md\) \|", (PAGES / "index.md").read_text("utf-8")))
