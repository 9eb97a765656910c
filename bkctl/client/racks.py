"""Placement over racks: the entries of a ledger whose replicas share a rack, and the findings about racks.

Source: RackawareEnsemblePlacementPolicyImpl.isEnsembleAdheringToPlacementPolicy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.errors import BkctlError
from bkctl.formats.metadata import LedgerMetadata
from bkctl.metadata.admin.health import HealthFinding, Severity
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, RegisteredBookie

#: The least number of racks of an entry's replicas. Source: ClientConfiguration.getMinNumRacksPerWriteQuorum.
RACK_COUNT_MIN: Final = 2
#: The rack of bookies without one. Source: NetworkTopology.DEFAULT_RACK.
DEFAULT_RACK: Final = "/default-rack"


def write_sets_in_few_racks(
    metadata: LedgerMetadata, bookies: Sequence[str], racks: Mapping[str, str], rack_count_min: int = RACK_COUNT_MIN
) -> list[tuple[int, ...]]:
    """Return the write sets of the ensemble `bookies` that have too few racks, as ensemble indexes.

    That is fewer than `rack_count_min` (minNumRacksPerWriteQuorum), or than the write quorum if that is smaller. A
    bookie that is not in `racks` is in DEFAULT_RACK.
    """
    schedule = RoundRobinDistributionSchedule.of(metadata)
    needed = min(rack_count_min, schedule.write_quorum_size)
    sets = map(schedule.write_set, range(schedule.ensemble_size))
    return [each for each in sets if len({racks.get(bookies[index], DEFAULT_RACK) for index in each}) < needed]


def rack_findings(
    bookies: Sequence[RegisteredBookie], racks: Mapping[str, str], rack_count_min: int = RACK_COUNT_MIN
) -> Iterator[HealthFinding]:
    """Yield the problems with the racks of the registered bookies; none where no bookie has a rack."""
    if not racks:
        return
    for bookie in bookies:
        if bookie.bookie_id not in racks and bookie.state != "down":
            yield HealthFinding(
                HealthCode.BOOKIE_WITHOUT_RACK, Severity.WARNING, bookie.bookie_id,
                f"It has no rack, while other bookies do: clients place it in {DEFAULT_RACK}",
                f"'bkctl bookies racks set {bookie.bookie_id} --rack RACK'",
            )  # fmt: skip
    writable = [bookie.bookie_id for bookie in bookies if bookie.state == "rw"]
    count = len({racks.get(bookie_id, DEFAULT_RACK) for bookie_id in writable})
    if len(writable) > 1 and count < rack_count_min:
        yield HealthFinding(
            HealthCode.TOO_FEW_RACKS, Severity.WARNING, "",
            f"The {len(writable):,} writable bookies are in {count:,} rack{'s' if count > 1 else ''}; "
            f"{rack_count_min:,} are needed",
            "start bookies in another rack: new ledgers do not survive the loss of one",
            {"rackCount": count, "neededRackCount": rack_count_min},
        )  # fmt: skip


def ledger_rack_findings(
    cluster: Cluster,
    racks: Mapping[str, str],
    rack_count_min: int = RACK_COUNT_MIN,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[HealthFinding]:
    """Yield a finding for each scope with ledgers that have entries in too few racks; reads all ledgers' metadata.

    None where no bookie has a rack. Ledgers with unreadable metadata are left out: 'metadata check' finds them.
    """
    if not racks:
        return
    counts: dict[int, int] = {}
    examples: dict[int, list[str]] = {}
    for ledger, found in cluster.ledgers.read_many(cluster.ledgers.ledgers(None)):
        progress(1)
        if isinstance(found, BkctlError):
            continue
        metadata = found.metadata
        if any(
            write_sets_in_few_racks(metadata, fragment.bookies, racks, rack_count_min)
            for fragment in metadata.ensembles
        ):
            counts[ledger.scope_id] = counts.get(ledger.scope_id, 0) + 1
            if counts[ledger.scope_id] <= 5:
                examples.setdefault(ledger.scope_id, []).append(str(ledger))
    for scope_id, count in sorted(counts.items()):
        names = ", ".join(examples[scope_id]) + (", …" if count > 5 else "")
        yield HealthFinding(
            HealthCode.LEDGERS_IN_FEW_RACKS, Severity.WARNING, f"scope {scope_id}",
            f"{count:,} ledger{'s have' if count > 1 else ' has'} entries with all replicas in too few racks: {names}",
            "'bkctl ledger locate' shows the bookies; the loss of a rack may lose these entries",
            {"ledgerScopeId": str(scope_id), "ledgerCount": count},
        )  # fmt: skip
