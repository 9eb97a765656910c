"""Endpoints of a bookie's files: last marks, names, new directories."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from starlette.responses import Response

from bkctl.bookie.cookies import configured_directories, stamp_or_verify
from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import Conflict, NotFound
from bkctl.files.directories import BookieDirectories
from bkctl.files.journals import latest_marks
from bkctl.formats.names import CURRENT, SCOPED_DIRECTORY
from bkctl.http.endpoints import (
    PREFIX,
    STRING,
    TEXT,
    ApiCall,
    Endpoints,
    Value,
    json_answer,
    map_of,
    text_answer,
)

ENDPOINTS: Final = Endpoints(of_bookie=True)


@ENDPOINTS.get(
    f"{PREFIX}/bookie/last_log_mark", "The last mark of each journal: entries before it are in ledger storage.",
    answer=map_of(STRING), errors={404: "The bookie has no mark yet"},
)  # fmt: skip
async def last_log_mark(call: ApiCall) -> Response:
    """Return the marks; without one, journal 0 and position 0. Source: GetLastLogMarkService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    directories = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)

    def look() -> dict[int, tuple[int, int]]:
        try:
            marks = latest_marks(directories).marks
        except NotFound:
            marks = []
        found = {mark.journal_index: (mark.mark.journal_id, mark.mark.offset) for mark in marks}
        return {index: found.get(index, (0, 0)) for index in range(len(config.journal_directories))}

    found = await asyncio.to_thread(look)
    return json_answer(
        {
            f"LastLogMark: Journal Id - {journal_id}({journal_id:x}.txn)": f"Pos - {offset}"
            for journal_id, offset in found.values()
        }
    )


_FILE_TYPES: Final = {"journal": "txn", "entrylog": "log", "index": "idx"}


@ENDPOINTS.get(
    f"{PREFIX}/bookie/list_disk_file", "Names of journal, entry log and index files, oldest first, each with a tab.",
    values=(Value("file_type", "journal, entrylog or index; anything else: all."),), answer=map_of(STRING),
)  # fmt: skip
async def list_disk_file(call: ApiCall) -> Response:
    """List the files; a file of scoped ledgers has its path below `current`. Source: ListDiskFilesService."""
    config = await call.service.bookie.ask(lambda bookie: bookie.config)
    directories = {
        "journal": config.journal_directories,
        "entrylog": config.ledger_directories,
        "index": config.index_or_ledger_directories,
    }
    wanted = call.values.get("file_type", "")
    kinds = [wanted] if wanted in _FILE_TYPES else ["index", "journal", "entrylog"]

    def look() -> dict[str, str]:
        return {
            f"{kind} files": "".join(f"{name}\t" for name in _names(directories[kind], f".{_FILE_TYPES[kind]}"))
            for kind in kinds
        }

    return json_answer(await asyncio.to_thread(look))


def _names(directories: Iterable[str], ending: str) -> list[str]:
    found: list[tuple[int, str]] = []
    for directory in directories:
        for parent, _, names in os.walk(directory):
            for name in names:
                if name.endswith(ending):
                    path = Path(parent) / name
                    try:
                        changed = path.stat().st_mtime_ns
                    except FileNotFoundError:
                        continue
                    found.append((changed, _shown(Path(directory), path)))
    return [name for _, name in sorted(found)]


def _shown(directory: Path, path: Path) -> str:
    """Return the file's name; for scoped ledgers its path below `current`, since names repeat there."""
    below = path.relative_to(directory).parts
    levels = below[below.index(CURRENT) + 1 :] if CURRENT in below else below
    is_scoped = levels[0] == SCOPED_DIRECTORY or (path.suffix == ".idx" and len(levels) > 3)
    return "/".join(levels) if is_scoped else path.name


@ENDPOINTS.put(
    f"{PREFIX}/bookie/expand_storage", "Add new, empty directories of the configuration file to the cookie.",
    answer=TEXT, errors={409: "The directories do not fit the cookie"},
)  # fmt: skip
async def expand_storage(call: ApiCall) -> Response:
    """Read the file again and stamp the directories for the next start. Source: ExpandStorageService."""
    bookie = call.service.bookie
    config = await bookie.ask(lambda bookie: bookie.config)
    cluster = await call.service.cluster()

    def stamp() -> None:
        wanted = config
        if config.conf_path is not None:
            read = BookieConfig.load(config.conf_path)
            wanted = replace(
                config, journal_directories=read.journal_directories, ledger_directories=read.ledger_directories,
                index_directories=read.index_directories, allow_storage_expansion=read.allow_storage_expansion,
            )  # fmt: skip
        if wanted.ledger_storage == "db" and configured_directories(wanted) != configured_directories(config):
            raise Conflict(
                "DbLedgerStorage takes no other directories while its bookie writes ledgers",
                hint="stop the bookie, then run 'bkctl cookie expand'",
            )
        try:
            stamp_or_verify(wanted, bookie.bookie_id, cluster, Files())
        except OSError as error:
            raise Conflict(f"The directories cannot be used: {error}") from error

    await asyncio.to_thread(stamp)
    return text_answer("Success expand storage")
