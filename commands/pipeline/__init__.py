"""`bkctl pipeline`: jobs over all bookies' files, the metadata store and ledgers."""

from ..kit.command import group
from . import jobs, ledgers

app = group(parts=(jobs.app, ledgers.app))
