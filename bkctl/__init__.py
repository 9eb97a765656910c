"""bkctl: administration of Apache BookKeeper with 128-bit ledger ids (BP-35), and its client for Python.

The client is described in docs/python.md; what is not in an `__all__` of `bkctl`, `bkctl.sync` or `bkctl.errors` is
private.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper as BookKeeper
    from bkctl.client.read_handle import Handle as Handle
    from bkctl.client.read_handle import ReadHandle as ReadHandle
    from bkctl.client.reader import LedgerEntry as LedgerEntry
    from bkctl.client.write_handle import WriteFlag as WriteFlag
    from bkctl.client.write_handle import WriteHandle as WriteHandle
    from bkctl.errors import BkctlError as BkctlError
    from bkctl.formats.entry import DigestType as DigestType
    from bkctl.formats.metadata import LedgerMetadata as LedgerMetadata
    from bkctl.formats.metadata import LedgerState as LedgerState
    from bkctl.ids import AnyLedgerId as AnyLedgerId
    from bkctl.ids import LedgerId as LedgerId
    from bkctl.metadata.store import StoreSecurity as StoreSecurity
    from bkctl.protocol.messages import Protocol as Protocol

__version__ = "0.1.0"

#: The module of each public name, which is imported when the name is first used.
_MODULES = {
    "AnyLedgerId": "ids",
    "BkctlError": "errors",
    "BookKeeper": "client.ledger",
    "DigestType": "formats.entry",
    "Handle": "client.read_handle",
    "LedgerEntry": "client.reader",
    "LedgerId": "ids",
    "LedgerMetadata": "formats.metadata",
    "LedgerState": "formats.metadata",
    "Protocol": "protocol.messages",
    "ReadHandle": "client.read_handle",
    "StoreSecurity": "metadata.store",
    "WriteFlag": "client.write_handle",
    "WriteHandle": "client.write_handle",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
