"""Liveness of the ledgers in a bookie's files, by the metadata store, and facts about them for checks and repairs.

Source: ListActiveLedgersCommand, ScanAndCompareGarbageCollector; BP-35 for scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from bkctl.errors import BkctlError, Conflict, LedgerNotFound, Unreachable
from bkctl.formats.entry import DigestType, master_key
from bkctl.formats.metadata import Cookie, LedgerState
from bkctl.formats.names import COOKIE_NAME, SCOPED_DIRECTORY
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import LedgerManager
from bkctl.metadata.pulsar_topics import with_topics
from bkctl.metadata.store import attempt
from bkctl.model import LedgerFacts, LedgerLiveness

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


class StoredDigests:
    """Digest types and passwords of ledgers in a cluster's metadata, one ledger at a time; for DigestChecker.

    Raises Conflict where the cookies beside `files` name another cluster, Unreachable where the store does not answer.
    A ledger without readable metadata has neither digest type nor password.
    """

    def __init__(self, cluster: Cluster, files: Iterable[Path]) -> None:
        check_instance(cluster, files)
        self._metadata = lru_cache(maxsize=1)(lambda ledger: attempt(cluster.ledgers.read, ledger))

    def digest_of(self, ledger: LedgerId) -> DigestType | None:
        """Return the ledger's digest type, None if unknown."""
        found = self._metadata(ledger)
        return None if isinstance(found, BkctlError) else found.metadata.digest_type

    def password_of(self, ledger: LedgerId) -> bytes | None:
        """Return the ledger's password, None if unknown."""
        found = self._metadata(ledger)
        return None if isinstance(found, BkctlError) else found.metadata.password


class StoredLedgers:
    """Facts about the ledgers that a bookie has in `directories` (each `current`), from its cluster; callable.

    Raises Conflict where the directories' cookies name another cluster, in which every ledger would look dead.
    """

    def __init__(self, cluster: Cluster, directories: Iterable[Path]) -> None:
        check_instance(cluster, [directory / "VERSION" for directory in directories])
        self._cluster = cluster
        self._liveness = Liveness(cluster.ledgers)

    @property
    def problems(self) -> list[BkctlError]:
        """Errors that left the liveness of ledgers unknown."""
        return self._liveness.problems

    def __call__(self, ledgers: Collection[LedgerId]) -> Mapping[LedgerId, LedgerFacts]:
        """Return the facts about each ledger. Raises Unreachable where the store does not answer."""
        found = {ledger: LedgerFacts(state) for ledger, state in self._liveness.states(ledgers).items()}
        for problem in self.problems:
            if isinstance(problem, Unreachable):
                raise problem
        alive = sorted(ledger for ledger, facts in found.items() if facts.liveness is LedgerLiveness.ALIVE)
        for ledger, answer in self._cluster.ledgers.read_many(alive):
            if isinstance(answer, BkctlError):
                found[ledger] = LedgerFacts(LedgerLiveness.UNKNOWN)
                continue
            metadata = answer.metadata
            key = None if metadata.password is None else master_key(metadata.password)
            found[ledger] = LedgerFacts(LedgerLiveness.ALIVE, key, metadata.state is not LedgerState.OPEN)
        return found
