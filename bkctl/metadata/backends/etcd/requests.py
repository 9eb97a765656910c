"""Requests to etcd and their answers: operations, comparisons, pages of a listing, and nodes as keys."""

from __future__ import annotations

import time
from typing import Any, Final

from bkctl.errors import AlreadyExists, NotFound
from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.backends.etcd.etcd_connection import EtcdConnection
from bkctl.metadata.store import NO_CLUSTER_HINT, RACKS, MetadataStore, Versioned, full_path


def get_key(key: bytes, **options: Any) -> Any:
    """Return the operation that reads a key, or with `range_end` a range of keys."""
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key, **options))


def put_key(key: bytes, value: bytes, **options: Any) -> Any:
    """Return the operation that writes a key."""
    return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=value, **options))


def delete_key(key: bytes) -> Any:
    """Return the operation that deletes a key."""
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))


def is_absent(key: bytes) -> Any:
    """Return the comparison: the key does not exist."""
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.EQUAL, create_revision=0)


def is_present(key: bytes) -> Any:
    """Return the comparison: the key exists."""
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.GREATER, create_revision=0)


def has_no_children(key: bytes) -> Any:
    """Return the comparison: the node at `key` has no child."""
    return has_no_keys(key + b"/", key + b"0")


def has_no_keys(start: bytes, end: bytes) -> Any:
    """Return the comparison: no key is from `start` to before `end`. It takes etcd a time linear in such keys."""
    compare = is_absent(start)
    compare.range_end = end
    return compare


def at_revision(key: bytes, revision: int) -> Any:
    """Return the comparison: the last write of the key was at `revision`."""
    # The mod revision of a missing key is 0, so ask for -1 instead: no key has it.
    asked = revision if revision > 0 else -1
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.MOD, result=etcdrpc.Compare.EQUAL, mod_revision=asked)


def first_key(response: Any) -> Any:
    """Return the first key of a read operation's answer, None without one."""
    kvs = response.response_range.kvs
    return kvs[0] if kvs else None


def versioned(kv: Any) -> Versioned[bytes] | None:
    """Return the value of a key with its mod revision as version."""
    return None if kv is None else Versioned(kv.value, kv.mod_revision, None)


#: Bytes behind the parent's key that count as a number: the name of a ledger has 36.
_DIGITS: Final = 40
#: Pages that a range holds by the distances of the keys on the last one.
_PAGES: Final = 8
_FIRST_GROWTH_BITS: Final = 8


class PageRange:
    """The width of the next page of the keys below the node at `key`.

    etcd visits every key of a range to count it, also those behind the limit, so pages that reach to the end of a
    directory take it a time quadratic in the number of keys. A range is as wide as some pages were, and widens where
    there are fewer keys; `width` is a distance of keys as numbers, 0 without one: to the end.
    """

    def __init__(self, key: bytes, width: int = 0) -> None:
        self.key, self.width = key, width
        self.prefix, self.end = key + b"/", key + b"0"
        self._growth_bits = _FIRST_GROWTH_BITS

    def end_from(self, start: bytes) -> bytes:
        """Return the end of a range that begins at the key `start`."""
        number = self._number(start) + self.width
        if not self.width or number >> 8 * _DIGITS:
            return self.end
        return self.prefix + number.to_bytes(_DIGITS, "big")

    def was_full(self, first: bytes, last: bytes) -> None:
        """Note that a page held the keys from `first` to `last`, and that more follow in its range."""
        self.width = _PAGES * (self._number(last) - self._number(first)) or self.width
        self._growth_bits = _FIRST_GROWTH_BITS

    def was_short(self) -> None:
        """Note that a range held less than a page."""
        self.width <<= self._growth_bits
        self._growth_bits *= 2

    def _number(self, key: bytes) -> int:
        return int.from_bytes(key[len(self.prefix) :][:_DIGITS].ljust(_DIGITS, b"\0"), "big")


class EtcdNodes(MetadataStore):
    """The nodes of a store below the key `root`."""

    def __init__(self, connection: EtcdConnection, root: str) -> None:
        self.name = f"{root} of etcd at {connection.address}"
        #: The key of the cluster's root.
        self.root = root
        self._connection = connection

    def _key(self, path: str) -> bytes:
        """Return the key of the node at `path`."""
        return full_path(self.root, path).encode()

    def _parent_keys(self, path: str) -> list[bytes]:
        """Return the keys of the node's parents, from the root down."""
        parts = path.split("/")[:-1] if path not in ("", RACKS) else []
        return [self._key("/".join(parts[:count])) for count in range(len(parts) + 1)] if path else []

    def _read(self, key: bytes, **options: Any) -> Any:
        """Return the key with its value, None for a missing key."""
        answer, _ = self._connection.transact((), [get_key(key, **options)])
        return first_key(answer.responses[0])

    def _create(self, path: str, value: bytes, lease_id: int = 0, *, repeated: bool = False) -> int:
        """Create the node, together with its missing parents; return its version. Raises AlreadyExists, LeaseLost.

        `repeated`: an earlier request of the caller may have created it.
        """
        key, parents = self._key(path), self._parent_keys(path)
        deadline = time.monotonic() + self._connection.timeout_s
        missing: list[bytes] = []
        while True:
            present = [parent for parent in parents if parent not in missing]
            answer, sent_twice = self._connection.transact(
                [*map(is_absent, (key, *missing)), *map(is_present, present[-1:])],
                [*(put_key(parent, b"") for parent in missing), put_key(key, value, lease=lease_id)],
                [get_key(key), *(get_key(parent, count_only=True) for parent in parents)],
            )
            repeated = repeated or sent_twice
            if answer.succeeded:
                return int(answer.header.revision)
            found = first_key(answer.responses[0])
            if found is not None:
                if repeated and (found.value, found.lease, found.version) == (value, lease_id, 1):
                    return int(found.mod_revision)
                raise AlreadyExists(f"{path or self.root} exists in {self.name}")
            counts = [response.response_range.count for response in answer.responses[1:]]
            missing = [parent for parent, count in zip(parents, counts, strict=True) if not count]
            if missing and missing[0] == parents[0]:
                raise NotFound(f"No BookKeeper cluster in {self.name}", hint=NO_CLUSTER_HINT)
            if time.monotonic() > deadline:  # Other clients keep creating and removing the parents.
                raise self._connection.timed_out()

    def _first_change_after(self, found: Any, revision: int) -> Any:
        """Return the key as its first change after `revision` left it, None where that change was a delete.

        `found` is the key as a later change left it. Raises RevisionCompacted when etcd no longer keeps a revision
        between the two.
        """
        before, after = revision, found
        upper = int(found.mod_revision)
        while upper - before > 1:
            middle = (before + upper) // 2
            there = self._read(found.key, revision=middle)
            if there is not None and there.mod_revision == revision:
                before = middle
            else:
                after = there
                upper = middle if there is None else int(there.mod_revision)
        return after
