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

from bkctl.disk import Files
from bkctl.errors import Conflict
from bkctl.files.conversion import DB, ConversionState
from bkctl.formats.names import CONVERSION_NAME
from bkctl.repair.conversion import DATABASE_NAMES, Conversion, IndexConverter
from bkctl.repair.convert_to_databases import DatabaseConverter
from bkctl.repair.convert_to_index_files import IndexFileConverter
from bkctl.repair.findings import Progress
from bkctl.repair.layout import BookieLayout
from bkctl.repair.regenerate import INDEX
from bkctl.repair.replacement import time_stamp


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
    run = _ConversionRun(layout, converter, files)
    run.refuse_conflicts()
    if not run.is_swapping:
        converter.check()
    if dry_run:
        if not run.is_swapping:
            for source in converter.read_old():  # This counts the ledgers and entries of the result.
                progress(sum(1 for _ in source.places))
        return converter.result
    if not run.is_swapping:
        run.start()
        run.build()
    run.swap()
    if discard_old:
        for row in converter.result.directories:
            for backup in row.backups:
                shutil.rmtree(backup)
            row.backups = []
    return converter.result


class _ConversionRun:
    """One call of `convert`: takes the conversion through the states of its progress file."""

    def __init__(self, layout: BookieLayout, converter: IndexConverter, files: Files) -> None:
        self._layout, self._converter, self._files = layout, converter, files
        self._path = layout.index_dirs[0] / CONVERSION_NAME
        self._state = ConversionState.read(self._path)
        self._fingerprint = _fingerprint(layout)
        converter.result.resumed = self._state is not None and self._state.fingerprint == self._fingerprint

    @property
    def is_swapping(self) -> bool:
        """Return True if the new index is complete and verified."""
        return self._state is not None and self._state.swapping

    def refuse_conflicts(self) -> None:
        """Raise Conflict if the progress file belongs to another conversion, or a bookie ran during the swap."""
        state, current = self._state, self._path.parent
        if state is None:
            return
        if state.to != self._converter.to:
            raise Conflict(
                f"A conversion to {state.to} is unfinished in {current}", hint=f"finish it with --to {state.to}"
            )
        if not state.swapping:
            return
        given = len(self._converter.result.directories)
        if len(state.counts) != given:
            raise Conflict(
                f"{self._path} names {len(state.counts)} index directories, but {given} are given",
                hint="give the directories with which the conversion started",
            )
        if state.fingerprint != self._fingerprint:
            raise Conflict(
                f"A bookie ran in {current} during the last step of a conversion: "
                f"part of its index is in index.backup-{state.stamp}",
                hint=f"move that part back by hand, then remove the file {CONVERSION_NAME}",
            )

    def start(self) -> None:
        """Start a conversion, unless one can be resumed: the files of the bookie must be unchanged since it began."""
        if self._state is None or self._state.fingerprint != self._fingerprint:
            self._state = ConversionState(self._converter.to, _free_stamp(self._layout), self._fingerprint)
            self._converter.clear()
            self._state.write(self._path, self._files)

    def build(self) -> None:
        """Build and verify the new index, then enter the state `swapping`."""
        assert self._state is not None
        state = self._converter.build(self._state, self._path)
        self._converter.verify()
        counts = tuple((row.ledgers, row.entries) for row in self._converter.result.directories)
        self._state = state._replace(swapping=True, counts=counts)
        self._state.write(self._path, self._files)

    def swap(self) -> None:
        """Swap the indexes and remove the progress file."""
        assert self._state is not None
        result = self._converter.result
        for row, (ledgers, entries) in zip(result.directories, self._state.counts, strict=True):
            row.ledgers, row.entries = ledgers, entries
        self._converter.swap(self._state.stamp)
        self._files.remove(self._path)
        self._files.sync_directory(self._path.parent)
        result.done = True


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
