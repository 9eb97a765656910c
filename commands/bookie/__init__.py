"""`bkctl bookie`: one bookie, and its files and indexes."""

from ..kit.command import group
from . import check, collection, files, repair, running, server

app = group(parts=(files.app, check.app, server.app, collection.app, running.app, repair.app))
