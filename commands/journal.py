"""`bkctl journal`: journal files and last marks of a bookie."""

from __future__ import annotations

from ._command import group

app = group()
