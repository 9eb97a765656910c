"""Choose the storage class that a configuration names, and check that the index on disk belongs to it.

Source: LedgerStorageFactory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import UsageError
from bkctl.formats.names import CONVERSION_NAME, CURRENT
from bkctl.storage.ledger.ledger_storage import LedgerStorage


def open_ledger_storage(
    config: BookieConfig, files: Files, *, chance: random.Random | None = None
) -> LedgerStorage[Any]:
    """Return the storage, not yet open, that `ledgerStorageClass` names, in the directories of `config`.

    `chance` picks directories. Raises Unsupported for an unknown class.
    """
    if config.ledger_storage == "db":
        from bkctl.storage.ledger.db_ledger_storage import DbLedgerStorage

        return DbLedgerStorage(config, files)
    from bkctl.storage.ledger.sorted_ledger_storage import SortedLedgerStorage

    return SortedLedgerStorage(config, files, chance=chance)


def check_index(config: BookieConfig) -> None:
    """Refuse an index of another storage class than the configured one.

    With it a bookie would find no ledger, and garbage collection would delete every entry log. Raises UsageError;
    Conflict where a conversion stopped in its last step; Corrupt.
    """
    from bkctl.files.directories import BookieDirectories

    directories = [Path(directory) / CURRENT for directory in config.index_or_ledger_directories]
    if (directories[0] / CONVERSION_NAME).exists():
        from bkctl.files.conversion import check_conversion

        check_conversion(directories[0])
    found: Path | None = None
    if config.ledger_storage == "db":
        file = next(BookieDirectories(index_dirs=directories).indexes(), None)
        if file is not None and database_in_use(directories) is None:
            found = file.path
    else:
        found = database_in_use(directories)
    if found is not None:
        to = "db" if config.ledger_storage == "db" else "interleaved"
        raise UsageError(
            f"{found} belongs to another storage class than {config.ledger_storage_class.rpartition('.')[2]}",
            hint=f"set ledgerStorageClass to the earlier value, or convert the index: 'bkctl bookie convert --to {to}'",
        )


def database_in_use(directories: Iterable[Path]) -> Path | None:
    """Return the path of a database that has ledgers in one `current/` of an index, None for none. Raises Corrupt."""
    for path in (directory / name for directory in directories for name in ("ledgers", "scoped-ledgers")):
        if (path / "CURRENT").exists():
            from bkctl.files.rocksdb import LedgersDatabase

            with LedgersDatabase.open(path) as database:
                if next(database.ledger_ids(), None) is not None:
                    return path
    return None
