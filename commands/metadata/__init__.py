"""`bkctl metadata`: the nodes and values of the metadata store."""

from ..kit.command import group
from . import nodes, stores

app = group(parts=(nodes.app, stores.app))
