"""Workers that die in an export and in a write are replaced, and change nothing; nothing of Spark's tells a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from support.live_ledgers import Live

JOB = Path(__file__).parent / "dying_job.py"
READ_SCOPE, WRITE_SCOPE = 0xD1E, 0xD1F
METADATA_PASSWORD, LEDGER_PASSWORD, OTHER_PASSWORD = "hunter2-metadata", "hunter2-ledger", "hunter2-other"


@pytest.mark.long
def test_dead_workers_change_no_result_and_leak_no_secret(live: Live, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    import pyarrow.parquet as parquet

    contents = {LedgerId(READ_SCOPE, number): [b"%d of %d" % (at, number) for at in range(200)] for number in range(4)}
    for ledger, payloads in contents.items():
        live.write(payloads, ledger, password=OTHER_PASSWORD.encode())
    (tmp_path / "metadata-password").write_text(METADATA_PASSWORD)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "THE_LEDGER_PASSWORD": LEDGER_PASSWORD}
    done = subprocess.run(
        [sys.executable, JOB, live.uri, str(READ_SCOPE), str(WRITE_SCOPE), tmp_path], env=environment,
        capture_output=True, text=True, timeout=840, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"died reading", "died writing"} <= {each.name for each in tmp_path.iterdir()}

    assert found["exported"] == [[ledger.qualified_name, 200] for ledger in contents]
    columns = ["ledgerQualifiedName", "entryId", "payload"]
    rows = parquet.read_table(tmp_path / "export" / "entries", columns=columns).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [
        (ledger.qualified_name, at, payload) for ledger, each in contents.items() for at, payload in enumerate(each)
    ]

    ledgers = [LedgerId.parse(name) for name in found["ledgers"]]
    assert set(ledgers) == live.ledgers(WRITE_SCOPE)
    assert [live.read(ledger) for ledger in ledgers] == [
        [(b"%d" % number).rjust(1000, b".") for number in range(first, first + 1000)] for first in (0, 1000)
    ]
    made = live.client().cluster.ledgers.read(ledgers[0]).metadata
    assert made.password == LEDGER_PASSWORD.encode()

    assert "bookkeeper.ledger" in done.stdout
    files = [tmp_path / "spark.log", *(each for each in (tmp_path / "events").rglob("*") if each.is_file())]
    files += [each for each in (tmp_path / "export").rglob("*") if each.is_file()]
    texts = {"output": (done.stdout + done.stderr).encode(), **{str(each): each.read_bytes() for each in files}}
    assert len(texts[str(tmp_path / "spark.log")]) > 10_000
    assert any("events" in name and text for name, text in texts.items())
    for secret in (METADATA_PASSWORD, LEDGER_PASSWORD, OTHER_PASSWORD):
        assert [name for name, text in texts.items() if secret.encode() in text] == []
