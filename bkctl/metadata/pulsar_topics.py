"""Pulsar's topics and subscriptions, by the names that Pulsar gives their ledgers in custom metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import tee
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from bkctl.errors import BkctlError, UsageError

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.ledgers import LedgerManager, VersionedMetadata

T = TypeVar("T")

_DOMAINS: Final = ("persistent", "non-persistent")
_TOPIC: Final = re.compile(r"(?:(persistent)://)?([^/]+)/([^/]+)/(?:([^/]+)/)?(.+)", re.DOTALL)
_PARTITION: Final = re.compile(r"-partition-[0-9]+")
#: The prefixes of Pulsar's keys: 2.x releases before 2.3 wrote "psr/" or none.
PREFIXES: Final = ("pulsar/", "psr/", "")


def topic_of(managed_ledger: str) -> str | None:
    """Return the topic of a managed ledger (`t/n/persistent/x`: `persistent://t/n/x`), None for other names.

    Source: Pulsar's TopicName.fromPersistenceNamingEncoding.
    """
    parts = managed_ledger.split("/")
    if len(parts) not in (4, 5) or parts[-2] not in _DOMAINS:
        return None
    from urllib.parse import unquote_plus

    return f"{parts[-2]}://{'/'.join(parts[:-2])}/{unquote_plus(parts[-1])}"


class TopicFilter(NamedTuple):
    """Ledgers of a topic, with `subscription` only the ledgers of its cursor; partitions count."""

    topic: str
    managed_ledger: str
    subscription: str | None = None

    @staticmethod
    def parse(topic: str, subscription: str | None = None) -> TopicFilter:
        """Return the filter of `topic`: `persistent://TENANT/NAMESPACE/TOPIC`, the scheme may be missing.

        Raises UsageError. Source: Pulsar's TopicName.getPersistenceNamingEncoding.
        """
        match = _TOPIC.fullmatch(topic)
        if match is None or ("://" in topic and match[1] is None):
            raise UsageError(f"--topic {topic!r}: not a topic", hint="give it as persistent://TENANT/NAMESPACE/TOPIC")
        from urllib.parse import quote_plus

        _, tenant, namespace, more, name = match.groups()
        place = "/".join(filter(None, (tenant, namespace, more)))
        encoded = quote_plus(name, safe="*").replace("~", "%7E")  # As Java's URLEncoder.
        return TopicFilter(f"persistent://{place}/{name}", f"{place}/persistent/{encoded}", subscription)

    def matches(self, custom_metadata: Mapping[str, bytes]) -> bool:
        """Return True for a ledger of the topic: its messages, its cursors' positions, its compacted messages."""
        if custom_metadata.get("application") != b"pulsar":
            return False
        if self.subscription is not None:
            from urllib.parse import unquote_plus

            cursor = _text(custom_metadata, "cursor")
            if cursor is None or self.subscription not in (cursor, unquote_plus(cursor)):
                return False
        return _is_of(_text(custom_metadata, "managed-ledger"), self.managed_ledger) or _is_of(
            _text(custom_metadata, "compactedTopic"), self.topic
        )


def _text(custom_metadata: Mapping[str, bytes], name: str) -> str | None:
    """Return a value of Pulsar's by its name without a prefix, None without one."""
    values = (custom_metadata.get(prefix + name) for prefix in PREFIXES)
    return next((value.decode("utf-8", "replace") for value in values if value is not None), None)


def _is_of(name: str | None, wanted: str) -> bool:
    """Return True if `name` is `wanted` or one of its partitions."""
    if name is None or not name.startswith(wanted):
        return False
    return name == wanted or _PARTITION.fullmatch(name[len(wanted) :]) is not None


class Owner(NamedTuple):
    """The owner of a ledger, by its custom metadata: kind, the managed ledger or schema, and the part there.

    Kinds: managed-ledger, cursor, compacted-ledger, delayed-index-bucket, schema, or another of a later Pulsar, which
    has no name here. `part` is the cursor or the key of a bucket.
    """

    kind: str | None
    name: str | None
    part: str | None

    @property
    def topic(self) -> str | None:
        """The topic, as Pulsar's tools name it; TENANT/NAMESPACE/TOPIC for a schema."""
        return None if self.name is None else topic_of(self.name) or self.name

    @property
    def text(self) -> str | None:
        """The topic and what of it, in a few words."""
        if self.kind == "managed-ledger" or self.name is None:
            return self.topic
        from urllib.parse import unquote_plus

        part = f" {unquote_plus(self.part)}" if self.part else ""
        return f"{self.topic} ({self.kind}{part})"


def owner_of(custom_metadata: Mapping[str, bytes]) -> Owner | None:
    """Return what a ledger of Pulsar belongs to by its custom metadata, None for others' ledgers.

    Source: Pulsar's LedgerMetadataUtils.
    """
    if custom_metadata.get("application") != b"pulsar":
        return None
    text = partial(_text, custom_metadata)
    kind = custom_metadata.get("component", b"managed-ledger").decode("utf-8", "replace")
    if kind == "managed-ledger":
        cursor = text("cursor")
        return Owner("cursor" if cursor is not None else kind, text("managed-ledger"), cursor)
    if kind == "schema":
        return Owner(kind, text("schemaId"), None)
    if kind == "compacted-ledger":
        return Owner(kind, _managed_ledger(text("compactedTopic")), None)
    if kind == "delayed-index-bucket":
        return Owner(kind, _managed_ledger(text("delayedIndexTopic")), text("delayedIndexBucketKey"))
    return Owner(kind, None, None)


def _managed_ledger(topic: str | None) -> str | None:
    if topic is None or ("://" not in topic and topic_of(topic) is not None):
        return topic
    try:
        return TopicFilter.parse(topic).managed_ledger
    except UsageError:
        return topic


def with_topics(
    manager: LedgerManager, rows: Iterable[T], ledger_of: Callable[[T], LedgerId]
) -> Iterator[tuple[T, str | None]]:
    """Yield each row with the topic of its ledger and what of it, None for others' and for missing ledgers.

    Reads the metadata of the ledgers, a bounded number ahead.
    """
    rows, asked = tee(rows)
    for row, (_, found) in zip(rows, manager.read_many(map(ledger_of, asked)), strict=True):
        yield row, owner_text(found)


def owner_text(found: VersionedMetadata | BkctlError) -> str | None:
    """Return the topic of a ledger and what of it, None for others' and for missing ledgers."""
    owner = None if isinstance(found, BkctlError) else owner_of(found.metadata.custom_metadata)
    return None if owner is None else owner.text
