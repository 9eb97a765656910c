"""Time and memory of `bkctl pulsar check` and `topics` by the number of topics, each with 10 ledgers, in SQLite.

python -m benchmarks.pulsar [TOPICS …]     (default: 1000 10000 100000)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from bkctl.formats.entry import DigestType
from bkctl.formats.managed_ledger_pb2 import ManagedCursorInfo, ManagedLedgerInfo
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW

LEDGERS = 10


def write(uri: str, topic_count: int) -> Cluster:
    """Write topics with ledgers and a cursor each, and an orphan for each thousandth topic; a bookie is registered."""
    cluster = open_cluster(uri, create=True)
    cluster.bookies.register("b:1", BookieServiceInfo((BookieEndpoint("bookie", 1, "b", "bookie-rpc"),)))
    place = cluster.store

    def nodes() -> Iterator[tuple[str, bytes, int]]:
        for number in range(topic_count):
            name = f"t{number % 10}/n{number % 100}/persistent/topic-{number}"
            info = ManagedLedgerInfo()
            orphan = number % 1000 == 0
            for at in range(LEDGERS):
                ledger_id = number * LEDGERS + at
                metadata = LedgerMetadata(
                    1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b:1",)),), LedgerState.CLOSED, 10_000, 99,
                    1_755_770_000_000, {"application": b"pulsar", "component": b"managed-ledger",
                                        "pulsar/managed-ledger": name.encode()},
                )  # fmt: skip
                yield cluster.ledgers.path(LedgerId(0, ledger_id)), metadata.serialize(), NEW
                if not (orphan and at == 0):
                    info.ledgerInfo.add(ledgerId=ledger_id, entries=100, size=10_000, timestamp=1)
            last = number * LEDGERS + LEDGERS - 1
            cursor = ManagedCursorInfo(cursorsLedgerId=-1, markDeleteLedgerId=last, markDeleteEntryId=50)
            yield f"managed-ledgers/{name}", info.SerializeToString(), NEW
            yield f"managed-ledgers/{name}/sub", cursor.SerializeToString(), NEW

    every = nodes()
    while batch := list(islice(every, 5000)):
        place.put_many(batch)
    return cluster


def measure(uri: str, *words: str) -> str:
    """Run a command, and return its time, largest memory and number of lines."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "bkctl", "pulsar", *words, "-u", uri, "-o", "ndjson", "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines = sum(1 for _ in process.stdout)
    _, _, usage = os.wait4(process.pid, 0)
    return f"{time.perf_counter() - began:7.1f} s {usage.ru_maxrss / 1024:6.0f} MiB {lines:8,} rows"


def main() -> None:
    for topic_count in [int(word) for word in sys.argv[1:]] or [1_000, 10_000, 100_000]:
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
            uri = f"sqlite://{Path(directory) / 'm.db'}"
            with write(uri, topic_count):
                for words in (("check",), ("topics", "--quick"), ("topics", "--by", "namespace", "--quick")):
                    print(f"{topic_count:8,} topics  pulsar {' '.join(words):32} {measure(uri, *words)}", flush=True)


if __name__ == "__main__":
    main()
