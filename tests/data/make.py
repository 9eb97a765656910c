"""Make the golden files of one BookKeeper version: files of Apache's bookies, and what Apache's shell says of them.

    .venv/bin/python tests/data/make.py 4.18.0 [sorted interleaved db]

Needs Java and Maven. Writes `tests/data/<version>/` anew; see README.md there for what is what. Ports, journal ids,
times and cookies differ from run to run, so files are made once for a version and then kept.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from kazoo.client import KazooClient  # noqa: E402
from support import apache_shell  # noqa: E402
from support.servers import (  # noqa: E402
    DB,
    INTERLEAVED,
    SORTED,
    ApacheBookie,
    ApacheCluster,
    Java,
    ZooKeeperServer,
    offline_conf,
    write_ledgers,
)

#: Directory → storage class and settings. The interleaved one writes the older versions of journal and index.
BOOKIES: dict[str, tuple[str, dict[str, object]]] = {
    "sorted": (SORTED, {}),
    "interleaved": (INTERLEAVED, {"journalFormatVersionToWrite": 5, "fileInfoFormatVersionToWrite": 0}),
    "db": (DB, {}),
}
SETTINGS = {"logSizeLimit": 40000, "journalBufferedWritesThreshold": 4096, "entryLogFilePreallocationEnabled": "true"}
ZEROS_KEPT = 512


def cut_zeros(journal: Path) -> None:
    """Cut the pre-allocated zeros off a journal, but for one block of them."""
    data = journal.read_bytes()
    end = len(data.rstrip(b"\0"))
    end = min(len(data), (end + 511) // 512 * 512 + ZEROS_KEPT)
    os.truncate(journal, end)


def copy_bookie(bookie: ApacheBookie, target: Path) -> None:
    """Copy journal and ledger directories without what is noise (RocksDB's text logs, empty locks)."""
    ignore = shutil.ignore_patterns("LOG", "LOG.old.*", "LOCK", "OPTIONS-*")
    shutil.copytree(bookie.journal_dir, target / "journal", ignore=ignore)
    shutil.copytree(bookie.ledger_dir, target / "ledgers", ignore=ignore)
    for journal in target.glob("journal/current/*.txn"):
        cut_zeros(journal)


def ask_shell(java: Java, target: Path, storage: str, ledgers: list[str], work: Path) -> dict[str, Any]:
    """Return the output of Apache's shell about the files in `target`; the shell gets a copy, since it may write."""
    copy = work / "asked"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(target, copy)
    conf = offline_conf(work / "ask.conf", copy / "journal", copy / "ledgers", storage)
    answers: dict[str, Any] = {"journals": {}, "entryLogs": {}, "indexes": {}}
    answers["lastMark"] = apache_shell.last_mark(java.shell(conf, "lastmark").stdout)
    for journal in sorted(copy.glob("journal/current/*.txn")):
        text = java.shell(conf, "readjournal", journal, check=True).stdout
        answers["journals"][journal.name] = {
            "version": apache_shell.journal_version(text), "records": compact(apache_shell.records(text))
        }  # fmt: skip
    for log in sorted(copy.glob("ledgers/current/*.log")):
        log_id = int(log.stem, 16)
        text = java.shell(conf, "readlog", log_id, check=True).stdout
        metadata = java.shell(conf, "readlogmetadata", log_id).stdout
        answers["entryLogs"][log.name] = {
            "records": compact(apache_shell.records(text)), "ledgers": apache_shell.log_metadata(metadata)
        }  # fmt: skip
    for ledger_id in ledgers:
        answer = java.shell(conf, "ledger", *(["-m"] if storage != DB else []), ledger_id)
        if answer.returncode == 0:  # else the ledger is not on this bookie
            header = apache_shell.index_header(answer.stdout) if storage != DB else {}
            rows = [[entry_id, *location] for entry_id, location in apache_shell.locations(answer.stdout).items()]
            answers["indexes"][ledger_id] = header | {"locations": rows}
    return answers


def compact(records: list[dict[str, Any]]) -> list[list[Any]]:
    """Rows of type, ledger id, entry id, offset, record size, and last add confirmed or master key."""
    return [
        [one["type"], one["ledgerId"], one["entryId"], one["offset"], one["recordSize"],
         one.get("lastAddConfirmed", one.get("masterKey"))]
        for one in records
    ]  # fmt: skip


def zookeeper_nodes(zookeeper: ZooKeeperServer, root: str) -> dict[str, str]:
    """Path below the root → value in base64, of every node."""
    client = KazooClient(zookeeper.connect_string)
    client.start()
    nodes: dict[str, str] = {}

    def walk(path: str) -> None:
        nodes[path.removeprefix(root) or "/"] = base64.b64encode(client.get(path)[0]).decode()
        for child in sorted(client.get_children(path)):
            walk(f"{path}/{child}")

    walk(root)
    client.stop()
    return nodes


def lines(items: dict[str, Any], depth: int = 0) -> str:
    """JSON with one line for each record, ledger or node."""
    inner = []
    for name, value in items.items():
        if isinstance(value, dict) and depth < 4 and len(json.dumps(value)) > 110:
            text = lines(value, depth + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in value) + "\n]"
        elif isinstance(value, list):
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        else:
            text = json.dumps(value, ensure_ascii=False)
        inner.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(inner) + "\n}"


def main(version: str, *kept: str) -> None:
    java = Java(version)
    work = Path(tempfile.gettempdir()) / f"bkctl-golden-{version}"
    shutil.rmtree(work, ignore_errors=True)
    zookeeper = ZooKeeperServer(java, work / "zookeeper")
    zookeeper.start()
    cluster = ApacheCluster(java, zookeeper, work, storages=())
    cluster.bookies += [
        ApacheBookie(java, cluster.metadata_uri, work / name, storage, settings={**SETTINGS, **settings})
        for name, (storage, settings) in BOOKIES.items()
    ]
    cluster.start()
    ledgers = write_ledgers(java, cluster.metadata_uri, "v3", small=True)
    for bookie in cluster.bookies:
        bookie.stop()
    cluster.ensure_up()
    ledgers += write_ledgers(
        java, cluster.metadata_uri, "v2", small=True, stop=lambda bookie_id: cluster.by_id(bookie_id).stop()
    )
    cluster.ensure_up()
    nodes = zookeeper_nodes(zookeeper, cluster.root)
    for bookie in cluster.bookies:
        bookie.stop()

    target = work / "golden"
    answers: dict[str, Any] = {}
    ids = sorted({ledger["ledgerId"] for ledger in ledgers}, key=int)
    for bookie, (name, (storage, _)) in zip(cluster.bookies, BOOKIES.items(), strict=True):
        if kept and name not in kept:
            continue
        copy_bookie(bookie, target / name)
        answers[name] = {"bookieId": bookie.bookie_id, "storageClass": storage}
        answers[name] |= ask_shell(java, target / name, storage, ids, work)
    zookeeper.kill()

    metadata = [json.loads(line) for line in java.run("MetadataBytes").stdout.splitlines()]
    (target / "ledgers.json").write_text(lines({"bookkeeper": version, "ledgers": ledgers}) + "\n")
    for name, answer in answers.items():
        (target / name / "shell.json").write_text(lines({"bookkeeper": version, **answer}) + "\n")
    (target / "metadata.json").write_text(lines({"bookkeeper": version, "ledgerMetadata": metadata}) + "\n")
    (target / "zookeeper.json").write_text(lines({"bookkeeper": version, "nodes": nodes}) + "\n")
    shutil.rmtree(HERE / version, ignore_errors=True)
    shutil.copytree(target, HERE / version)
    shutil.rmtree(work)


if __name__ == "__main__":
    main(*sys.argv[1:])
