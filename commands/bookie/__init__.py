"""`bkctl bookie`: one bookie, and its files and indexes."""

from ..kit.command import group
from . import files, repair, running, server

app = group(parts=(files.app, server.app, running.app, repair.app))
