"""The findings about placement: bookies without a rack, too few racks, and ledgers that the policy does not accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from bkctl.client.placement import Placement, region_of
from bkctl.errors import BkctlError
from bkctl.formats.metadata import LedgerMetadata
from bkctl.metadata.admin.health import HealthFinding, Severity
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, RegisteredBookie

#: Advice about a ledger that is misplaced.
MEND_HINT: Final = (
    "'bkctl ledger locate' shows the bookies; auto-recovery moves replicas to other racks with "
    "repairedPlacementPolicyNotAdheringBookieEnabled=true"
)


def rack_findings(bookies: Sequence[RegisteredBookie], placement: Placement) -> Iterator[HealthFinding]:
    """Yield the problems with the racks of the registered bookies; none where no bookie has a rack."""
    racks = placement.racks
    if not racks:
        return
    for bookie in bookies:
        if bookie.bookie_id not in racks and bookie.state != "down":
            yield HealthFinding(
                HealthCode.BOOKIE_WITHOUT_RACK, Severity.WARNING, bookie.bookie_id,
                f"It has no rack, while other bookies do: clients place it in {placement.rules.default_location}",
                f"'bkctl bookies racks set {bookie.bookie_id} --rack RACK'",
            )  # fmt: skip
    writable = [bookie.bookie_id for bookie in bookies if bookie.state == "rw"]
    domain, needed = placement.rules.domains
    count = len({rack if domain == "rack" else region_of(rack) for rack in map(placement.rack, writable)})
    if len(writable) > 1 and count < needed:
        yield HealthFinding(
            HealthCode.TOO_FEW_RACKS, Severity.WARNING, "",
            f"The {len(writable):,} writable bookies are in {count:,} {domain}{'s' if count > 1 else ''}; "
            f"{needed:,} are needed",
            f"start bookies in another {domain}: new ledgers do not survive the loss of one",
            {"rackCount": count, "neededRackCount": needed},
        )  # fmt: skip


def misplacement(placement: Placement, metadata: LedgerMetadata) -> str | None:
    """Return why the policy does not accept a ledger, and what to do; None if it does, or no bookie has a rack."""
    problem = placement.ledger_problem(metadata) if placement.racks else None
    return None if problem is None else f"The placement policy does not accept it: {problem}. {MEND_HINT}"


def ledger_rack_findings(
    cluster: Cluster, placement: Placement, progress: Callable[[int], None] = lambda _: None
) -> Iterator[HealthFinding]:
    """Yield a finding for each scope with ledgers that the policy does not accept; reads all ledgers' metadata.

    None where no bookie has a rack. Ledgers with unreadable metadata are left out: 'metadata check' finds them.
    """
    if not placement.racks:
        return
    counts: dict[int, int] = {}
    examples: dict[int, list[str]] = {}
    for ledger, found in cluster.ledgers.read_many(cluster.ledgers.ledgers(None)):
        progress(1)
        if isinstance(found, BkctlError):
            continue
        if placement.ledger_problem(found.metadata) is not None:
            counts[ledger.scope_id] = counts.get(ledger.scope_id, 0) + 1
            if counts[ledger.scope_id] <= 5:
                examples.setdefault(ledger.scope_id, []).append(str(ledger))
    domain, _ = placement.rules.domains
    for scope_id, count in sorted(counts.items()):
        names = ", ".join(examples[scope_id]) + (", …" if count > 5 else "")
        yield HealthFinding(
            HealthCode.LEDGERS_IN_FEW_RACKS, Severity.WARNING, f"scope {scope_id}",
            f"{count:,} ledger{'s have' if count > 1 else ' has'} entries with all replicas in too few {domain}s: "
            f"{names}",
            MEND_HINT,
            {"ledgerScopeId": str(scope_id), "ledgerCount": count},
        )  # fmt: skip
