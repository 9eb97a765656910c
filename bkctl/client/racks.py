"""The findings about racks: bookies without one, too few of them, and ledgers with replicas that share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from bkctl.client.placement import DEFAULT_RACK, DEFAULT_RULES, RackRules, write_sets_in_few_racks
from bkctl.errors import BkctlError
from bkctl.metadata.admin.health import HealthFinding, Severity
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, RegisteredBookie


def rack_findings(
    bookies: Sequence[RegisteredBookie], racks: Mapping[str, str], rules: RackRules = DEFAULT_RULES
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
    if len(writable) > 1 and count < rules.count_min:
        yield HealthFinding(
            HealthCode.TOO_FEW_RACKS, Severity.WARNING, "",
            f"The {len(writable):,} writable bookies are in {count:,} rack{'s' if count > 1 else ''}; "
            f"{rules.count_min:,} are needed",
            "start bookies in another rack: new ledgers do not survive the loss of one",
            {"rackCount": count, "neededRackCount": rules.count_min},
        )  # fmt: skip


def ledger_rack_findings(
    cluster: Cluster,
    racks: Mapping[str, str],
    rules: RackRules = DEFAULT_RULES,
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
        if any(write_sets_in_few_racks(metadata, fragment.bookies, racks, rules) for fragment in metadata.ensembles):
            counts[ledger.scope_id] = counts.get(ledger.scope_id, 0) + 1
            if counts[ledger.scope_id] <= 5:
                examples.setdefault(ledger.scope_id, []).append(str(ledger))
    for scope_id, count in sorted(counts.items()):
        names = ", ".join(examples[scope_id]) + (", …" if count > 5 else "")
        yield HealthFinding(
            HealthCode.LEDGERS_IN_FEW_RACKS, Severity.WARNING, f"scope {scope_id}",
            f"{count:,} ledger{'s have' if count > 1 else ' has'} entries with all replicas in too few racks: {names}",
            "'bkctl ledger locate' shows the bookies; auto-recovery moves replicas to other racks with "
            "repairedPlacementPolicyNotAdheringBookieEnabled=true",
            {"ledgerScopeId": str(scope_id), "ledgerCount": count},
        )  # fmt: skip
