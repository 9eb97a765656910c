from __future__ import annotations

import pytest
from support.servers import EtcdServer

from bkctl.formats.managed_ledger_pb2 import ManagedCursorInfo, ManagedLedgerInfo
from bkctl.metadata.backends.etcd.etcd_store import put_key
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.pulsar_nodes import PulsarNodes, TopicNode, schema_of


def test_topics_in_etcd_need_no_nodes_above_them(etcd: EtcdServer) -> None:
    root = etcd.new_root()
    info, cursor = ManagedLedgerInfo(), ManagedCursorInfo(cursorsLedgerId=-1, markDeleteLedgerId=1, markDeleteEntryId=2)
    info.ledgerInfo.add(ledgerId=1)
    with open_cluster(etcd.metadata_uri(f"{root}/ledgers"), create=True) as cluster:
        for name in ("a/n/persistent/x", "a/n/persistent/x-1", "a/n/persistent/y", "b/c/n/persistent/z"):
            for path, value in ((name, info), (f"{name}/sub", cursor)):
                key = f"{root}/managed-ledgers/{path}".encode()
                cluster.store._connection.transact((), [put_key(key, value.SerializeToString())])  # type: ignore[attr-defined]
        nodes = PulsarNodes(cluster.store, root)
        found = [each for each in nodes.topics() if isinstance(each, TopicNode)]
        assert [(each.topic, [cursor.name for cursor in each.cursors]) for each in found] == [
            ("persistent://a/n/x", ["sub"]),
            ("persistent://a/n/x-1", ["sub"]),
            ("persistent://a/n/y", ["sub"]),
            ("persistent://b/c/n/z", ["sub"]),
        ]
        assert list(PulsarNodes(cluster.store).names("b")) == ["b/c/n/persistent/z"]


@pytest.mark.parametrize("name", ["s" * 600, ".", "..", "a\x01"])
def test_a_cursor_is_read_or_an_error_whatever_its_name(etcd: EtcdServer, name: str) -> None:
    root = etcd.new_root()
    topic = f"t/n/persistent/{'x' * 600}"
    cursor = ManagedCursorInfo(cursorsLedgerId=7, markDeleteLedgerId=1, markDeleteEntryId=2)
    with open_cluster(etcd.metadata_uri(f"{root}/ledgers"), create=True) as cluster:
        for path, value in ((topic, b""), (f"{topic}/{name}", cursor.SerializeToString())):
            put = put_key(f"{root}/managed-ledgers/{path}".encode(), value)
            cluster.store._connection.transact((), [put])  # type: ignore[attr-defined]
        nodes = PulsarNodes(cluster.store, root)
        found = [each for each in nodes.topics() if isinstance(each, TopicNode)]
        assert [each.name for each in found] == [topic]
        assert [each.ledger_id for each in found[0].cursors] == [7] * (len(name) > 2)
        assert len(found[0].errors) == (len(name) <= 2)


def test_partitions_share_a_schema() -> None:
    assert schema_of("t/n/persistent/x-partition-12") == schema_of("t/n/persistent/x") == "t/n/x"
