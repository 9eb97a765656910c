"""`bkctl entrylog`: entry log files of a bookie."""

from ..kit.command import group
from . import extract, garbage, listing, verify

app = group(parts=(listing.app, verify.app, garbage.app, extract.app))
