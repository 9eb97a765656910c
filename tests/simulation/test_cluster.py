"""Clients and an ensemble of our bookies in one deterministic world, under crashes, torn writes, lost syncs, delays and
partitions. A failure prints its seed and what happened last; `BKCTL_TEST_SEEDS=7,8` runs those seeds.

What is promised is in `checker.py`; and that the checker finds what breaks it is proven by breaking it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from simulation.checker import Violation
from simulation.cluster import SETTINGS, Plan, simulate
from support.long_runs import seeds

from bkctl.client import ensemble, recovery, writer
from bkctl.errors import BkctlError
from bkctl.storage.bookie_storage import BookieStorage

SEEDS = seeds(3, 6)
HONEST = Plan(duration_s=10)
SHORT = Plan(duration_s=4)
#: Faults that come so close that hardly anything gets done between them.
STORMY = replace(HONEST, fault_interval_s=0.15, duration_s=12, down_max=4)
#: A disk may fail for good: then its bookie gives up, and starts again.
FAILING = replace(HONEST, faults=("bad-disk", "full", "slow-disk", "kill", "crash"), fault_interval_s=0.5)
#: Settings that bring mistakes out soon.
ROUGH = replace(
    HONEST,
    fault_interval_s=0.25,
    duration_s=8,
    down_max=4,
    faults=("crash", "crash", "torn", "kill", "cut", "writer", "recoverer"),
)
LYING = replace(HONEST, liars=1, lies=0.5, faults=(*HONEST.faults, "crash", "torn", "crash"))


@pytest.fixture
def world() -> Iterator[Path]:
    """A directory for a world, in memory where the system has such a place: its disks are simulated anyway."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="bkctl-world-", dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory, "world")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", [HONEST, STORMY, FAILING], ids=["honest", "stormy", "failing-disks"])
def test_nothing_acknowledged_is_lost_and_every_ledger_ends_once(world: Path, seed: int, plan: Plan) -> None:
    _, cluster = simulate(seed, plan, world)
    assert cluster.checker.acknowledged_count > 0
    assert cluster.checker.read_count > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_disk_that_lies_about_syncs_harms_only_ledgers_on_it(world: Path, seed: int) -> None:
    """Hold the promises to an operator whose disk loses synced bytes when the machine crashes:

    Ledgers without the bookie are whole; so is what all other bookies said they stored. Of ledgers with it nothing is
    ever read that was not written there, and every reader sees one end. But recovery takes the bookie's "no such entry"
    for the truth, as Apache's does: an open ledger may be closed below an acknowledged entry.
    """
    simulate(seed, LYING, world)


def test_same_seed_repeats_the_run(world: Path) -> None:
    """To the byte, in another process with other hashes too: or no failure could be looked into."""
    run, _ = simulate(SEEDS[0], SHORT, world)
    script = (
        "import sys; from pathlib import Path; from simulation.cluster import simulate; "
        "from simulation.test_cluster import SHORT; "
        "print('\\n'.join(simulate(int(sys.argv[1]), SHORT, Path(sys.argv[2]))[0].trace))"
    )
    again = subprocess.run(
        [sys.executable, "-c", script, str(SEEDS[0]), str(world.with_name("again"))],
        check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert again.stdout == "\n".join(run.trace) + "\n"


# --- whether the checker would notice ---------------------------------------------------------------------------------


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Bookies acknowledge what is not on disk."""
    with mock.patch.dict(SETTINGS, journal_sync_data=False):
        yield


@contextlib.contextmanager
def no_fence() -> Iterator[None]:
    """Bookies say that they fenced, and did not."""
    real = BookieStorage.fence

    def fence(self: BookieStorage, *arguments: Any) -> Any:
        handle = real(self, *arguments)
        handle.fenced = False
        return handle

    with mock.patch.object(BookieStorage, "fence", fence):
        yield


@contextlib.contextmanager
def fence_forgotten() -> Iterator[None]:
    """Bookies do not write down that a ledger is fenced."""
    real = BookieStorage.fence

    def fence(self: BookieStorage, ledger: Any, key: Any, done: Any) -> Any:
        handle = self._open_to_write(ledger, key)
        if not handle.fenced:
            handle.fence_recorded = True
        return real(self, ledger, key, done)

    with mock.patch.object(BookieStorage, "fence", fence):
        yield


@contextlib.contextmanager
def ack_quorum_one_less() -> Iterator[None]:
    """The writer takes an entry for acknowledged with one bookie too few."""
    real = writer.AddPipeline.__init__

    def init(self: Any, access: Any, **options: Any) -> None:
        real(self, access, **options)
        self._ack_quorum_size = max(1, self._ack_quorum_size - 1)

    with mock.patch.object(writer.AddPipeline, "__init__", init):
        yield


@contextlib.contextmanager
def first_missing_is_the_end() -> Iterator[None]:
    """Recovery takes the first bookie that lacks an entry for the end of the ledger."""
    missing = property(lambda self: 1)
    with mock.patch.object(ensemble.RoundRobinDistributionSchedule, "missing_count_for_recovery", missing):
        yield


@contextlib.contextmanager
def closed_at_lac() -> Iterator[None]:
    """Recovery closes at the last add confirmed that bookies report, without a look at what follows."""

    async def nothing(self: Any) -> None:
        return None

    with mock.patch.object(recovery._Tail, "next", nothing):
        yield


@contextlib.contextmanager
def wrong_length() -> Iterator[None]:
    """Recovery closes with a length that is not that of the entries."""
    real = recovery._make_safe

    async def make_safe(*arguments: Any) -> Any:
        pipeline, length = await real(*arguments)
        return pipeline, length + 1 if length else 0

    with mock.patch.object(recovery, "_make_safe", make_safe):
        yield


@contextlib.contextmanager
def recovery_ignored() -> Iterator[None]:
    """A writer changes the ensemble, and closes, whatever another client made of the ledger meanwhile."""
    real = writer.update_metadata

    def update(ledgers: Any, ledger: Any, current: Any, change: Any) -> Any:
        def stubborn(metadata: Any) -> Any:
            if not metadata.is_closed:
                metadata = metadata._replace(state=ensemble.LedgerState.OPEN)
            return change(metadata)

        return real(ledgers, ledger, current, stubborn)

    with mock.patch.object(writer, "update_metadata", update):
        yield


@contextlib.contextmanager
def marks_first() -> Iterator[None]:
    """Checkpoints move the last marks, and drop journals, before what those hold is in ledger storage."""
    real = BookieStorage.checkpoint

    def checkpoint(self: BookieStorage, each: Any) -> None:
        for number, mark in enumerate(each.marks):
            self._write_mark(number, mark)
        real(self, each)

    with mock.patch.object(BookieStorage, "checkpoint", checkpoint):
        yield


@contextlib.contextmanager
def no_second_look() -> Iterator[None]:
    """Garbage collection goes by a listing from before, and does not ask for a ledger again before it deletes it."""
    from bkctl.metadata.ledgers import LedgerManager
    from bkctl.metadata.liveness import Liveness
    from bkctl.model import LedgerLiveness

    real = LedgerManager.ranges
    earlier: dict[int, list[Any]] = {}

    def ranges(self: LedgerManager, *arguments: Any, **options: Any) -> Any:
        found = list(real(self, *arguments, **options))
        before, earlier[id(self)] = earlier.get(id(self), found), found
        return before

    def states(self: Any, ledgers: Any) -> Any:
        return dict.fromkeys(ledgers, LedgerLiveness.DEAD)

    with (
        mock.patch.object(LedgerManager, "ranges", ranges),
        mock.patch.object(Liveness, "states", states),
    ):
        yield


MUTANTS: list[Callable[[], contextlib.AbstractContextManager[None]]] = [
    no_sync, no_fence, fence_forgotten, ack_quorum_one_less, first_missing_is_the_end, closed_at_lac, wrong_length,
    recovery_ignored, marks_first, no_second_look,
]  # fmt: skip
#: These need more seeds than a run of all tests has time for.
SLOW = {first_missing_is_the_end, marks_first}


@pytest.mark.parametrize(
    "mutant", [each for each in MUTANTS if each not in SLOW or "BKCTL_TEST_SEEDS" in os.environ],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_checker_finds_every_mutant(world: Path, mutant: Callable[[], Any]) -> None:
    with mutant():
        for seed in range(1, 40):
            try:
                simulate(seed, ROUGH if seed % 2 else HONEST, world)
            except (Violation, BkctlError):  # a bookie that cannot start any more has noticed, too
                return
    pytest.fail("no seed found it")
