"""The REST API: on a bookie, and as a gateway for a cluster."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final

from bkctl.errors import Unsupported

_PACKAGES: Final = ("starlette", "uvicorn")


def has_server(packages: tuple[str, ...] = _PACKAGES) -> bool:
    """Return True if the packages of the server are installed."""
    return all(find_spec(name) is not None for name in packages)


def load_console() -> ModuleType:
    """Return the module `bkctl.http.console.site`. Raise Unsupported if its packages are not installed."""
    return _load("bkctl.http.console.site", "console", "pip install 'bkctl[http]'", (*_PACKAGES, "jinja2"))


def load_server() -> ModuleType:
    """Return the module `bkctl.http.server`. Raise Unsupported if its packages are not installed."""
    return _load("bkctl.http.server", "HTTP server", "pip install 'bkctl[http]', or set httpServerEnabled=false")


def _load(module: str, what: str, hint: str, packages: tuple[str, ...] = _PACKAGES) -> ModuleType:
    if not has_server(packages):
        raise Unsupported(f"The {what} needs packages that are not installed ({', '.join(packages)})", hint=hint)
    return import_module(module)
