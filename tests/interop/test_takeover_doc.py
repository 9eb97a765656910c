"""The commands of docs/takeover.md, on the directories of an Apache bookie with entries."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import script_of
from support.own_bookies import OwnBookie
from support.servers import DB, SORTED, ApacheBookie, Java, ZooKeeperServer, format_cluster, read_ledgers
from support.waiting import LIMIT_S

PAGE = (Path(__file__).parents[2] / "docs" / "takeover.md").read_text()
#: Title → its commands, and the steps behind `#`.
SECTIONS = {
    section.partition("\n")[0]: re.findall(r"^    (.+)$", section, re.MULTILINE) for section in PAGE.split("\n## ")[1:]
}
START = 'bkctl bookie start -c "$C"'


@pytest.mark.releases
@pytest.mark.parametrize("storage", [SORTED, DB])
def test_commands_of_the_page_take_over_a_bookie_and_go_back(
    storage: str, java: Java, zookeeper: ZooKeeperServer, apache_bookie: Callable[..., ApacheBookie], tmp_path: Path
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    theirs, neighbour = apache_bookie(uri, storage), apache_bookie(uri, SORTED)
    ours = OwnBookie(uri, tmp_path / "ours", port=theirs.port, storage=storage, settings=theirs.settings)
    for bookie in (theirs, neighbour):
        bookie.start()

    environment = {**os.environ, "C": str(ours.conf), "B": ours.bookie_id}

    def run(line: str) -> str:
        command, _, expected = line.partition("  #")
        done = subprocess.run(
            ["bash", "-ec", script_of(command)], capture_output=True, text=True, timeout=LIMIT_S, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, (line, done)
        assert expected.strip() in done.stdout + done.stderr, (line, done)
        return done.stdout

    def act(line: str) -> None:
        if line.startswith(START):
            ours.start()
            assert line.partition("  #")[2].strip() in ours.log_tail()
        elif line.startswith("#"):
            actions = {
                "# stop Apache's bookie (SIGTERM)": theirs.stop, "# start Apache's bookie": theirs.start,
                "# stop bkctl's bookie (SIGTERM)": ours.stop, "# install the new version": bool,
            }  # fmt: skip
            actions[line]()
        else:
            run(line)

    run('seq 500 | bkctl ledger write --ledger-id 12 --ensemble-size 2 -c "$C"')
    try:
        for line in (*SECTIONS["Before"], *SECTIONS["Take over"]):
            act(line)
        run('seq 500 | bkctl ledger write --ledger-id 13 --ensemble-size 2 -c "$C"')
        for line in SECTIONS["Go back"]:
            act(line)
        asked = [{"ledgerId": ledger, "digestType": "CRC32C", "password": ""} for ledger in (12, 13)]
        assert [len(each["entries"]) for each in read_ledgers(java, uri, "v3", asked)] == [500, 500]
        theirs.stop()
        ours.start()
        for line in SECTIONS["Upgrade bkctl"]:
            act(line)
    finally:
        ours.kill()
