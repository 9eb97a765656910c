"""`bkctl ledger`: write, list, read, recover and verify ledgers."""

from ..kit.command import group
from . import changes, entries, listing

app = group(parts=(entries.write_app, listing.app, entries.app, changes.app))
