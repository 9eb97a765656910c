"""The findings about racks: bookies without one, too few of them, and ledgers with replicas that share one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bkctl.client.placement import DEFAULT_RACK, DEFAULT_RULES, RackRules, write_sets_in_few_racks
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import HealthFinding, Severity
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import RegisteredBookie


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


class RackCensus:
    """Counts the ledgers that have entries in too few racks, by scope; none where no bookie has a rack."""

    def __init__(self, racks: Mapping[str, str], rules: RackRules = DEFAULT_RULES) -> None:
        self._racks, self._rules = racks, rules
        self._counts = Counter[int]()
        self._examples: dict[int, list[str]] = {}

    def count(self, ledger: LedgerId, metadata: LedgerMetadata) -> None:
        """Look at one more ledger; ledgers come in order."""
        if not self._racks or not any(
            write_sets_in_few_racks(metadata, fragment.bookies, self._racks, self._rules)
            for fragment in metadata.ensembles
        ):
            return
        self._counts[ledger.scope_id] += 1
        if self._counts[ledger.scope_id] <= 5:
            self._examples.setdefault(ledger.scope_id, []).append(str(ledger))

    def findings(self) -> Iterator[HealthFinding]:
        """Yield a finding for each scope that has such ledgers."""
        for scope_id, count in sorted(self._counts.items()):
            names = ", ".join(self._examples[scope_id]) + (", …" if count > 5 else "")
            yield HealthFinding(
                HealthCode.LEDGERS_IN_FEW_RACKS, Severity.WARNING, f"scope {scope_id}",
                f"{count:,} ledger{'s have' if count > 1 else ' has'} entries with all replicas in too few racks: "
                f"{names}",
                "'bkctl ledger locate' shows the bookies; auto-recovery moves replicas to other racks with "
                "repairedPlacementPolicyNotAdheringBookieEnabled=true",
                {"ledgerScopeId": str(scope_id), "ledgerCount": count},
            )  # fmt: skip
