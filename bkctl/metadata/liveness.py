"""Which ledgers of a bookie's files are alive: asked of the metadata store, and never guessed.

Source: ListActiveLedgersCommand, ScanAndCompareGarbageCollector; BP-35 for scopes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from bkctl.errors import BkctlError, Conflict, LedgerNotFound, Unreachable
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME, SCOPED_DIRECTORY
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import LedgerManager
from bkctl.model import LedgerLiveness

#: States kept so that a ledger in many logs is asked for once.
_KNOWN_MAX: Final = 1_000_000


class Liveness:
    """Asks a metadata store whether ledgers exist. Not for several threads.

    `problems` are the errors for which some ledger's state is unknown, each message once.
    """

    def __init__(self, manager: LedgerManager) -> None:
        self._manager = manager
        self._known: dict[LedgerId, LedgerLiveness] = {}
        self._problems: dict[str, BkctlError] = {}
        self._unreachable = False

    @property
    def problems(self) -> list[BkctlError]:
        """Why some states are unknown, in the order in which it was found out."""
        return list(self._problems.values())

    def states(self, ledgers: Collection[LedgerId]) -> dict[LedgerId, LedgerLiveness]:
        """The state of each ledger. Alive is what has metadata that can be read, dead what the store says is not there.

        Unknown: metadata that is damaged or of an unknown version; a store that cannot be reached; an id that no ledger
        can have; and every scoped ledger while the `scopes` tree is absent or another cluster's.
        What is asked for must have been seen before the call: a ledger created later is not taken for dead.
        """
        missing = [ledger for ledger in ledgers if ledger not in self._known]
        if missing and not self._unreachable:
            if len(self._known) + len(missing) > _KNOWN_MAX:
                self._known = {ledger: self._known[ledger] for ledger in ledgers if ledger in self._known}
            try:
                self._ask(missing)
            except Unreachable as error:
                self._unreachable = True
                self._note(error)
        return {ledger: self._known.get(ledger, LedgerLiveness.UNKNOWN) for ledger in ledgers}

    def _ask(self, ledgers: list[LedgerId]) -> None:
        # A server that lags behind catches up first, else a young ledger would look dead.
        self._manager.store.children("cookies", limit=1)
        found: dict[LedgerId, LedgerLiveness] = {}
        default = [ledger for ledger in ledgers if not ledger.is_scoped]
        scoped = [ledger for ledger in ledgers if ledger.is_scoped]
        self._read(default, found)
        if scoped and self._scopes_are_ours():
            self._read(scoped, found)
            if not self._scopes_are_ours():
                found.update(dict.fromkeys(scoped, LedgerLiveness.UNKNOWN))
        self._known.update(found)

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
        whose = "there is no scopes tree" if state == "absent" else "the scopes tree is a formatted cluster's"
        self._note(
            Conflict(
                f"Scoped ledgers in {self._manager.store.name} cannot be told dead from alive: {whose}",
                hint="'bkctl metadata check' says more",
            )
        )
        return False

    def _note(self, problem: BkctlError) -> None:
        self._problems.setdefault(str(problem), problem)


def check_instance(cluster: Cluster, logs: Iterable[Path]) -> None:
    """Make sure that the bookie which wrote these logs belongs to `cluster`: in another one all its ledgers are dead.

    Compares the instance id in the cookies beside the logs; a directory without a cookie that can be read proves
    nothing. Raises Conflict.
    """
    directories = dict.fromkeys(
        path.parent.parent if path.parent.name == SCOPED_DIRECTORY else path.parent for path in logs
    )
    instance_id: str | None = None
    for directory in directories:
        path = directory / COOKIE_NAME
        try:
            cookie = Cookie.parse(path.read_bytes(), str(path))
        except (OSError, BkctlError):
            continue
        if instance_id is None:
            instance_id = cluster.instance_id()
        if cookie.instance_id and instance_id and cookie.instance_id != instance_id:
            raise Conflict(
                f"{path} belongs to the cluster {cookie.instance_id}, {cluster.store.name} is {instance_id}: "
                "every ledger would look dead",
                hint="connect to the bookie's own cluster",
            )
