"""`bkctl pipeline`: jobs over all bookies' files, the metadata store and ledgers."""

from ..kit.command import group
from . import extract, garbage, integrity, inventory, journals, ledgers, report

app = group(parts=(inventory.app, integrity.app, garbage.app, journals.app, report.app, extract.app, ledgers.app))
