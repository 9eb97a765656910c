"""`bkctl bookies`: the set of bookies of a cluster."""

from ..kit.command import group
from . import departure, members

app = group(parts=(members.app, departure.app))
