"""LedgerSurvey: the health findings of ledgers from their metadata alone, counted by code and scope in one pass.

Also the findings about placement: bookies without a rack, too few racks, and ledgers that the policy does not accept.

The auditor publishes its last survey in the metadata store, for clusters whose ledgers are too many for every look.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.client.placement import Placement, region_of
from bkctl.columns import counted
from bkctl.errors import BkctlError, LedgerNotFound
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import HealthFinding, advice_of, age_text, health_finding
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import MetadataStore
from bkctl.metadata.underreplication import AutoRecoveryState, UnderreplicatedLedger, base_path

#: Ledgers that a finding names.
EXAMPLES_MAX: Final = 5
#: Ages from which a ledger IN_RECOVERY counts as stuck.
STUCK_AFTER_S: Final = 600.0
_CODES: Final = {code.value: code for code in HealthCode}
#: A recovery that runs has so long to end before it counts as stuck: when it began is not known.
RECOVERY_S: Final = 2.0
#: Code → its message after "N ledgers".
_MESSAGES: Final = {
    HealthCode.LEDGERS_UNAVAILABLE: "{have} entries without a readable replica",
    HealthCode.LEDGERS_ONE_COPY: "{have} entries with one readable replica left",
    HealthCode.METADATA_UNREADABLE: "{have} metadata that cannot be read",
    HealthCode.LEDGERS_IN_RECOVERY: "{are} IN_RECOVERY, and no recovery ends",
    HealthCode.LEDGERS_DANGLING: "{name} bookies that nothing else knows",
    HealthCode.RACKS_VIOLATED: "{have} entries with all replicas in too few racks",
}


class Tally(NamedTuple):
    """The number of ledgers of a finding, and the first of them."""

    ledger_count: int
    examples: tuple[LedgerId, ...]

    def plus(self, ledger: LedgerId) -> Tally:
        return Tally(self.ledger_count + 1, (*self.examples, ledger)[:EXAMPLES_MAX])


def replica_counts(metadata: LedgerMetadata, absent: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield the first entry id of each write set that has or may get entries, and its bookies that are not `absent`."""
    schedule = RoundRobinDistributionSchedule.of(metadata)
    firsts = [fragment.first_entry_id for fragment in metadata.ensembles]
    ends = [*firsts[1:], metadata.last_entry_id + 1 if metadata.is_closed else firsts[-1] + schedule.ensemble_size]
    for fragment, end in zip(metadata.ensembles, ends, strict=True):
        first = fragment.first_entry_id
        for entry_id in range(first, min(end, first + schedule.ensemble_size)):
            yield entry_id, sum(fragment.bookies[index] not in absent for index in schedule.write_set(entry_id))


def fewest_replicas(metadata: LedgerMetadata, absent: Collection[str]) -> int:
    """Return the replicas of the least covered write set that are not on `absent` bookies."""
    return min((count for _, count in replica_counts(metadata, absent)), default=metadata.write_quorum_size)


class LedgerSurvey:
    """Counts ledgers by finding and scope; `at_ms` is the time of the survey."""

    def __init__(
        self,
        bookies: Iterable[RegisteredBookie],
        *,
        placement: Placement | None = None,
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        members = tuple(bookies)
        self._up = {bookie.bookie_id for bookie in members if bookie.state != "down"}
        self._known = {bookie.bookie_id for bookie in members}
        self._placement, self._stuck_after_ms = placement or Placement(), 1000 * stuck_after_s
        self.at_ms = time.time_ns() // 1_000_000
        self.tallies: dict[tuple[HealthCode, int], Tally] = {}
        #: Ledgers by bookie that nothing but ledgers knows.
        self.of_unknown: Counter[str] = Counter()
        self._in_recovery: list[LedgerId] = []

    def add(self, ledger: LedgerId, found: VersionedMetadata, mark: UnderreplicatedLedger | None = None) -> None:
        """Count a ledger; the bookies that its mark names lack some of its entries, whether up or not."""
        metadata = found.metadata
        members = {bookie_id for fragment in metadata.ensembles for bookie_id in fragment.bookies}
        if unknown := members - self._known:
            self.of_unknown.update(unknown)
            self.count(HealthCode.LEDGERS_DANGLING, ledger)
        absent = (members - self._up).union(() if mark is None else mark.missing_replicas)
        if absent:
            left = fewest_replicas(metadata, absent)
            if left == 0:
                self.count(HealthCode.LEDGERS_UNAVAILABLE, ledger)
            elif left == 1 < metadata.write_quorum_size:
                self.count(HealthCode.LEDGERS_ONE_COPY, ledger)
        if metadata.state is LedgerState.IN_RECOVERY and self.at_ms - (found.ctime_ms or 0) >= self._stuck_after_ms:
            self._in_recovery.append(ledger)
        if self._placement.racks and self._placement.ledger_problem(metadata) is not None:
            self.count(HealthCode.RACKS_VIOLATED, ledger)

    def count(self, code: HealthCode, ledger: LedgerId) -> None:
        """Add a ledger to the finding of its scope."""
        key = code, ledger.scope_id
        self.tallies[key] = self.tallies.get(key, Tally(0, ())).plus(ledger)

    def end(self, cluster: Cluster) -> None:
        """Count the ledgers that are still IN_RECOVERY: a recovery that runs has ended since, mostly."""
        if self._in_recovery:
            time.sleep(RECOVERY_S)
        for ledger, found in cluster.ledgers.read_many(self._in_recovery):
            if not isinstance(found, BkctlError) and found.metadata.state is LedgerState.IN_RECOVERY:
                self.count(HealthCode.LEDGERS_IN_RECOVERY, ledger)
        self._in_recovery.clear()

    def findings(self, *, audited: bool = False) -> Iterator[HealthFinding]:
        """Yield a finding for each code and scope; `audited`: they say how long ago the survey was."""
        age_s = max(0, time.time_ns() // 1_000_000 - self.at_ms) // 1000
        for (code, scope_id), (count, examples) in sorted(self.tallies.items()):
            one = count == 1
            verbs = {"have": "has", "are": "is", "name": "names"}
            text = _MESSAGES[code].format(**{many: verbs[many] if one else many for many in verbs})
            names = ", ".join(map(str, examples)) + (", …" if count > len(examples) else "")
            source = f" (by the audit {age_text(age_s)} ago)" if audited else ""
            details = {"ledgerScopeId": str(scope_id), "ledgerCount": count, "ledgers": [*map(str, examples)]}
            yield health_finding(
                code, f"scope {scope_id}", f"{count:,} ledger{'' if one else 's'} {text}{source}: {names}",
                details=details | ({"auditAgeSeconds": age_s} if audited else {}), ledger=str(examples[0]),
            )  # fmt: skip

    def publish(self, store: MetadataStore, *, scoped: bool) -> None:
        """Store the counts of scope 0, or of the other scopes, beside the auditor's clocks; Apache ignores the node."""
        tallies = [
            [code.value, str(scope_id), tally.ledger_count, [*map(str, tally.examples)]]
            for (code, scope_id), tally in sorted(self.tallies.items())
        ]
        value = json.dumps({"time": self.at_ms, "tallies": tallies})
        store.put(_survey_path(scoped), value.encode(), None)


def published_survey(store: MetadataStore, *, scoped: bool) -> LedgerSurvey | None:
    """Return the survey that the auditor of scope 0, or of the others, published last; None without a readable one."""
    found = store.get(_survey_path(scoped))
    survey = LedgerSurvey(())
    try:
        document = json.loads(found.value if found is not None else b"")
        survey.at_ms = int(document["time"])
        for code, scope_id, count, examples in document["tallies"]:
            ledgers = tuple(map(LedgerId.parse, examples))
            survey.tallies[_CODES[code], int(scope_id)] = Tally(int(count), (ledgers[0], *ledgers[1:]))
    except (ValueError, OverflowError, TypeError, KeyError, IndexError, RecursionError, BkctlError):
        return None
    return survey


def _survey_path(scoped: bool) -> str:
    return f"{base_path(scoped)}/bkctlSurvey"


def survey_ledgers(
    cluster: Cluster,
    survey: LedgerSurvey,
    ledgers: Iterable[LedgerId],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Add `ledgers`, ascending, with their marks; deleted ones are left out."""
    mark_of = AutoRecoveryState(cluster.store).marks.cursor()
    for ledger, found in cluster.ledgers.read_many(ledgers):
        progress(1)
        mark = mark_of(ledger)
        if isinstance(found, VersionedMetadata):
            survey.add(ledger, found, mark)
        elif not isinstance(found, LedgerNotFound):
            survey.count(HealthCode.METADATA_UNREADABLE, ledger)
    survey.end(cluster)


def why_not_replicated(
    mark: UnderreplicatedLedger,
    found: VersionedMetadata | BkctlError,
    bookies: Iterable[RegisteredBookie],
    *,
    is_enabled: bool,
) -> str | None:
    """Return what the metadata says against the replication of a marked ledger; None if nothing does."""
    if not is_enabled:
        return "auto-recovery is disabled"
    if isinstance(found, BkctlError):
        return found.message
    metadata, scoped = found.metadata, mark.ledger.is_scoped
    states = {bookie.bookie_id: bookie for bookie in bookies}
    members = {bookie_id for fragment in metadata.ensembles for bookie_id in fragment.bookies}
    absent = {*mark.missing_replicas} | {each for each in members if each not in states or states[each].state == "down"}
    for entry_id, left in replica_counts(metadata, absent):
        if not left:
            return f"no bookie that is up has all entries from {entry_id} on"
    usable = {each.bookie_id for each in states.values() if each.state == "rw" and (each.ledger_scopes or not scoped)}
    for fragment in metadata.ensembles:
        needed = len(absent.intersection(fragment.bookies) - usable)
        if needed > (there := len(usable.difference(fragment.bookies))):
            needs = counted(needed, "writable bookie is needed", "writable bookies are needed")
            return f"{needs} outside its ensemble in place of lost ones; found: {there:,}; start another bookie"
    return None


def rack_findings(bookies: Sequence[RegisteredBookie], placement: Placement) -> Iterator[HealthFinding]:
    """Yield the problems with the racks of the registered bookies; none where no bookie has a rack."""
    racks = placement.racks
    if not racks:
        return
    for bookie in bookies:
        if bookie.bookie_id not in racks and bookie.state != "down":
            yield health_finding(
                HealthCode.BOOKIE_WITHOUT_RACK, bookie.bookie_id,
                f"It has no rack, while other bookies do: clients place it in {placement.rules.default_location}",
                advice=f"'bkctl bookies racks set {bookie.bookie_id} --rack RACK'",
            )  # fmt: skip
    writable = [bookie.bookie_id for bookie in bookies if bookie.state == "rw"]
    domain, needed = placement.rules.domains
    count = len({rack if domain == "rack" else region_of(rack) for rack in map(placement.rack, writable)})
    if len(writable) > 1 and count < needed:
        yield health_finding(
            HealthCode.TOO_FEW_RACKS, "",
            f"The {len(writable):,} writable bookies are in {count:,} {domain}{'s' if count > 1 else ''}; "
            f"{needed:,} are needed",
            details={"rackCount": count, "neededRackCount": needed},
        )  # fmt: skip


def misplacement(placement: Placement, metadata: LedgerMetadata) -> str | None:
    """Return why the policy does not accept a ledger, and what to do; None if it does, or no bookie has a rack."""
    problem = placement.ledger_problem(metadata) if placement.racks else None
    hint = advice_of(HealthCode.RACKS_VIOLATED.why, "bkctl ledger locate")
    return None if problem is None else f"The placement policy does not accept it: {problem}. {hint}"
