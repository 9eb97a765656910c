from __future__ import annotations

import pytest

from bkctl.errors import UsageError
from bkctl.metadata.pulsar_topics import TopicFilter, topic_of


def test_topics_are_named_by_their_managed_ledger_and_back() -> None:
    topic, managed_ledger = "persistent://t/n/a b%ä", "t/n/persistent/a+b%25%C3%A4"
    assert TopicFilter.parse(topic).managed_ledger == managed_ledger
    assert topic_of(managed_ledger) == topic


def test_topics_of_old_clusters_have_four_parts() -> None:
    assert TopicFilter.parse("persistent://t/c/n/x").managed_ledger == "t/c/n/persistent/x"
    assert topic_of("t/c/n/persistent/x") == "persistent://t/c/n/x"
    assert TopicFilter.parse("t/n/x") == TopicFilter.parse("persistent://t/n/x")


@pytest.mark.parametrize("name", ["", "x", "t/n/x", "t/n/other/x"])
def test_other_managed_ledgers_are_of_no_topic(name: str) -> None:
    assert topic_of(name) is None


@pytest.mark.parametrize("text", ["", "x", "t/x", "non-persistent://t/n/x", "http://t/n/x"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a topic"):
        TopicFilter.parse(text)


def custom(**values: str) -> dict[str, bytes]:
    found = {f"pulsar/{name.replace('_', '-')}": text.encode() for name, text in values.items()}
    return {"application": b"pulsar"} | found


@pytest.mark.parametrize(
    ("metadata", "of_topic", "of_subscription"),
    [
        (custom(managed_ledger="t/n/persistent/x"), True, False),
        (custom(managed_ledger="t/n/persistent/x", cursor="my+sub"), True, True),
        (custom(managed_ledger="t/n/persistent/x", cursor="other"), True, False),
        (custom(managed_ledger="t/n/persistent/x-partition-12", cursor="my sub"), True, True),
        (custom(managed_ledger="t/n/persistent/x-partition-"), False, False),
        (custom(managed_ledger="t/n/persistent/xy"), False, False),
        (custom(compactedTopic="persistent://t/n/x"), True, False),
        ({"application": b"pulsar", "psr/managed-ledger": b"t/n/persistent/x"}, True, False),
        ({"application": b"pulsar", "managed-ledger": b"t/n/persistent/x", "cursor": b"my+sub"}, True, True),
        ({"pulsar/managed-ledger": b"t/n/persistent/x"}, False, False),
        ({}, False, False),
    ],
    ids=repr,
)
def test_ledgers_of_a_topic_and_of_a_subscription(
    metadata: dict[str, bytes], of_topic: bool, of_subscription: bool
) -> None:
    assert TopicFilter.parse("persistent://t/n/x").matches(metadata) is of_topic
    assert TopicFilter.parse("persistent://t/n/x", "my sub").matches(metadata) is of_subscription
