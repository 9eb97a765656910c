"""`bkctl entrylog`: entry log files of a bookie."""

from ..kit.command import group
from . import extract, listing

app = group(parts=(listing.app, extract.app))
