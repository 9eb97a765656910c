"""`bkctl ledger`: write, list, read, recover and verify ledgers."""

from ..kit.command import group
from . import copy, delete, listing, locate, read, recover, verify, write

app = group(parts=(write.app, listing.app, locate.app, read.app, delete.app, recover.app, verify.app, copy.app))
