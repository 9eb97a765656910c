"""`bkctl bookie`: one bookie, and its files and indexes."""

from ..kit.command import group
from . import check, collection, files, metrics, repair, sanity, settings, state

app = group(parts=(files.app, check.app, state.app, collection.app, sanity.app, settings.app, metrics.app, repair.app))
