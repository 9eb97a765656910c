"""Conversion of a bookie's index from index files (Interleaved, Sorted) to the databases of DbLedgerStorage, or back.

Entry logs do not change. The new index is built beside the old one, verified entry by entry, and swapped in while the
old one still exists as a backup. A progress file lets a killed conversion resume. (Apache's commands delete the old
index ledger by ledger.) The steps:

    none --start--> building --build, verify--> swapping --swap--> done

`building` and `swapping` are states of the progress file; a bookie refuses to start while it says `swapping`.
Source: ConvertToDBStorageCommand, ConvertToInterleavedStorageCommand; BP-35.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from bkctl.disk import Files
from bkctl.errors import Conflict
from bkctl.files.conversion import DB, ConversionState
from bkctl.formats.names import CONVERSION_NAME
from bkctl.repair.conversion import DATABASE_NAMES, Conversion, IndexConverter
from bkctl.repair.convert_to_databases import DatabaseConverter
from bkctl.repair.convert_to_index_files import IndexFileConverter
from bkctl.repair.index_contents import Progress
from bkctl.repair.layout import BookieLayout, time_stamp
from bkctl.repair.regenerate import INDEX


def convert(
    layout: BookieLayout,
    to: str,
    *,
    discard_old: bool = False,
    dry_run: bool = False,
    files: Files | None = None,
    progress: Progress = lambda _: None,
) -> Conversion:
    """Convert a bookie's index to DB or INTERLEAVED. The caller holds the directories.

    A conversion killed at any point resumes at the next call. `progress` gets every entry twice (built, verified).
    Raises UsageError without an index to convert, Conflict if both indexes exist or a bookie ran in between,
    Unsupported if the other storage class cannot have these logs or ledgers, Corrupt for a damaged index, OSError.
    """
    files = files or Files()
    converter = (DatabaseConverter if to == DB else IndexFileConverter)(layout, files, progress)
    path, fingerprint = layout.index_dirs[0] / CONVERSION_NAME, _fingerprint(layout)
    state, result = ConversionState.read(path), converter.result
    result.resumed = state is not None and state.fingerprint == fingerprint
    if state is not None:
        _refuse_conflicts(state, path, to, len(result.directories), fingerprint)
    is_built = state is not None and state.swapping
    if not is_built:
        converter.check()
    if dry_run:
        for source in () if is_built else converter.read_old():  # counts the ledgers and entries of the result
            progress(sum(1 for _ in source.places))
        return result
    if state is None or not is_built:
        # Resume only if the files of the bookie are unchanged since the conversion began.
        if state is None or state.fingerprint != fingerprint:
            state = ConversionState(to, _free_stamp(layout), fingerprint)
            converter.clear()
            state.write(path, files)
        state = _build(converter, state, path, files)
    for row, (ledgers, entries) in zip(result.directories, state.counts, strict=True):
        row.ledgers, row.entries = ledgers, entries
    converter.swap(state.stamp)
    if discard_old:  # While the progress file is there, another call continues the removal.
        for row in result.directories:
            for backup in row.backups:
                shutil.rmtree(backup)
            row.backups = []
    files.remove(path)
    files.sync_directory(path.parent)
    result.done = True
    return result


def _build(converter: IndexConverter, state: ConversionState, path: Path, files: Files) -> ConversionState:
    """Build and verify the new index; return the state from which it is swapped, written to `path`."""
    state = converter.build(state, path)
    converter.verify()
    counts = tuple((row.ledgers, row.entries) for row in converter.result.directories)
    state = state._replace(swapping=True, counts=counts)
    state.write(path, files)
    return state


def _refuse_conflicts(state: ConversionState, path: Path, to: str, directory_count: int, fingerprint: str) -> None:
    """Raise Conflict if the progress file belongs to another conversion, or a bookie ran during the swap."""
    current = path.parent
    if state.to != to:
        raise Conflict(f"A conversion to {state.to} is unfinished in {current}", hint=f"finish it with --to {state.to}")
    if not state.swapping:
        return
    if len(state.counts) != directory_count:
        raise Conflict(
            f"{path} names {len(state.counts)} index directories, but {directory_count} are given",
            hint="give the directories with which the conversion started",
        )
    if state.fingerprint != fingerprint:
        raise Conflict(
            f"A bookie ran in {current} during the last step of a conversion: "
            f"part of its index is in index.backup-{state.stamp}",
            hint=f"move that part back by hand, then remove the file {CONVERSION_NAME}",
        )


def _free_stamp(layout: BookieLayout) -> str:
    """Return the time for the names of backups, with a number if a backup of this second exists."""
    moment = stamp = time_stamp()
    number = 1
    names = (*DATABASE_NAMES, INDEX)
    while any((current / f"{name}.backup-{stamp}").exists() for current in layout.index_dirs for name in names):
        number += 1
        stamp = f"{moment}-{number}"
    return stamp


def _fingerprint(layout: BookieLayout) -> str:
    """Return a hash that changes when a bookie runs: names, sizes and times of journals, logs and marks."""
    found = []
    for directory in (*layout.journal_dirs, *layout.ledger_dirs):
        for place in (directory, directory / "scoped"):
            if place.is_dir():
                for entry in os.scandir(place):
                    if entry.name.endswith((".txn", ".log")) or entry.name.startswith("lastMark"):
                        status = entry.stat()
                        found.append(f"{entry.path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
