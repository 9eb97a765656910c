"""Failed replications: what workers of ours tried on a marked ledger, why it failed, and when they try again.

One node a ledger, `bkctlFailures/urL…` beside the directories of marks and locks, as JSON. Apache's processes read only
the nodes that they know there, and remove the tree with the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, NamedTuple

from bkctl.ids import LedgerId
from bkctl.metadata.store import MetadataStore, delete_if_present
from bkctl.metadata.underreplication import base_path, ledgers_in, lock_path, mark_path

REASON_CHARACTERS_MAX: Final = 1000
_NAME: Final = "bkctlFailures"


class ReplicationFailure(NamedTuple):
    """The last failure of a ledger, the number of attempts, and the worker; times in ms since 1970."""

    ledger: LedgerId
    attempts: int
    reason: str
    worker: str
    at_ms: int
    retry_at_ms: int | None


class ReplicationFailures:
    """The published failures of one cluster. Methods raise Unreachable, as `MetadataStore`."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    def publish(self, failure: ReplicationFailure) -> None:
        """Store the failure in place of the ledger's former one."""
        document = {
            "attempts": failure.attempts,
            "reason": failure.reason[:REASON_CHARACTERS_MAX],
            "worker": failure.worker,
            "time": failure.at_ms,
            "retryAt": failure.retry_at_ms,
        }
        self._store.put(_path(failure.ledger), json.dumps(document).encode(), None)

    def remove(self, ledger: LedgerId) -> None:
        """Remove the failure of a ledger that is replicated, if there is one."""
        delete_if_present(self._store, _path(ledger))

    def list(self, scope_id: int | None = None) -> Iterator[ReplicationFailure]:
        """Yield the failures of a scope's marked ledgers (None: of all) by ledger id, without unreadable ones."""
        wanted = sorted(ledger for ledger, _ in ledgers_in(self._store, _NAME) if scope_id in (None, ledger.scope_id))
        values = self._store.get_many(map(_path, wanted))
        marks = self._store.get_many(map(mark_path, wanted))
        for ledger, found, mark in zip(wanted, values, marks, strict=True):
            failure = None if found is None or mark is None else _parse(ledger, found.value)
            if failure is not None:
                yield failure

    def prune(self) -> None:
        """Remove the failures of ledgers that are not marked any more: a worker of Apache's replicated them."""
        ledgers = [ledger for ledger, _ in ledgers_in(self._store, _NAME)]
        for ledger, mark in zip(ledgers, self._store.get_many(map(mark_path, ledgers)), strict=True):
            if mark is None:
                self.remove(ledger)

    def get(self, ledger: LedgerId) -> ReplicationFailure | None:
        """Return the ledger's failure, None without one."""
        found = self._store.get(_path(ledger))
        return None if found is None else _parse(ledger, found.value)


def _parse(ledger: LedgerId, value: bytes) -> ReplicationFailure | None:
    try:
        each = json.loads(value)
        retry_at_ms = None if each["retryAt"] is None else int(each["retryAt"])
        return ReplicationFailure(
            ledger, int(each["attempts"]), str(each["reason"]), str(each["worker"]), int(each["time"]), retry_at_ms
        )
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return None


def _path(ledger: LedgerId) -> str:
    return f"{base_path(ledger.is_scoped)}/{_NAME}/{lock_path(ledger).rpartition('/')[2]}"
