"""Pulsar's topics against ledgers, without bookies: the ends of cursors' ledgers are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pulsar_nodes import PulsarStore, compacted_of, messages_of

from bkctl.client.pulsar import End, Inventory, check_pulsar
from bkctl.formats.managed_ledger_pb2 import PositionInfo
from bkctl.metadata.cluster import open_cluster

TOPIC = "t/n/persistent/x"


@pytest.mark.parametrize("number", [-5, -1])
def test_a_position_with_an_impossible_compacted_ledger_is_damage(tmp_path: Path, number: int) -> None:
    position = PositionInfo(ledgerId=1, entryId=0)
    position.properties.add(name="CompactedTopicLedger", value=number)
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        pulsar = PulsarStore(cluster, ("b0:3181", "b1:3181"))
        pulsar.ledger(1, messages_of(TOPIC))
        pulsar.ledger(2, messages_of(TOPIC, "__compaction"))
        pulsar.ledger(3, compacted_of("persistent://t/n/x"))
        pulsar.ledger(4, messages_of("t/n/persistent/deleted"))
        pulsar.topic(TOPIC, 1)
        pulsar.cursor(TOPIC, "__compaction", 2)
        end = End(0, position.SerializeToString())
        with Inventory(cluster, ends=lambda ledger_ids: dict.fromkeys(ledger_ids, end)) as inventory:
            found = [(each.code, each.ledger_id) for each in check_pulsar(inventory, pause_s=0)]
            assert [each for each in found if each[0] != "topic-unavailable"] == [("orphan", 4)]
            topic = inventory.look_up(TOPIC)
            assert topic is not None
            assert f"impossible ledger {number}" in str(topic.cursors[0].error)
