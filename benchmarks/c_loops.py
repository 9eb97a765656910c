"""Measure what each loop in C gains: processor time with it, and with the Python that stands in for it.

    python benchmarks/c_loops.py [--entries 50000] [--mib 100] [--rounds 3] [PART …]

Entries of 1 KiB go from our client to our bookie (E = Wq = Aq = 1, sorted, in a SQLite cluster) and back, each in a
process of its own; commands read an entry log and a journal of `--mib`. The best of `--rounds` counts, taken in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from files import write_entry_log, write_journal
from measuring import measured

from bkctl.protocol.connection import run

SIZE_BYTES = 1024


# --- Python in place of a loop ---------------------------------------------------------------------------------------


def without_take_requests() -> None:
    from bkctl.protocol import server

    server.take_requests = lambda *_, **__: None


def without_answer_reads() -> None:
    from bkctl.protocol import runs, v2, v3
    from bkctl.protocol.messages import ReadResponse, Status

    def answers(self: runs.ReadRun, bodies: Sequence[Any], max_lac: int | None, *, is_v2: bool) -> bytes:
        out: list[Any] = []
        for number, (entry_id, body) in enumerate(zip(self.entry_ids, bodies, strict=True)):
            response = ReadResponse(Status.EOK, self.ledger, entry_id, body, max_lac)
            if is_v2:
                v2.encode_response(v2.READ_HEAD, response, out)
            else:
                v3.encode_response(v3.Header(self.txn_ids[number], v3.READ_ENTRY), response, self.ledger[0], out)
        return b"".join(out)

    runs.ReadRun.answers = answers  # type: ignore[method-assign]


def without_encode() -> None:
    from bkctl.protocol import connection

    connection.encode_run = lambda *_: None


def without_take_answers() -> None:
    from bkctl.protocol import connection

    connection.take_answers = lambda *_: None


def without_take_entries() -> None:
    from bkctl.files import scan

    scan.compiled = None  # type: ignore[assignment]


PROTOCOL_LOOPS = ("take_requests", "answer_reads", "encode", "take_answers")
FILE_LOOPS = ("take_entries",)


def leave_out(loop: str) -> None:
    if loop != "none":
        globals()[f"without_{loop}"]()


# --- processes -------------------------------------------------------------------------------------------------------


async def serve(directory: Path) -> None:
    """Run a bookie until stdin closes; answer each line there with the processor time so far."""
    from bkctl.bookie.bookie import Bookie
    from bkctl.config import BookieConfig
    from bkctl.metadata.cluster import open_cluster

    ledgers = (str(directory / f"ledgers-{time.time_ns()}"),)
    config = BookieConfig(
        journal_directories=(str(directory / f"journal-{time.time_ns()}"),), ledger_directories=ledgers,
        advertised_address="127.0.0.1", allow_loopback=True, bookie_port=0,
    )  # fmt: skip
    with open_cluster(_uri(directory), create=True) as cluster:
        bookie = Bookie(config, cluster=cluster)
        await bookie.start()
        print("up", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(time.process_time(), flush=True)
        await bookie.stop()


def _uri(directory: Path) -> str:
    return f"sqlite://{directory / 'metadata.db'}"


async def use(uri: str, protocol: str, action: str, count: int, ledger: str) -> None:
    """Add or read entries; print the processor time, and the ledger."""
    from bkctl import BookKeeper, Protocol

    async with BookKeeper(uri, protocol=Protocol(int(protocol[1:]))) as bookkeeper:
        payload = bytes(SIZE_BYTES)
        quorums: Any = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1}
        if action == "add":
            writer = await bookkeeper.create_ledger(**quorums)
            began_s = time.process_time()
            for _ in range(count // 1000):
                await writer.add_all([payload] * 1000)
            await writer.flush()
            spent_s = time.process_time() - began_s
            await writer.close()
            print(spent_s, writer.ledger_id)
            return
        reader = await bookkeeper.open_ledger(int(ledger))
        began_s = time.process_time()
        found = 0
        async for _ in reader.read():
            found += 1
        assert found == count
        print(time.process_time() - began_s, ledger)


def child(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def asked(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def protocol_case(directory: Path, loop: str, count: int) -> dict[str, float]:
    """Return the processor time an entry, in µs, of bookie and client, for adds and for reads."""
    found = {}
    for protocol in ("v2", "v3"):
        place = directory / f"{loop}-{time.time_ns()}"
        place.mkdir()
        bookie = child("serve", loop, place)
        assert bookie.stdout is not None
        assert bookie.stdout.readline() == "up\n"
        ledger = "-"
        for action in ("add", "read"):
            before_s = asked(bookie)
            spent_s, ledger = child("use", loop, _uri(place), protocol, action, count, ledger).communicate()[0].split()
            found[f"{protocol} {action}: bookie, µs an entry"] = (asked(bookie) - before_s) / count * 1e6
            found[f"{protocol} {action}: client, µs an entry"] = float(spent_s) / count * 1e6
        bookie.communicate()
        shutil.rmtree(place)
    return found


def command_case(loop: str, commands: dict[str, Sequence[str]]) -> dict[str, float]:
    """Return the processor seconds of commands."""
    return {
        what: measured([sys.executable, __file__, "command", loop, *words]).cpu_s for what, words in commands.items()
    }


def compare(loops: Sequence[str], rounds: int, measure: Callable[[str], dict[str, float]]) -> None:
    """Print a line a loop and case: with all loops, without that one, and the ratio."""
    least: dict[str, dict[str, float]] = {loop: {} for loop in ("none", *loops)}
    for _ in range(rounds):
        for loop, known in least.items():
            for what, value in measure(loop).items():
                known[what] = min(value, known.get(what, value))
    for loop in loops:
        for what, value in least[loop].items():
            full = least["none"][what]
            print(f"{loop:<16} {what:<48} {full:8.3f} {value:8.3f}  {value / full:5.2f}x", flush=True)


def compare_files(directory: Path, mib: int, rounds: int) -> None:
    """Compare commands over an entry log of 1 KiB entries, one of small entries, a journal, and Spark's records."""
    current = directory / "ledgers" / "current"
    journals = directory / "journal" / "current"
    for place in (current, journals):
        place.mkdir(parents=True)
    large, small, journal = current / "0.log", current / "1.log", journals / "1.txn"
    write_entry_log(large, mib << 20, lambda _: SIZE_BYTES, closed=False)
    write_entry_log(small, mib << 18, lambda source: source.randrange(20, 120), closed=False)
    write_journal(journal, mib << 20, lambda _: SIZE_BYTES)
    commands: dict[str, Sequence[str]] = {}
    for name, log in (("1 KiB", large), ("small", small)):
        commands[f"entrylog read -o ndjson, {name}, s"] = ("entrylog", "read", str(log), "-o", "ndjson")
        commands[f"entrylog show by a scan, {name}, s"] = ("entrylog", "show", str(log), "-o", "ndjson")
        commands[f"entrylog verify, {name}, s"] = ("entrylog", "verify", str(log))
    commands["entrylog list, s"] = ("entrylog", "list", str(current.parent), "-o", "ndjson")
    commands["journal read -o ndjson, 1 KiB, s"] = ("journal", "read", str(journal), "-o", "ndjson")
    commands["journal stats, 1 KiB, s"] = ("journal", "stats", str(journal), "-o", "ndjson")
    commands["records source of the pipeline, s"] = ("RECORDS", str(current.parent))
    compare(FILE_LOOPS, rounds, lambda loop: command_case(loop, commands))


def read_records(directory: Path) -> None:
    """Read the entry logs as Spark's source of records does."""
    from bkctl.files.entry_log import EntryLogReader
    from bkctl.spark.facts.extraction import _rows_of

    for path in sorted(directory.glob("current/*.log")):
        with EntryLogReader.open(path) as reader:
            for _ in _rows_of("records", reader, []):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["protocol", "files"], help="protocol, files")
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if "protocol" in options.parts:
            compare(PROTOCOL_LOOPS, options.rounds, lambda loop: protocol_case(Path(name), loop, options.entries))
        if "files" in options.parts:
            compare_files(Path(name), options.mib, options.rounds)


def run_child(role: str, loop: str, *words: str) -> None:
    leave_out(loop)
    if role == "serve":
        run(serve(Path(words[0])))
    elif role == "use":
        uri, protocol, action, count, ledger = words
        run(use(uri, protocol, action, int(count), ledger))
    elif words[0] == "RECORDS":
        read_records(Path(words[1]))
    else:
        from bkctl.commands.main import main as command

        sys.argv[1:] = words
        command()


if __name__ == "__main__":
    if sys.argv[1:2] in (["serve"], ["use"], ["command"]):
        run_child(*sys.argv[1:])
    else:
        main()
