"""The REST API: on a bookie, and as a gateway for a cluster."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from bkctl.errors import Unsupported


def has_server() -> bool:
    """Return True if the packages of the server are installed."""
    return all(find_spec(name) is not None for name in ("starlette", "uvicorn"))


def load_console() -> ModuleType:
    """Return the module `bkctl.http.console.site`. Raise Unsupported if its packages are not installed."""
    if not has_server() or find_spec("jinja2") is None:
        raise Unsupported(
            "The console needs packages that are not installed (starlette, uvicorn, jinja2)",
            hint="pip install 'bkctl[http]'",
        )
    from bkctl.http.console import site

    return site


def load_server() -> ModuleType:
    """Return the module `bkctl.http.server`. Raise Unsupported if its packages are not installed."""
    if not has_server():
        raise Unsupported(
            "The HTTP server needs packages that are not installed (starlette, uvicorn)",
            hint="pip install 'bkctl[http]', or set httpServerEnabled=false",
        )
    from bkctl.http import server

    return server
