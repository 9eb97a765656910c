"""Replace a bookie id in the ensembles of every ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bkctl.errors import BkctlError, LedgerNotFound, MetadataVersionConflict
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.store import Versioned
from bkctl.pace import Pace


class Replacement(NamedTuple):
    """Result for one ledger that names the bookie. `problem` explains an unchanged ledger; None: it was changed."""

    ledger: LedgerId
    fragment_count: int
    problem: str | None


def replace_bookie(
    cluster: Cluster,
    old: str,
    new: str,
    *,
    pace: Pace | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Replacement]:
    """Replace the bookie id `old` by `new` in the metadata of every ledger of every scope, by compare-and-set.

    Yields each ledger that names `old`; a ledger whose ensemble has `new` already, or whose metadata cannot be read,
    stays unchanged. At most `limit` ledgers change, at that `pace`. Another run finishes an interrupted one. Raises
    Unreachable. Source: UpdateLedgerOp, SearchReplaceBookieIdCommand.
    """
    manager = cluster.ledgers
    changed = 0
    for count, (ledger, found) in enumerate(manager.read_many(manager.ledgers(None)), 1):
        progress(count)
        if isinstance(found, LedgerNotFound):
            continue
        if isinstance(found, BkctlError):
            yield Replacement(ledger, 0, str(found))
            continue
        if not any(old in fragment.bookies for fragment in found.metadata.ensembles):
            continue
        if limit is not None and changed >= limit:
            return
        planned = _replaced(ledger, found.metadata, old, new)[1]
        if dry_run or planned.problem is not None:
            changed += planned.problem is None
            yield planned
            continue
        if pace is not None:
            pace.take()
        outcome = _replace_in(cluster, ledger, old, new)
        changed += outcome.problem is None
        yield outcome


def _replace_in(cluster: Cluster, ledger: LedgerId, old: str, new: str) -> Replacement:
    manager = cluster.ledgers
    path = manager.path(ledger)
    while True:
        raw: Versioned[bytes] | None = cluster.store.get(path)
        if raw is None:
            return Replacement(ledger, 0, "It was deleted meanwhile")
        metadata = LedgerMetadata.parse(raw.value, f"ledger {ledger} at {path}")
        updated, outcome = _replaced(ledger, metadata, old, new)
        if outcome.problem is not None or outcome.fragment_count == 0:
            return outcome
        try:
            manager.write(ledger, updated, raw.version)
        except MetadataVersionConflict:
            continue
        except LedgerNotFound:
            return Replacement(ledger, 0, "It was deleted meanwhile")
        return outcome


def _replaced(ledger: LedgerId, metadata: LedgerMetadata, old: str, new: str) -> tuple[LedgerMetadata, Replacement]:
    ensembles = []
    count = 0
    for fragment in metadata.ensembles:
        if old not in fragment.bookies:
            ensembles.append(fragment)
            continue
        if new in fragment.bookies:
            problem = f"The ensemble of entry {fragment.first_entry_id} has {new} already"
            return metadata, Replacement(ledger, 0, problem)
        count += 1
        bookies = tuple(new if bookie_id == old else bookie_id for bookie_id in fragment.bookies)
        ensembles.append(fragment._replace(bookies=bookies))
    return metadata._replace(ensembles=tuple(ensembles), c_token=0 if metadata.format_version > 2 else None), (
        Replacement(ledger, count, None)
    )
