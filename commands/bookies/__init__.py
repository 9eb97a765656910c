"""`bkctl bookies`: the set of bookies of a cluster."""

from ..kit.command import group
from . import departure, members, recover

app = group(parts=(members.app, recover.app, departure.app))
