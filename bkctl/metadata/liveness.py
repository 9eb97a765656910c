"""Liveness of the ledgers in a bookie's files, by the metadata store, and unknown in any doubt.

Source: ListActiveLedgersCommand, ScanAndCompareGarbageCollector; BP-35 for scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from bkctl.errors import BkctlError, Conflict, LedgerNotFound, Unreachable
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME, SCOPED_DIRECTORY
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import LedgerManager
from bkctl.metadata.pulsar_topics import with_topics
from bkctl.model import LedgerLiveness

T = TypeVar("T")

#: Cached states: a ledger in many logs is looked up once.
_CACHE_SIZE_MAX: Final = 1_000_000


class Liveness:
    """Looks up in a metadata store whether ledgers exist. Not thread-safe."""

    def __init__(self, manager: LedgerManager) -> None:
        self._manager = manager
        self._states: dict[LedgerId, LedgerLiveness] = {}
        self._problems: dict[str, BkctlError] = {}
        self._unreachable = False

    @property
    def problems(self) -> list[BkctlError]:
        """Errors that left states unknown, in the order of their occurrence, each message once."""
        return list(self._problems.values())

    def states(self, ledgers: Collection[LedgerId]) -> dict[LedgerId, LedgerLiveness]:
        """Return the state of each ledger: alive with readable metadata, dead if the store has none.

        Unknown: damaged metadata, or of an unknown version; an unreachable store; an impossible id; and every scoped
        ledger while the `scopes` tree is absent or another cluster's.
        Callers must have seen the ledgers before the call: then a ledger created since is never reported as dead.
        """
        missing = [ledger for ledger in ledgers if ledger not in self._states]
        if missing and not self._unreachable:
            if len(self._states) + len(missing) > _CACHE_SIZE_MAX:
                self._states = {ledger: self._states[ledger] for ledger in ledgers if ledger in self._states}
            try:
                self._ask(missing)
            except Unreachable as error:
                self._unreachable = True
                self._note(error)
        return {ledger: self._states.get(ledger, LedgerLiveness.UNKNOWN) for ledger in ledgers}

    def with_topics(self, rows: Iterable[T], ledger_of: Callable[[T], LedgerId]) -> Iterator[tuple[T, str | None]]:
        """Yield each row with the topic of its ledger, None if the store is unreachable. See `pulsar_topics`."""
        if self._unreachable:
            yield from ((row, None) for row in rows)
        else:
            yield from with_topics(self._manager, rows, ledger_of)

    def _ask(self, ledgers: list[LedgerId]) -> None:
        # Listing makes a server that lags behind catch up first; else a young ledger would look dead.
        self._manager.store.children("cookies", limit=1)
        found: dict[LedgerId, LedgerLiveness] = {}
        default = [ledger for ledger in ledgers if not ledger.is_scoped]
        scoped = [ledger for ledger in ledgers if ledger.is_scoped]
        self._read(default, found)
        if scoped and self._scopes_are_ours():
            self._read(scoped, found)
            if not self._scopes_are_ours():
                found.update(dict.fromkeys(scoped, LedgerLiveness.UNKNOWN))
        self._states.update(found)

    def _read(self, ledgers: Iterable[LedgerId], found: dict[LedgerId, LedgerLiveness]) -> None:
        for ledger, answer in self._manager.read_many(ledgers):
            if isinstance(answer, LedgerNotFound):
                possible = ledger.is_scoped or ledger.ledger_id <= I64_MAX
                found[ledger] = LedgerLiveness.DEAD if possible else LedgerLiveness.UNKNOWN
            elif isinstance(answer, BkctlError):
                found[ledger] = LedgerLiveness.UNKNOWN
                self._note(answer)
            else:
                found[ledger] = LedgerLiveness.ALIVE

    def _scopes_are_ours(self) -> bool:
        state = self._manager.scopes_state()
        if state == "ours":
            return True
        reason = "the scopes tree is missing" if state == "absent" else "the scopes tree belongs to a formatted cluster"
        self._note(
            Conflict(
                f"Cannot tell which scoped ledgers in {self._manager.store.name} are alive: {reason}",
                hint="run 'bkctl metadata check'",
            )
        )
        return False

    def _note(self, problem: BkctlError) -> None:
        self._problems.setdefault(str(problem), problem)


def check_instance(cluster: Cluster, logs: Iterable[Path]) -> None:
    """Raise Conflict unless the bookie of these logs belongs to `cluster`: in another one its ledgers all look dead.

    Compares the instance id in the cookies beside the logs; a directory without a readable cookie proves nothing.
    """
    directories = dict.fromkeys(
        path.parent.parent if path.parent.name == SCOPED_DIRECTORY else path.parent for path in logs
    )
    for directory in directories:
        path = directory / COOKIE_NAME
        try:
            cookie = Cookie.parse(path.read_bytes(), str(path))
        except (OSError, BkctlError):
            continue
        check_cookie(cluster, str(path), cookie.instance_id)


def check_cookie(cluster: Cluster, where: str, instance_id: str | None) -> None:
    """Raise Conflict if the cookie at `where` names another cluster, by its `instance_id`, than `cluster`."""
    own_id = cluster.instance_id() if instance_id else None
    if own_id and instance_id != own_id:
        raise Conflict(
            f"{where} belongs to the cluster {instance_id}, {cluster.store.name} is {own_id}: "
            "every ledger would look dead",
            hint="connect to the bookie's own cluster",
        )
