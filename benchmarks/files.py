"""The commands that read a bookie's files, against Apache's shell and a bare `cat` on the same files.

The journals and entry logs are written here, byte for byte in the format of a bookie, so that their size is what is
asked for; the index is of an Apache bookie. See README.md for the command and what it printed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from measuring import BKCTL, SHELL, Run, measured

from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.entry_log import HEADER_SIZE, write_ledgers_map
from bkctl.formats.entry_log import write_header as log_header
from bkctl.formats.journal import ledger_key_record, write_padding
from bkctl.formats.journal import write_header as journal_header
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId

LEDGERS = 4
#: A bookie's group commit under load, roughly.
GROUP_SIZE_BYTES = 128 << 10


def measure(*commands: Sequence[str], runs: int) -> list[Run]:
    """Run each command `runs` times in turn, output thrown away; return the best times and the most memory of each."""
    rounds = [[measured(command) for command in commands] for _ in range(runs)]
    return [
        Run(min(run.seconds for run in done), min(run.cpu_s for run in done), max(run.rss_mib for run in done))
        for done in zip(*rounds, strict=True)
    ]


def sealed_entries(payload_size: Callable[[random.Random], int]) -> Iterator[tuple[LedgerId, bytes]]:
    """Yield entries (ledger, header and digest and payload) of a few ledgers, without end; the same in each run."""
    source = random.Random(1)
    noise = source.randbytes(1 << 20)
    managers = [DigestManager(LedgerId(0, 100 + index), DigestType.CRC32C) for index in range(LEDGERS)]
    entries, lengths = [0] * LEDGERS, [0] * LEDGERS
    while True:
        index, size = source.randrange(LEDGERS), payload_size(source)
        at = source.randrange(len(noise) - size)
        payload = noise[at : at + size]
        lengths[index] += size
        sealed = managers[index].seal(entries[index], entries[index] - 1, lengths[index], payload)
        entries[index] += 1
        yield managers[index].ledger, sealed + payload


def write_entry_log(
    path: Path, size_bytes: int, payload_size: Callable[[random.Random], int], *, closed: bool = True
) -> int:
    """Write an entry log of about `size_bytes`, `closed` with its ledgers map; the number of entries."""
    sizes: dict[LedgerId, int] = {}
    at, count = HEADER_SIZE, 0
    with path.open("wb", buffering=1 << 20) as file:
        file.write(log_header())
        for ledger, body in sealed_entries(payload_size):
            record = record_of(body)
            file.write(record)
            sizes[ledger] = sizes.get(ledger, 0) + len(record)
            at, count = at + len(record), count + 1
            if at >= size_bytes:
                break
        if closed:
            for record in write_ledgers_map(sizes):
                file.write(record)
            file.seek(0)
            file.write(log_header(1, at, len(sizes)))
    return count


def write_journal(path: Path, size_bytes: int, payload_size: Callable[[random.Random], int]) -> int:
    """Write a journal of about `size_bytes`, in groups with padding as a bookie does; the number of entries."""
    with path.open("wb", buffering=1 << 20) as file:
        at, group = file.write(journal_header(6)), 0
        keyed: set[LedgerId] = set()
        for count, (ledger, body) in enumerate(sealed_entries(payload_size), 1):
            records = [record_of(body)]
            if ledger not in keyed:
                keyed.add(ledger)
                records.insert(0, ledger_key_record(ledger, master_key(b"")))
            for record in records:
                at += file.write(record)
                group += len(record)
            if group >= GROUP_SIZE_BYTES or at >= size_bytes:
                at, group = at + file.write(write_padding(at)), 0
            if at >= size_bytes:
                return count
    raise AssertionError


def compare(
    bench: Any, sizes_mib: Sequence[int], full_speed: Callable[[], AbstractContextManager[None]]
) -> Iterator[str]:
    """Yield the lines of the table: what, ours, the peer, the ratios (above 1: bkctl needs less)."""
    from support import servers

    # As an installed package has it: a checkout that was edited would be compiled again in each run.
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(root / "bkctl"), str(root / "commands")], check=True)
    ledger_dir, journal_dir = bench.directory / "files-ledgers", bench.directory / "files-journal"
    for each in (ledger_dir, journal_dir):
        (each / "current").mkdir(parents=True)
    conf = servers.offline_conf(bench.directory / "files.conf", journal_dir, ledger_dir)
    with full_speed():
        shell = bench.java.command(SHELL, "-conf", conf)

    def lines(what: str, command: Sequence[str], peers: dict[str, Sequence[str]], runs: int) -> Iterator[str]:
        ours, *others = measure(command, *peers.values(), runs=runs)
        for name, peer in zip(peers, others, strict=True):
            yield (
                f"{what:<48} {_shown(ours)}  {_shown(peer)}  {peer.seconds / ours.seconds:>7.2f}x "
                f"{peer.cpu_s / max(ours.cpu_s, 1e-3):>7.2f}x  {name}"
            )

    def against(what: str, command: Sequence[str], java: Sequence[str] | None, path: Path, many: bool) -> Iterator[str]:
        peers: dict[str, Sequence[str]] = {"cat": ["cat", str(path)]}
        if java is not None:
            peers = {f"shell {java[0]}": [*shell, *java], **peers}
        yield from lines(what, [*BKCTL, *command], peers, 5 if many else 2)

    titles = f"{'wall':>9} {'cpu':>9} {'peak':>9}"
    yield f"{'':<48} {titles}  {titles}  {'wall':>8} {'cpu':>8}  peer"
    for index, mib in enumerate(sizes_mib):
        many = mib <= 256
        log = ledger_dir / "current" / f"{2 * index:x}.log"
        count = write_entry_log(log, mib << 20, lambda _: 1024)
        of = f"({mib} MiB, {count:,})"
        read = ["entrylog", "read", str(log), "-o", "ndjson"]
        yield from against(f"entrylog read -o ndjson {of}", read, ["readlog", str(log)], log, many)
        show = ["entrylog", "show", str(log), "-o", "ndjson"]
        yield from against(
            f"entrylog show, from the map {of}", show, ["readlogmetadata", str(log)] if many else None, log, many
        )
        structure = ["entrylog", "verify", str(log), "--no-digests"]
        yield from against(f"entrylog verify --no-digests {of}", structure, None, log, many)
        yield from against(f"entrylog verify {of}", ["entrylog", "verify", str(log)], None, log, many)
        log.unlink()
        journal = journal_dir / "current" / f"{index + 1:x}.txn"
        count = write_journal(journal, mib << 20, lambda _: 1024)
        of = f"({mib} MiB, {count:,})"
        read = ["journal", "read", str(journal), "-o", "ndjson"]
        yield from against(f"journal read -o ndjson {of}", read, ["readjournal", str(journal)], journal, many)
        journal.unlink()
        small = ledger_dir / "current" / f"{2 * index + 1:x}.log"
        count = write_entry_log(small, mib << 18, lambda source: source.randrange(20, 120), closed=False)
        of = f"({mib >> 2} MiB, {count:,})"
        show = ["entrylog", "show", str(small), "-o", "ndjson"]
        yield from against(
            f"entrylog show, by a scan {of}", show, ["readlogmetadata", str(small)] if many else None, small, many
        )
        small.unlink()
    with bench.apache(1) as cluster:
        entries = 64 << 10
        ledger = bench.java_rate(cluster.metadata_uri, "v3", "add", entries, 1024, 1, 1, 1)["ledgerId"]
        bookie = cluster.bookies[0]
        bookie.stop()
        with full_speed():
            shell = bench.java.command(SHELL, "-conf", bookie.conf)
        show = [*BKCTL, "bookie", "index", "show", ledger, "--conf", str(bookie.conf), "-o", "ndjson"]
        yield from lines(f"bookie index show ({entries:,})", show, {"shell ledger": [*shell, "ledger", ledger]}, 3)
    yield from library_rates(bench.directory)


def library_rates(directory: Path) -> Iterator[str]:
    """Yield the rates of the library's scans, a second of processor time: 64 MiB of 1 KiB entries, 2.4 M small ones."""
    from bkctl.checks.digests import DigestChecker
    from bkctl.files import scan
    from bkctl.files.entry_log import EntryLogReader

    def structure(reader: EntryLogReader) -> None:
        for _ in reader.batches():
            pass

    def digests(reader: EntryLogReader) -> None:
        checker = DigestChecker()
        for batch in reader.batches():
            checker.check_batch(batch)

    compiled = scan.compiled
    path = directory / "0.log"
    small: Callable[[random.Random], int] = lambda source: source.randrange(20, 120)  # noqa: E731
    for kind, mib, payload in (("1 KiB entries", 64, lambda _: 1024), ("small entries", 256, small)):
        count = write_entry_log(path, mib << 20, payload)
        with EntryLogReader.open(path) as reader:
            for what, scan_once in (
                ("structure", structure), ("bytes of each ledger", EntryLogReader.scan_ledgers), ("CRC32C", digests)
            ):  # fmt: skip
                for name, loop in (("compiled", compiled), ("plain", None)):
                    scan.compiled = loop  # type: ignore[assignment]
                    best = float("inf")
                    for _ in range(5):
                        start = time.process_time()
                        scan_once(reader)
                        best = min(best, time.process_time() - start)
                    yield (
                        f"{what}, {kind}, {name:<8}".ljust(48)
                        + f" {reader.size() / best / 1e9:>6.2f} GB/s {count / best / 1e6:>7.1f} M records/s"
                    )
    scan.compiled = compiled
    path.unlink()


def _shown(run: Run) -> str:
    return f"{run.seconds:>7.3f} s {run.cpu_s:>7.3f} s {run.rss_mib:>5.0f} MiB"
