"""Writes tests/data/pulsar-VERSION.json: a real broker's nodes and ledgers' metadata, for each compression.

Run it in the repository: `PYTHONPATH=tests python -m support.pulsar_golden`. It needs what `tests/interop` needs.
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any, Final

from support.own_cluster import OwnCluster
from support.servers import PULSAR_VERSION, REPOSITORY, Java, JavaOnPulsar, ZooKeeperServer, conversation

from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import AbsolutePath

GOLDEN: Final = REPOSITORY / "tests" / "data" / f"pulsar-{PULSAR_VERSION}.json"
COMPRESSIONS: Final = ("NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY")


def write_topics(ask: Any) -> dict[str, Any]:
    """Write topics with all that topics have, and return what the broker says of them once they are unloaded."""
    topics = [f"persistent://public/default/{name}" for name in ("a-b.ä", "delayed", "typed")]
    first, delayed, typed = topics
    for subscription in ("slow/one", "all"):  # Messages before a subscription may be deleted.
        ask("subscribe", first, subscription, 0)
    ask("produce", first, 35)
    ask("subscribe", first, "slow/one", 12)
    ask("subscribe", first, "all", 35)
    ask("compact", first)
    ask("produce", delayed, 1)
    ask("delay", delayed, "d", 40)
    ask("schema", typed)
    ask("subscribe", typed, "s", 1)
    for topic in topics:
        ask("unload", topic)
    return {topic: {"ledgers": ask("ledgers", topic), "backlog": ask("backlog", topic)} for topic in topics}


def nodes_below(cluster: Cluster, path: str) -> dict[str, str]:
    found = cluster.store.get(AbsolutePath(path))
    nodes = {} if found is None else {path: base64.b64encode(found.value).decode()}
    for name in cluster.store.children(AbsolutePath(path)) or ():
        nodes |= nodes_below(cluster, f"{path}/{name}")
    return nodes


def main() -> None:
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        zookeeper = ZooKeeperServer(Java(), Path(scratch) / "zookeeper")
        zookeeper.start()
        for compression in COMPRESSIONS:
            chroot = zookeeper.new_root()
            uri = zookeeper.metadata_uri(f"{chroot}/ledgers")
            with open_cluster(uri, create=True) as cluster:
                bookies = OwnCluster(uri, Path(scratch) / compression)
                bookies.ensure_up()
                main_class, store = "org.apache.pulsar.broker.PulsarBroker", f"zk:{zookeeper.connect_string}{chroot}"
                with conversation(JavaOnPulsar(), main_class, store, uri, compression, 1, errors_raise=True) as ask:
                    said = write_topics(ask)
                    # Topics that are unloaded have their positions in their nodes.
                    for topic in said:
                        ask("unload", topic)
                nodes = {
                    path.removeprefix(chroot): value
                    for top in ("managed-ledgers", "schemas")
                    for path, value in nodes_below(cluster, f"{chroot}/{top}").items()
                }
                ledgers = {
                    str(ledger): base64.b64encode(found.value).decode()
                    for ledger, found in cluster.ledgers.values(list(cluster.ledgers.ledgers(0)))
                    if found is not None
                }
                golden[compression] = {"nodes": nodes, "ledgers": ledgers, "topics": said}
                bookies.kill()
        zookeeper.kill()
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


def load(cluster: Cluster, golden: dict[str, Any]) -> None:
    """Write the nodes and ledgers of one compression to the store of `cluster`: Pulsar's below the root, in SQLite."""
    for path, value in golden["nodes"].items():
        cluster.store.put(path[1:], base64.b64decode(value), None)
    for ledger_id, value in golden["ledgers"].items():
        cluster.store.put(cluster.ledgers.path(LedgerId(0, int(ledger_id))), base64.b64decode(value), None)


if __name__ == "__main__":
    main()
