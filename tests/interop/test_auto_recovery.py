"""Auto-recovery of ours beside Apache's on one cluster: each heals its scopes, and neither harms the other's work."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.own_bookies import OwnBookie
from support.own_cluster import start_all
from support.own_recovery import ApacheAutoRecovery, OwnAutoRecovery, start_auto_recovery

from bkctl.client.ledger import BookKeeper
from bkctl.client.verify import verify_entries
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.underreplication import AutoRecoveryState

PASSWORD = b"secret"
#: Runs of workers against each other; more on request.
RUNS = int(os.environ.get("BKCTL_TEST_RUNS", "2"))
LIMIT_S = 180.0
#: The limit of a wait; longer waits are hangs.
STUCK_S = 15.0


class Recovering:
    """One Apache bookie and four of ours, and what is written there."""

    def __init__(self, java: Any, uri: str, directory: Path) -> None:
        self.java = java
        self.uri = uri
        self.directory = directory
        self.apache = servers.ApacheBookie(java, uri, directory / "apache")
        self.own = [OwnBookie(uri, directory / f"own-{index}") for index in range(4)]
        start_all([self.apache, *self.own])
        self.cluster: Cluster = open_cluster(uri)
        self.state = AutoRecoveryState(self.cluster.store)
        self.written: dict[LedgerId, int] = {}

    def close(self) -> None:
        self.cluster.close()
        for each in (self.apache, *self.own):
            each.kill()

    def ensure_up(self) -> None:
        start_all([bookie for bookie in self.own if not bookie.running])
        names = {bookie.bookie_id for bookie in (self.apache, *self.own)}
        servers.wait_for(lambda: names == {each.bookie_id for each in self.cluster.bookies.list(False)}, "bookies")

    def write(self, shapes: Collection[tuple[int, int, int, int, bool]], *, count: int) -> set[LedgerId]:
        """Ledgers of (scope id, ensemble size, write quorum, ack quorum, closed) with `count` entries each."""

        async def write() -> set[LedgerId]:
            found = set()
            async with BookKeeper(self.cluster) as client:
                for scope_id, ensemble, write_quorum, ack_quorum, is_closed in shapes:
                    writer = await client.create_ledger_adv(
                        ledger_id=self.cluster.ledgers.new_ledger_id(scope_id).ledger_id, ledger_scope_id=scope_id,
                        ensemble_size=ensemble, write_quorum_size=write_quorum, ack_quorum_size=ack_quorum,
                        password=PASSWORD,
                    )  # fmt: skip
                    for entry_id in range(count):
                        await writer.ready()
                        writer.add(b"%d" % entry_id * 20)
                    await writer.flush()
                    if is_closed:
                        await writer.close()
                    found.add(writer.ledger)
            return found

        ledgers = asyncio.run(write())
        self.written.update(dict.fromkeys(ledgers, count))
        return ledgers

    def clear(self) -> None:
        """Delete what was written; whoever looks at the marks that are left takes them away."""
        for ledger in self.written:
            self.cluster.ledgers.remove(ledger)
        self.written.clear()

    def on(self, bookie: OwnBookie) -> set[LedgerId]:
        """The ledgers that name the bookie."""
        return {
            ledger
            for ledger in self.written
            if any(bookie.bookie_id in each.bookies for each in self.cluster.ledgers.read(ledger).metadata.ensembles)
        }

    def lost_at(self, bookie: OwnBookie) -> set[LedgerId]:
        """The ledgers whose only copies are there."""
        return {
            ledger for ledger in self.on(bookie) if self.cluster.ledgers.read(ledger).metadata.write_quorum_size == 1
        }

    def wait_until_healed(
        self,
        bookies: Collection[OwnBookie],
        *,
        apache: ApacheAutoRecovery | None = None,
        but: Collection[LedgerId] = (),
    ) -> None:
        """Wait until no ledger names these bookies and none is marked, except unrecoverable ones.

        Apache's worker may keep the lock of a ledger that it has replicated, and its mark, for as long as it lives:
        ZkLedgerUnderreplicationManager.releaseUnderreplicatedLedger, called by its timer, forgets the lock which the
        worker took a moment ago. Then it is started anew, as one would.
        """
        left: list[Any] = []
        since = time.monotonic()

        def healed() -> bool:
            nonlocal left, since
            marked = {ledger for ledger, _ in self.state.marks.list(None)} - set(but)
            named = set().union(*(self.on(bookie) for bookie in bookies)) - set(but)
            if not marked and not named:
                return True
            locks = {lock.ledger for lock in self.state.locks.list()}
            now = [sorted(marked), sorted(named), sorted(locks)]
            if now != left:
                left, since = now, time.monotonic()
            elif apache is not None and not named and marked <= locks and time.monotonic() - since > STUCK_S:
                print(f"Apache's worker kept the locks of {sorted(marked)}, which are replicated")
                apache.kill()
                apache.start()
                since = time.monotonic()
            return False

        try:
            servers.wait_for(healed, "replication", LIMIT_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}: marked, named, locked are {left}") from error

    def check(self, *, but: Collection[LedgerId] = (), gone: Collection[OwnBookie] = ()) -> None:
        """Every replica of every entry is there and intact, on as many bookies as there should be."""

        async def check() -> None:
            async with BookKeeper(self.cluster) as client:
                for ledger, count in self.written.items():
                    if ledger in but:
                        continue
                    metadata = self.cluster.ledgers.read(ledger).metadata
                    for fragment in metadata.ensembles:
                        assert len(set(fragment.bookies)) == metadata.ensemble_size, (ledger, metadata)
                        assert not {bookie.bookie_id for bookie in gone} & set(fragment.bookies)
                    # Open ledgers end where their writer left them.
                    handle = await client.open_ledger(
                        ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=PASSWORD, recovery=True
                    )
                    assert handle.last_add_confirmed == count - 1, ledger
                    checks = [each async for each in verify_entries(handle)]
                    assert len(checks) == count
                    assert [each for each in checks if not each.ok] == [], ledger

        asyncio.run(check())

    def java_reads(self, ledgers: Collection[LedgerId]) -> None:
        """Apache's client reads all of these ledgers of scope 0 to their end."""
        asked = [
            {"ledgerId": ledger.ledger_id, "digestType": "CRC32C", "password": base64.b64encode(PASSWORD).decode()}
            for ledger in sorted(ledgers)
            if not ledger.is_scoped
        ]
        answers = servers.read_ledgers(self.java, self.uri, "v3", asked, recover=True)
        assert [len(each["entries"]) for each in answers] == [
            self.written[LedgerId(0, each["ledgerId"])] for each in asked
        ]


@pytest.fixture(scope="module")
def recovering(java: Any, zookeeper: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recovering]:
    directory = tmp_path_factory.mktemp("recovering")
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    servers.format_cluster(java, uri, directory)
    made = Recovering(java, uri, directory)
    yield made
    made.close()


@pytest.fixture
def started() -> Iterator[Callable[..., None]]:
    """Starts auto-recoveries, and ends them with the test."""
    running: list[Any] = []

    def start(*auto_recoveries: Any) -> None:
        running.extend(auto_recoveries)
        start_auto_recovery(*auto_recoveries)

    yield start
    for each in running:
        each.kill()


SHAPES = [
    (scope_id, *sizes, is_closed)
    for scope_id in (0, 7)
    for sizes in ((2, 2, 2), (3, 2, 2), (3, 3, 2))
    for is_closed in (True, False)
]


def test_apaches_heals_scope_0_and_ours_the_scopes_and_with_apaches_off_ours_heals_all(
    recovering: Recovering, started: Callable[..., None], tmp_path: Path
) -> None:
    recovering.clear()
    recovering.ensure_up()
    apache = ApacheAutoRecovery(recovering.java, recovering.uri, tmp_path / "apache")
    scopes = OwnAutoRecovery(recovering.uri, tmp_path / "scopes", "--scopes-only")
    started(apache, scopes)
    state = recovering.state
    servers.wait_for(lambda: state.election.auditor() == apache.voter, "Apache's auditor")
    servers.wait_for(lambda: state.election.auditor(scoped=True) == scopes.voter, "the auditor of the scopes")
    recovering.write([*SHAPES, *SHAPES, (0, 1, 1, 1, True), (7, 1, 1, 1, True)], count=30)
    victim = max(recovering.own, key=lambda bookie: len(recovering.on(bookie)))
    beyond = recovering.lost_at(victim)
    victim.kill()
    recovering.wait_until_healed([victim], apache=apache, but=beyond)
    recovering.check(but=beyond, gone=[victim])
    apache.stop()
    scopes.stop()
    recovering.ensure_up()

    ours = OwnAutoRecovery(recovering.uri, tmp_path / "ours")
    started(ours)
    servers.wait_for(
        lambda: state.election.auditor() == state.election.auditor(scoped=True) == ours.voter, "our auditors"
    )
    servers.wait_for(lambda: not list(state.marks.list(None)), "what came back with the bookie needs no copies")
    recovering.write(SHAPES, count=30)
    other = max((each for each in recovering.own if each is not victim), key=lambda each: len(recovering.on(each)))
    beyond = recovering.lost_at(other)
    other.stop()
    recovering.wait_until_healed([other], but=beyond)
    recovering.check(but=beyond, gone=[other])
    recovering.java_reads(set(recovering.written) - beyond)


@pytest.mark.long
def test_apaches_and_ours_at_once_on_scope_0_never_harm_a_ledger(
    recovering: Recovering, started: Callable[..., None], tmp_path: Path
) -> None:
    """Bookies are lost, workers of both are at it, ours are killed in the middle, and auditors take turns."""
    recovering.clear()
    recovering.ensure_up()
    rng = random.Random(7)
    apache = ApacheAutoRecovery(recovering.java, recovering.uri, tmp_path / "apache")
    ours = [OwnAutoRecovery(recovering.uri, tmp_path / f"ours-{index}") for index in range(2)]
    started(*ours)
    started(apache)
    state = recovering.state
    for run in range(RUNS):
        recovering.ensure_up()
        servers.wait_for(state.election.auditor, "an auditor")
        shapes = [(0, *rng.choice([(2, 2, 2), (3, 2, 2), (3, 3, 2)]), rng.random() < 0.8) for _ in range(24)]
        recovering.write(shapes, count=20)
        victim = recovering.own[run % len(recovering.own)]
        (victim.kill if run % 3 == 2 else victim.stop)()
        if run % 2:
            servers.wait_for(
                lambda: any(state.locks.list()) or not state.marks.has_marks(0), "replication begins", LIMIT_S
            )
            ours[run // 2 % 2].kill()
        recovering.wait_until_healed([victim], apache=apache)
        recovering.check(gone=[victim])
        if run % 10 == 0:
            recovering.java_reads(set(recovering.written))
        if run % 2:
            ours[run // 2 % 2].start()
        print(
            f"run {run}: healed; ours replicated "
            f"{sum(each.log.read_text().count('is replicated') for each in ours)}, Apache's "
            f"{apache.log.read_text(errors='replace').count('Ledger replicated successfully')} so far"
        )
        recovering.clear()
