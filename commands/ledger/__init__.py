"""`bkctl ledger`: write, list, read, recover and verify ledgers."""

from ..kit.command import group
from . import changes, copies, listing, locate, read, write

app = group(parts=(write.app, listing.app, locate.app, read.app, changes.app, copies.app))
