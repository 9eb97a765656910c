"""`bkctl bookie`: one bookie, and its files and indexes."""

from ..kit.command import group
from . import check, files, repair, running

app = group(parts=(files.app, check.app, running.app, repair.app))
