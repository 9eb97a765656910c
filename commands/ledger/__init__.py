"""`bkctl ledger`: write, list, read, recover and verify ledgers."""

from ..kit.command import group
from . import copy, entries

app = group(parts=(entries.app, copy.app))
