"""`bkctl metadata`: the nodes and values of the metadata store."""

from ..kit.command import group
from . import check, export, nodes, replacement, scopes, stores

app = group(parts=(nodes.app, export.app, stores.app, check.app, scopes.app, replacement.app))
