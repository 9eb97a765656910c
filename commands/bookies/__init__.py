"""`bkctl bookies`: the set of bookies of a cluster."""

from ..kit.command import group
from . import members, recovery

app = group(parts=(members.app, recovery.app))
