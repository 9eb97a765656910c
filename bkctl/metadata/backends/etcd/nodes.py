"""Nodes on etcd: the key of each, creating one with its parents, and the history of its writes."""

from __future__ import annotations

import time
from typing import Any

from bkctl.errors import AlreadyExists, NotFound
from bkctl.metadata.backends.etcd.connection import EtcdConnection
from bkctl.metadata.backends.etcd.requests import first_key, get_key, is_absent, is_present, put_key
from bkctl.metadata.store import NO_CLUSTER_HINT, RACKS, full_path


class EtcdNodes:
    """The nodes below the key `root`; `name` names the store in errors."""

    def __init__(self, connection: EtcdConnection, root: str, name: str) -> None:
        self.root = root
        self._connection = connection
        self._name = name

    def key(self, path: str) -> bytes:
        """Return the key of the node at `path`."""
        return full_path(self.root, path).encode()

    def parent_keys(self, path: str) -> list[bytes]:
        """Return the keys of the node's parents, from the root down."""
        parts = path.split("/")[:-1] if path not in ("", RACKS) else []
        return [self.key("/".join(parts[:count])) for count in range(len(parts) + 1)] if path else []

    def read(self, key: bytes, **options: Any) -> Any:
        """Return the key with its value, None for a missing key."""
        answer, _ = self._connection.transact((), [get_key(key, **options)])
        return first_key(answer.responses[0])

    def create(self, path: str, value: bytes, lease_id: int = 0, *, repeated: bool = False) -> int:
        """Create the node, together with its missing parents; return its version. Raises AlreadyExists, LeaseLost.

        `repeated`: an earlier request of the caller may have created it.
        """
        key, parents = self.key(path), self.parent_keys(path)
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
                raise AlreadyExists(f"{path or self.root} exists in {self._name}")
            counts = [response.response_range.count for response in answer.responses[1:]]
            missing = [parent for parent, count in zip(parents, counts, strict=True) if not count]
            if missing and missing[0] == parents[0]:
                raise NotFound(f"No BookKeeper cluster in {self._name}", hint=NO_CLUSTER_HINT)
            if time.monotonic() > deadline:  # Other clients keep creating and removing the parents.
                raise self._connection.timed_out()

    def first_change_after(self, found: Any, revision: int) -> Any:
        """Return the key as its first change after `revision` left it, None where that change was a delete.

        `found` is the key as a later change left it. Raises RevisionCompacted when etcd no longer keeps a revision
        between the two.
        """
        before, after = revision, found
        upper = int(found.mod_revision)
        while upper - before > 1:
            middle = (before + upper) // 2
            there = self.read(found.key, revision=middle)
            if there is not None and there.mod_revision == revision:
                before = middle
            else:
                after = there
                upper = middle if there is None else int(there.mod_revision)
        return after
