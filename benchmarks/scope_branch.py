"""Measure the cost of ledger scopes for an add in scope 0: with and without its looks at the scope.

    python benchmarks/scope_branch.py [--storage sorted|interleaved|db] [--at-once 64]

One thread adds entries of 1 KiB to ledgers of scope 0 and to scoped ones, without the wire and without waiting for a
disk; what is kept is written between the rounds. The variant without is the same source, with each `if` about
`ledger[0]` replaced by what it does in scope 0. Of the rounds the best counts: the machine only adds to it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run import ENTRY_SIZE_BYTES, STORAGES, servers

from bkctl.config import BookieConfig
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage

COUNT = 20_000
CUT = "scope 0, without the branches"


class WithoutScopes(ast.NodeTransformer):
    """Replaces what asks for the scope (`ledger[0]`, `handle.ledger[0]`) by its branch of scope 0."""

    def __init__(self) -> None:
        self.cut = 0

    @staticmethod
    def _asks(test: ast.expr) -> bool:
        return ast.unparse(test) in ("ledger[0]", "handle.ledger[0]", "ledger.is_scoped", "handle.ledger.is_scoped")

    def _visit(self, node: ast.If | ast.IfExp) -> Any:
        self.generic_visit(node)
        if not self._asks(node.test):
            return node
        self.cut += 1
        return node.orelse or None

    visit_If = visit_IfExp = _visit


def without_scopes(method: Callable[..., Any]) -> tuple[Callable[..., Any], int]:
    """The method compiled from its source without its branches about scopes, and how many those were."""
    cutter = WithoutScopes()
    tree = ast.fix_missing_locations(cutter.visit(ast.parse(textwrap.dedent(inspect.getsource(method)))))
    names: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(method), "exec"), method.__globals__, names)
    return names[method.__name__], cutter.cut


def seconds_of(storage: BookieStorage, ledger: LedgerId, at_once: int) -> float:
    """The time that COUNT adds to a new ledger take, so many at once; then everything is written."""
    by = DigestManager(ledger, DigestType.CRC32C)
    payload = random.randbytes(ENTRY_SIZE_BYTES)
    bodies = [by.seal(each, each - 1, ENTRY_SIZE_BYTES * (each + 1), payload) + payload for each in range(COUNT)]
    key = by.master_key
    storage.add(ledger, 0, key, bodies[0], None)
    if at_once == 1:
        add = storage.add
        start = time.thread_time()
        for entry_id in range(1, COUNT):
            add(ledger, entry_id, key, bodies[entry_id], None)
    else:
        add_records = storage.add_records
        runs = []
        for first in range(1, COUNT, at_once):
            records = list(map(record_of, bodies[first : first + at_once]))
            entry_ids = [*range(first, first + len(records))]
            runs.append((entry_ids, records, sum(map(len, records)), entry_ids[-1] - 1))
        start = time.thread_time()
        for entry_ids, records, size, last_add_confirmed in runs:
            add_records(ledger, key, entry_ids, records, size, last_add_confirmed, None)
    seconds = time.thread_time() - start
    for commits in storage.commits:
        batch = commits.take_batch()
        if batch is not None:
            commits.commit(batch)
            commits.settle(batch, None)
    storage.run_checkpoint()
    return seconds / (COUNT - 1)


def open_storage(directory: Path, storage_class: str) -> BookieStorage:
    """A storage of its own, with files and caches that hold all that is written."""
    sizes = {"logSizeLimit": 1 << 30, "journalMaxSizeMB": 2048, "skipListSizeLimit": 256 << 20}
    sizes["dbStorage_writeCacheMaxSizeMb"] = 256
    uri = "zk+null://127.0.0.1:1/ledgers"
    settings = servers.apache_settings(uri, 3181, directory, storage_class, sizes)
    storage = BookieStorage(BookieConfig.load(servers.write_conf(directory / "bk_server.conf", settings)))
    storage.open()
    return storage


def cut_out(storage: BookieStorage) -> None:
    """Have this storage add without its branches about scopes."""
    cut_all = 0
    for part, names in ((storage, ("add", "add_records")), (storage.ledgers, ("add",))):
        methods: dict[str, Any] = {}
        for name in names:
            methods[name], cut = without_scopes(getattr(type(part), name))
            cut_all += cut
        part.__class__ = type(f"{type(part).__name__}WithoutScopes", (type(part),), methods)
    print(f"{cut_all} branches about scopes are cut out of the adds")


def measure(shipped: BookieStorage, cut: BookieStorage, rounds: int, at_once: int) -> dict[str, float]:
    """Seconds an add of each variant."""
    variants = {CUT: (cut, 0), "scope 0": (shipped, 0), "another scope": (shipped, 7)}
    best = dict.fromkeys(variants, 1.0)
    for number in range(rounds):
        for name in random.sample(list(variants), len(variants)):
            storage, scope_id = variants[name]
            best[name] = min(best[name], seconds_of(storage, LedgerId(scope_id, 1 + number), at_once))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=STORAGES, default="sorted")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--at-once", type=int, default=64, help="entries of a run of adds, 1: they come alone (64)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bkctl-bench-") as directory:
        storages = [open_storage(Path(directory) / name, STORAGES[arguments.storage]) for name in ("shipped", "cut")]
        cut_out(storages[1])
        best = measure(*storages, arguments.rounds, arguments.at_once)
        for storage in storages:
            storage.close()
    for name, seconds in best.items():
        print(f"{name:<32} {seconds * 1e9:7.0f} ns an add  {seconds / best[CUT] - 1:+7.1%}")


if __name__ == "__main__":
    main()
