"""`bkctl entrylog`: entry log files of a bookie."""

from ..kit.command import group
from . import extract, garbage, listing

app = group(parts=(listing.app, garbage.app, extract.app))
