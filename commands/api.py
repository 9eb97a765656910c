"""`bkctl api`: the REST API, called and served."""

from __future__ import annotations

from ._command import group

app = group()


from . import _api_calls  # noqa: E402, F401  (it registers its commands on the app above)
