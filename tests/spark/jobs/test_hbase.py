"""Jobs that compare bookies' files with a metadata store, over a cluster whose ledgers are in a real HBase."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support import (
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.bookie_files import SETTINGS, write
from support.engines import Engine
from support.own_cluster import STORAGES, OwnCluster, stop_all
from support.servers import HBaseServer

from bkctl.formats.entry import DigestType
from bkctl.metadata.cluster import open_cluster


def test_jobs_read_metadata_from_hbase(engine: Engine, hbase: HBaseServer, tmp_path: Path) -> None:
    uri = hbase.metadata_uri(hbase.new_root())
    with open_cluster(uri, create=True):
        pass
    cluster = OwnCluster(uri, tmp_path, STORAGES, SETTINGS)
    try:
        cluster.ensure_up()
        custom = {"application": b"tests"}
        written = [
            asyncio.run(write(uri, scope_id, DigestType.CRC32C, 30, custom=custom)) for scope_id in (0, 0, 7, 2**64 - 1)
        ]
        stop_all(cluster.bookies)
    finally:
        cluster.kill()

    assert engine.rows(uri, "integrity", tmp_path) == []
    (counted,) = engine.rows(uri, "inventory", "--by", "application", tmp_path)
    assert (counted["application"], counted["ledgerCount"]) == ("tests", len(written))
    assert counted["entryCount"] == sum(each.entry_count * each.write_quorum_size for each in written)

    # A ledger that is removed promises nothing more; one that claims an entry too many lacks both copies of it.
    with open_cluster(uri) as opened:
        removed, longer = written[1].ledger, written[2].ledger
        opened.ledgers.remove(removed)
        found = opened.ledgers.read(longer)
        grown = found.metadata._replace(last_entry_id=30)
        opened.ledgers.write(longer, grown, found.version)
    missing = engine.rows(uri, "integrity", tmp_path, code=3)
    assert {(row["ledgerQualifiedName"], row["entryId"], row["problem"]) for row in missing} == {
        (longer.qualified_name, 30, "missing")
    }
    assert len(missing) == 2
