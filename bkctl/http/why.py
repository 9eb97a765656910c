"""Explanations of ledgers, bookies, creations and full disks: facts from what is seen to the cause, and ways out.

Each fact names its evidence: a node, an answer, a metric, a log. Each way is a command, and what it costs or loses; the
first one is the way that loses least.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Final, NamedTuple

from bkctl.bookie.cookies import version_file
from bkctl.bookie.local import ClusterBookie, active_cluster
from bkctl.client.disk_space import BookieSpace, member_space
from bkctl.client.ensemble import RoundRobinDistributionSchedule, usable_bookies
from bkctl.client.ledger import BookKeeper
from bkctl.client.ledger_survey import rack_findings, replica_counts, why_not_replicated
from bkctl.client.placement import DEFAULT_RACK, Placement, choose_ensemble
from bkctl.columns import counted, some_of
from bkctl.errors import BkctlError, NotEnoughBookies, NotFound, Unreachable
from bkctl.formats.metadata import LedgerState
from bkctl.http.bookie_client import BookieApi
from bkctl.http.bookie_load import BookieVitals, Samples, full_bookies, parse_metrics, vitals_findings, without_moved
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import read_only_finding
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.pulsar_topics import owner_text
from bkctl.metadata.store import attempt
from bkctl.metadata.underreplication import AutoRecoveryState, ReplicationFailures, UnderreplicatedLedger
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.holdings import is_covered

#: Ledgers that are read to say what a bookie holds.
LEDGERS_MAX: Final = 10_000
LOG_TAIL_BYTES: Final = 65_536
#: Words in the log of a bookie that refused to start, and what they mean.
_REFUSALS: Final = {
    "ookie": "the cookies of its directories and of the metadata store differ",
    "No space left": "its disk is full",
    "Address already in use": "another process has its port",
    "locked": "another process has its directories",
}
_GC_METRICS: Final = {
    "bytes in entry logs": "ACTIVE_ENTRY_LOG_SPACE_BYTES",
    "bytes reclaimed by compaction": "RECLAIMED_COMPACTION_SPACE_BYTES",
    "bytes reclaimed by deletion": "RECLAIMED_DELETION_SPACE_BYTES",
}
#: A line of a bookie's log that says something, unlike its list of settings.
_EVENT: Final = re.compile(r"\d{4}-|bkctl:")


class Fact(NamedTuple):
    """A fact, and where it is seen."""

    what: str
    evidence: str


class Way(NamedTuple):
    """A command, and what it does, costs or loses."""

    command: str
    effect: str


@dataclass
class Explanation:
    """The facts from what is seen to the cause, and the ways out, the least costly first."""

    subject: str
    verdict: str = ""
    facts: list[Fact] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)

    def fact(self, what: str, evidence: str) -> None:
        """Add a fact."""
        self.facts.append(Fact(what, evidence))

    def way(self, command: str, effect: str) -> None:
        """Add a way out, once."""
        if all(way.command != command for way in self.ways):
            self.ways.append(Way(command, effect))


@dataclass
class Inquiry:
    """Explains parts of one cluster. `vitals_of` asks bookies' HTTP servers, `api_of` returns one bookie's server."""

    bookkeeper: BookKeeper
    placement: Placement
    vitals_of: Callable[[list[RegisteredBookie]], Mapping[str, BookieVitals]]
    api_of: Callable[[RegisteredBookie], BookieApi]

    def __post_init__(self) -> None:
        self.cluster: Cluster = self.bookkeeper.cluster
        self.bookies = {bookie.bookie_id: bookie for bookie in self.cluster.bookies.list()}

    def _state(self, bookie_id: str) -> str:
        bookie = self.bookies.get(bookie_id)
        words = {"rw": "writable", "ro": "read-only", "down": "down: it has a cookie, but is not registered"}
        return "unknown: neither a cookie nor a registration" if bookie is None else words[bookie.state]

    async def ledger(self, ledger: LedgerId) -> Explanation:
        """Explain why a ledger cannot be read, opened, closed or replicated. Raise LedgerNotFound."""
        found = self.cluster.ledgers.read(ledger)
        metadata, why = found.metadata, Explanation(f"ledger {ledger}")
        node = self.cluster.ledgers.path(ledger)
        if topic := owner_text(found):
            why.fact(f"It belongs to {topic}", "metadata: its custom metadata")
        sizes = f"{metadata.ensemble_size}/{metadata.write_quorum_size}/{metadata.ack_quorum_size}"
        why.fact(f"It is {metadata.state.name}, with ensemble, write and ack quorum {sizes}", f"metadata: {node}")
        members = dict.fromkeys(bookie_id for fragment in metadata.ensembles for bookie_id in fragment.bookies)
        lost = [each for each in members if each not in self.bookies or self.bookies[each].state == "down"]
        for bookie_id in members:
            why.fact(f"Bookie {bookie_id} is {self._state(bookie_id)}", "metadata: registrations and cookies")
        check = await LedgerChecker(self.bookkeeper).check(ledger, found)
        lacking = set(lost)
        silent: dict[str, None] = {}
        for fragment in check.fragments:
            for fault in fragment.faults:
                bookie_id = fault.bookie_id
                lacking.add(bookie_id)
                if isinstance(fault.error, Unreachable) and bookie_id not in lost:
                    silent[bookie_id] = None
                if bookie_id not in lost:
                    why.fact(
                        f"Bookie {bookie_id} does not serve all of the entries {fragment.first_entry_id} to "
                        f"{fragment.last_entry_id}: {fault.error or fault.reason.name}",
                        "reads of some of its entries",
                    )
        left = list(replica_counts(metadata, lacking))
        none = [entry_id for entry_id, count in left if not count]
        if check.problem is not None:
            why.fact(str(check.problem), "answers of its bookies")
        state = AutoRecoveryState(self.cluster.store)
        mark = attempt(state.marks.get, ledger)
        failure = ReplicationFailures(self.cluster.store).get(ledger)
        if mark is not None and not isinstance(mark, BkctlError):
            why.fact(f"It is marked: {', '.join(mark.missing_replicas) or 'no bookie'}", "metadata: its mark")
            if failure is not None:
                why.fact(
                    f"Worker {failure.worker}, attempt {failure.attempts}: {failure.reason}", "its published failure"
                )
            elif reason := why_not_replicated(
                mark, found, self.bookies.values(), is_enabled=state.settings.is_enabled()
            ):
                why.fact(f"It is not replicated: {reason}", "metadata")
        for bookie_id in (*lost, *silent):
            why.way(
                f"bkctl why bookie {quote(bookie_id)}",
                "says how it comes back: its replicas are whole then, at no cost",
            )
        for bookie_id in sorted(lacking.difference(lost, silent)):
            if not mark:
                why.way(f"bkctl autorecovery mark {ledger} --missing {quote(bookie_id)}", "workers copy what it lacks")
            why.way(f"bkctl ledger verify {ledger}", "names the entries that are missing: reads every replica")
        if (lacking or mark) and not state.settings.is_enabled():
            why.way(
                "bkctl autorecovery enable", "workers replicate all marked ledgers: reads and writes on the bookies"
            )
        elif (lacking or mark) and attempt(state.election.auditor, scoped=ledger.is_scoped) is None:
            why.way("bkctl autorecovery run", "runs a worker here until it is stopped: no auditor is elected")
        last = metadata.last_fragment.bookies
        answers = is_covered(RoundRobinDistributionSchedule.of(metadata), last, set(last).difference(lost, silent))
        if metadata.state is not LedgerState.CLOSED and answers and not none:
            effect = "closes it: a writer is fenced; unacknowledged entries at its end may go"
            if metadata.state is LedgerState.IN_RECOVERY:
                why.ways.insert(0, Way(f"bkctl ledger recover {ledger} --yes", effect))
            elif lacking:
                why.way(f"bkctl ledger recover {ledger} --yes", effect)
        if none:
            if not silent:
                why.way(f"bkctl ledger delete {ledger}", "loses the whole ledger: only if its entries are not needed")
            why.verdict = f"No bookie that {'answers' if silent else 'is up'} has all entries from {none[0]} on"
        elif not left:
            why.verdict = "The ledger is empty: no entry can be missing"
        elif lacking:
            fewest = min(count for _, count in left)
            why.verdict = f"It can be read, and lacks replicas: {fewest} of {metadata.write_quorum_size} are left"
        elif metadata.state is LedgerState.IN_RECOVERY:
            why.verdict = "Its recovery did not end: readers cannot tell where it ends"
        else:
            why.verdict = "All its bookies are up, and have the entries that were read"
        return why

    async def bookie(self, bookie_id: str) -> Explanation:
        """Explain why a bookie does not start, hangs, is slow, read-only, or not chosen. Raise NotFound."""
        why, bookie, name = Explanation(f"bookie {bookie_id}"), self.bookies.get(bookie_id), quote(bookie_id)
        local = local_bookie(self, bookie_id)
        held, only = self._holdings(bookie_id)
        ledger_count = len(held)
        if bookie is None and not ledger_count and local is None:
            raise NotFound(f"No bookie {bookie_id}", hint="'bkctl bookies list' shows the bookies")
        why.verdict = f"It is {self._state(bookie_id)}"
        why.fact(why.verdict, "metadata: registrations and cookies")
        why.fact(
            f"Ledgers that name it: {ledger_count:,}; with entries on no other bookie that is up: {only:,}", "metadata"
        )
        stays = self._stay(why, bookie_id, held)
        cookie = attempt(self.cluster.cookies.read, bookie_id)
        file = "DIR/current/VERSION" if local is None else quote(str(version_file(str(local.directory / "journal"))))
        fault = str(cookie) if isinstance(cookie, BkctlError) else ""
        if cookie is None and (held or bookie is not None):
            fault = "It has no cookie"
        if fault:
            why.fact(fault, f"metadata: cookies/{bookie_id}")
            way = f"bkctl cookie create {name} {file}" if cookie is None else f"bkctl cookie update {name} {file} --yes"
            why.way(way, "restores it from the bookie's directories")
        refusal = "" if local is None or (bookie is not None and bookie.state != "down") else self._log(why, local)
        if bookie is None or bookie.state == "down":
            if local is not None and local.pid is not None and _is_stopped(local.pid):
                return self._stopped(why, local.pid)
            leave = Way(
                f"bkctl bookies decommission {name} --yes",
                "copies its ledgers from their other replicas, and deletes its cookie"
                f"{', once the reasons why ledgers stay are mended' if stays else ''}; "
                f"ledgers whose entries stay lost: {only:,}",
            )
            mended = "its cookie is restored" if fault else f"this is mended: {refusal}"
            effect = f"starts it once {mended}" if fault or refusal else "starts it"
            start = Way("bkctl local up", f"{effect}; nothing is lost, and its replicas are back")
            if local is None:
                effect += " on its host (Apache's: bin/bookkeeper bookie); nothing is lost, its replicas are back"
                start = Way("bkctl bookie start --conf CONF", effect)
            why.ways += [leave, start] if refusal and not (fault or only) else [start, leave]
            return why
        [space] = await member_space(self.bookkeeper, [bookie])
        self._answer(why, bookie, space, local)
        if space.error is None:
            self._of_vitals(why, bookie, space, local, ledger_count)
        return why

    def _answer(
        self, why: Explanation, bookie: RegisteredBookie, space: BookieSpace, local: ClusterBookie | None
    ) -> None:
        name = quote(bookie.bookie_id)
        address = "without an address" if bookie.address is None else "{}:{}".format(*bookie.address)
        if space.error is None:
            why.fact(f"It answers in {space.latency_ms} ms", address)
            return
        why.verdict = "It accepts connections, and does not answer" if space.hangs else "It cannot be reached"
        why.fact(f"{why.verdict}: {space.error.message}", address)
        if local is not None and local.pid is not None and _is_stopped(local.pid):
            self._stopped(why, local.pid)
        elif local is not None:
            why.way(f"bkctl local down --bookie {name}", "stops it; 'bkctl local up' starts it again")
        else:
            why.way(f"bkctl bookies ok-to-stop {name}", "says whether it may be restarted on its host now")

    def _stopped(self, why: Explanation, pid: int) -> Explanation:
        why.fact(f"Process {pid} is stopped by a signal (SIGSTOP)", f"/proc/{pid}/stat")
        why.way(f"kill -CONT {pid}", "it continues where it stopped: nothing is lost")
        return why

    def _of_vitals(
        self,
        why: Explanation,
        bookie: RegisteredBookie,
        space: BookieSpace,
        local: ClusterBookie | None,
        ledger_count: int,
    ) -> None:
        bookie_id, name, used = bookie.bookie_id, quote(bookie.bookie_id), space.used_percent
        if used is not None:
            why.fact(f"{used:g}% of its ledger disks are used", "its answer")
        vitals = without_moved(self.cluster, self.vitals_of(list(self.bookies.values())))
        threshold, *_ = _threshold(self, bookie)
        is_full = bookie_id in full_bookies(vitals) or (used is not None and used > threshold)
        is_slow = False
        for finding in vitals_findings(vitals, {bookie_id} if is_full else ()):
            if finding.subject == bookie_id:
                why.verdict = finding.message
                why.fact(finding.message, "its /metrics")
                if finding.code == "bookie-slow":
                    is_slow = True
                    if bookie.state == "rw":
                        effect = "new ledgers avoid it; its replicas stay; the others get its adds"
                        why.way(f"bkctl bookie readonly on --bookie {name}", effect)
                    if ledger_count:
                        why.way(f"bkctl bookies drain {name} --yes", "moves all its replicas, to replace its disk")
                    elif bookie.state == "ro" and local is not None:
                        stop = f"bkctl local down --bookie {name}"
                        leave = f"bkctl bookies decommission {name} --yes"
                        why.way(f"{stop} && {leave}", "it holds no ledger: it leaves; start one on another disk")
                    elif bookie.state == "ro":
                        effect = "it holds no ledger: stop it, and decommission it or replace its disk"
                        why.way(f"bkctl bookies ok-to-stop {name}", effect)
                elif finding.code == "ledgers-unreadable":
                    for ledger in vitals[bookie_id].unreadable:
                        command = f"bkctl autorecovery mark {ledger} --missing {name}"
                        why.way(
                            command, "workers verify every entry there, and copy the damaged ones from other bookies"
                        )
        if bookie_id not in vitals:
            why.fact("It has no HTTP server that answers: no metrics", "registration")
        if bookie.state == "ro" and not is_slow:
            finding = read_only_finding(bookie_id, used, 0 if is_full else threshold)
            why.verdict = finding.message
            why.way(finding.command, finding.advice)

    def _holdings(self, bookie_id: str) -> tuple[list[tuple[LedgerId, VersionedMetadata]], int]:
        """Return the ledgers that name the bookie, and how many have a write set on no other bookie that is up."""
        absent = {each.bookie_id for each in self.bookies.values() if each.state == "down"} | {bookie_id}
        held, only = [], 0
        ledgers = islice(self.cluster.ledgers.ledgers(None), LEDGERS_MAX)
        for ledger, found in self.cluster.ledgers.read_many(ledgers):
            if not isinstance(found, BkctlError):
                members = {each for fragment in found.metadata.ensembles for each in fragment.bookies}
                if bookie_id in members:
                    held.append((ledger, found))
                    unknown = members - self.bookies.keys()
                    only += any(not left for _, left in replica_counts(found.metadata, absent | unknown))
        return held, only

    def _stay(self, why: Explanation, bookie_id: str, held: list[tuple[LedgerId, VersionedMetadata]]) -> bool:
        """Add why ledgers stay on a bookie that leaves, by reason; nothing of a writable bookie. Return if any do."""
        bookie = self.bookies.get(bookie_id)
        if bookie is not None and bookie.state == "rw":
            return False
        state, failures = AutoRecoveryState(self.cluster.store), ReplicationFailures(self.cluster.store)
        is_enabled = state.settings.is_enabled()
        reasons: dict[str, list[LedgerId]] = {}
        for ledger, found in held:
            mark, failure = attempt(state.marks.get, ledger), failures.get(ledger)
            if mark is None or isinstance(mark, BkctlError):
                mark = UnderreplicatedLedger(ledger, (bookie_id,), None, 0)
            reason = why_not_replicated(mark, found, self.bookies.values(), is_enabled=is_enabled)
            if failure is not None:
                reason = f"worker {failure.worker} failed {counted(failure.attempts, 'time')}: {failure.reason}"
            elif reason is None and found.metadata.state is LedgerState.OPEN:
                reason = "it is open: it leaves once its writer closes it or changes its ensemble"
            if reason is not None:
                reasons.setdefault(reason, []).append(ledger)
        for reason, ledgers in sorted(reasons.items(), key=lambda each: -len(each[1])):
            text = f"Ledgers that stay on it: {len(ledgers):,} ({some_of(ledgers, 3)}): {reason}"
            why.fact(text, "metadata: marks and failures")
        return bool(reasons)

    def _log(self, why: Explanation, local: ClusterBookie) -> str:
        """Add the end of a local bookie's log; return why it refused to start, "" if it did not."""
        with suppress(OSError):
            lines = log_tail(local.log).splitlines()
            last = next((line for line in reversed(lines) if _EVENT.match(line)), "")
            why.fact(f"Its log ends: {last}", str(local.log))
            for words, meaning in _REFUSALS.items():
                if words in last and last.startswith("bkctl:"):
                    why.fact(f"It refuses to start: {meaning}", str(local.log))
                    return meaning
        if local.pid is None:
            why.fact("Its process does not run", str(local.pid_file))
        return ""

    def create(self, ensemble_size: int, write_quorum: int, *, scoped: bool) -> Explanation:
        """Explain whether a new ledger finds bookies, rack by rack."""
        why = Explanation(f"a ledger on {ensemble_size} bookies")
        usable = {each.bookie_id for each in self.bookies.values() if each.state == "rw"}
        if scoped:
            usable = {each for each in usable if self.bookies[each].ledger_scopes}
        racks = Counter(self.placement.rack(bookie_id) for bookie_id in usable)
        for rack, count in sorted(racks.items()):
            where = "" if rack == DEFAULT_RACK and len(racks) == 1 else f" in rack {rack}"
            why.fact(f"Writable bookies{where}: {count:,}", "metadata: registrations and racks")
        for bookie_id, bookie in sorted(self.bookies.items()):
            if bookie_id not in usable:
                state = "serves scope 0 only" if bookie.state == "rw" else f"is {self._state(bookie_id)}"
                why.fact(f"Bookie {bookie_id} is not chosen: it {state}", "metadata: registrations and cookies")
        try:
            usable_bookies(self.bookies.values(), ensemble_size, scoped=scoped)
            choose_ensemble(self.bookies.values(), ensemble_size, write_quorum, self.placement, scoped=scoped)
        except NotEnoughBookies as error:
            why.verdict = error.message
            why.fact(error.message, "placement, as a client does it")
            for bookie_id in sorted(self.bookies):
                if bookie_id not in usable:
                    why.way(f"bkctl why bookie {quote(bookie_id)}", "says how it becomes writable")
            if 0 < len(usable) < ensemble_size:
                why.way(
                    f"bkctl ledger write --ensemble-size {len(usable)}", "new ledgers are striped over fewer bookies"
                )
            why.way(
                "bkctl bookies racks list", "shows the racks; a bookie in another rack helps where racks are enforced"
            )
        else:
            why.verdict = f"A new ledger finds its {ensemble_size} bookies"
            for finding in rack_findings(list(self.bookies.values()), self.placement):
                if finding.code == "too-few-racks":
                    why.verdict += ", in too few racks"
                    why.fact(finding.message, "metadata: registrations and racks")
                    why.way("bkctl bookies racks list", f"shows the racks; {finding.advice}")
        return why

    async def space(self, bookie_id: str) -> Explanation:
        """Explain what holds the space on a bookie's disks, and why it is not freed. Raise NotFound."""
        bookie = self.bookies.get(bookie_id)
        if bookie is None or bookie.state == "down":
            raise NotFound(f"Bookie {bookie_id} is not registered", hint=f"'bkctl why bookie {bookie_id}' says why")
        why = Explanation(f"the space of bookie {bookie_id}")
        [space] = await member_space(self.bookkeeper, [bookie])
        if space.error is not None:
            raise space.error
        threshold, is_default, low_mark = _threshold(self, bookie)
        used = space.used_percent or 0.0
        why.verdict = f"{used:g}% of its ledger disks are used; it is read-only from {threshold:g}% on"
        if is_default:
            why.verdict += ", if it has the default limit: its own is not known"
        why.fact(why.verdict, "its answer and its settings")
        held, _ = self._holdings(bookie_id)
        why.fact(f"Ledgers that name it: {len(held):,}", "metadata")
        name = quote(bookie_id)
        gc = f"bkctl bookie gc --bookie {name}"
        try:
            api = self.api_of(bookie)
            collection = api.garbage_collection()
            samples = Samples(parse_metrics(api.metrics()))
            for text, metric in _GC_METRICS.items():
                # 0 until its first collection.
                if value := samples.total(f"bookie_gc_{metric}", f"bookie_{metric}"):
                    why.fact(f"{text}: {value:,.0f}", "its /metrics")
            if collection.suspended_by_disks:
                why.fact(f"Compaction does not run: {collection.suspended_by_disks}", "its garbage collector")
            elif collection.major_suspended or collection.minor_suspended:
                why.fact("Compaction is suspended by request", "its garbage collector")
                why.way(f"{gc} --resume", "compaction runs again: reads and writes on its disks")
            if collection.last_round_problem:
                why.fact(f"The last round failed: {collection.last_round_problem}", "its garbage collector")
            for each in collection.collectors:
                if each.scoped_deletes_held_back:
                    why.fact(f"Deletions are held back: {each.scoped_deletes_held_back}", "its garbage collector")
                    why.way(
                        f"{gc} --accept-scoped-deletes --yes", "removes scoped ledgers that appear deleted, for good"
                    )
        except BkctlError as error:
            why.fact(f"Its garbage collector is not known: {error}", "its HTTP server")
        why.way(
            f"{gc} --wait", "frees the logs of deleted ledgers; compaction needs some free space, and reads and writes"
        )
        if threshold < used < 98:
            limit = 97 if used < 95 else 99
            limits = f"--set diskUsageThreshold=0.{limit} --set diskUsageWarnThreshold=0.{limit - 1}"
            limits += "" if low_mark is None else f" --set diskUsageLwmThreshold=0.{limit - 1}"
            why.way(
                f"bkctl bookie config --bookie {name} {limits}",
                f"it is writable until {limit - used:.0f}% more are used, or it restarts; no space is freed",
            )
        why.way(f"bkctl ledger list --bookie {name} --sort -length --limit 20", "the largest ledgers: to delete some")
        why.way(f"bkctl bookies drain {name} --yes", "moves its replicas to other bookies, which need the space")
        return why


def _threshold(inquiry: Inquiry, bookie: RegisteredBookie) -> tuple[float, bool, object]:
    """Return the percentage from which the bookie is read-only, whether it is a default, and its low-water mark."""
    try:
        config = inquiry.api_of(bookie).config()
        return 100 * float(config.get("diskUsageThreshold", 0.95)), False, config.get("diskUsageLwmThreshold")
    except (BkctlError, TypeError, ValueError):
        return 95.0, True, None


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def log_tail(path: Path, size_bytes: int = LOG_TAIL_BYTES) -> str:
    """Return the last whole lines of a log. Raise OSError."""
    with open(path, "rb") as file:
        if (start := path.stat().st_size - size_bytes) > 0:
            file.seek(start)
            file.readline()  # Its beginning, which may name a secret, is cut off.
        return file.read().decode("utf-8", "replace")


def local_bookie(inquiry: Inquiry, bookie_id: str) -> ClusterBookie | None:
    """Return the bookie of the local cluster that is up, if that is the cluster of the inquiry."""
    local = active_cluster()
    if local is None or local.metadata_uri != inquiry.cluster.uri:
        return None
    return next((each for each in local.bookies() if each.bookie_id == bookie_id), None)
