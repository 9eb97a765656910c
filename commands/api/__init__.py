"""`bkctl api`: the REST API, called and served."""

from ..kit.command import group
from . import calls, serve

app = group(parts=(serve.app, calls.app))
