"""`bkctl ledger`: write, list, read, recover and verify ledgers."""

from ..kit.command import group
from . import changes, copies, listing, read, write

app = group(parts=(write.app, listing.app, read.app, changes.app, copies.app))
