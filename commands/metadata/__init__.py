"""`bkctl metadata`: the metadata store as it is."""

from ..kit.command import group
from . import check, export, nodes, replacement, scopes, stores

app = group(parts=(nodes.app, export.app, stores.app, check.app, scopes.app, replacement.app))
