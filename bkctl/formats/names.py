"""The names of the files and directories of a bookie, below each configured directory.

Source: BookKeeperConstants, LedgerDirsManager, DefaultEntryLogger, SingleDirectoryDbLedgerStorage; BP-35 for `scoped`.
"""

from __future__ import annotations

from typing import Final

#: Holds the files of a bookie below each configured directory.
CURRENT: Final = "current"
#: Holds the entry logs and journals of scopes other than 0, below `current`.
SCOPED_DIRECTORY: Final = "scoped"
#: The cookie.
COOKIE_NAME: Final = "VERSION"
#: The mode of the bookie, writable or read-only, across restarts.
STATUS_NAME: Final = "BOOKIE_STATUS"
#: Marks a bookie that did not stop cleanly.
DIRTY_NAME: Final = "DIRTY"
#: The newest entry log id of a directory.
LAST_ID_NAME: Final = "lastId"
#: The progress of a conversion of the index, in the first index directory.
CONVERSION_NAME: Final = "convert.progress"
#: In the order in which new ones get their names: a database of ledgers never stands without its locations.
DATABASE_NAMES: Final = ("locations", "ledgers", "scoped-locations", "scoped-ledgers")
#: The databases of DbLedgerStorage.
ROCKSDB_NAMES: Final = (*DATABASE_NAMES, "metadata-cache")
#: RocksDB's pointer to its manifest: a directory without it is not a database.
ROCKSDB_CURRENT: Final = "CURRENT"
#: RocksDB's lock file.
ROCKSDB_LOCK: Final = "LOCK"
#: Suffix of a file or directory that a repair is building; the next repair deletes it.
UNFINISHED_SUFFIX: Final = ".unfinished"
