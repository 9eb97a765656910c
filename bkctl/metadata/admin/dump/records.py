"""Records of a cluster's metadata, and the sources that give them in order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Final, NamedTuple

from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import DISABLE_HEALTH_CHECK
from bkctl.metadata.store import Closing
from bkctl.metadata.underreplication import UNDERREPLICATION, AuditorCheck

FORMAT: Final = "bkctl-metadata"
VERSION: Final = 1
KINDS: Final = ("node", "cookie", "sequence", "mark", "ledger")
#: Paths of the records of kind "node".
NODE_PATHS: Final = tuple(
    sorted(
        (
            DISABLE_HEALTH_CHECK,
            *(f"{UNDERREPLICATION}/{name}" for name in ("LAYOUT", "disable", "lostBookieRecoveryDelay")),
            *(f"{UNDERREPLICATION}/{check.value}" for check in AuditorCheck),
        )
    )
)


class DumpRecord(NamedTuple):
    """One value of a cluster's metadata; the package describes `key`. `ctime_ms` is the store's, of ledgers only."""

    kind: str
    key: str
    value: bytes
    ctime_ms: int | None = None

    @property
    def place(self) -> tuple[int, str]:
        """Sort key of records."""
        return KINDS.index(self.kind), self.key

    @property
    def ledger(self) -> LedgerId:
        """The ledger of a record of kind "ledger" or "mark"."""
        return LedgerId.from_value(int(self.key, 16))

    @property
    def name(self) -> str:
        """Name of the record in messages."""
        if self.kind in ("ledger", "mark"):
            return f"{'Ledger' if self.kind == 'ledger' else 'The mark of ledger'} {self.ledger}"
        return {"node": f"Node {self.key}", "cookie": f"The cookie of {self.key}"}.get(self.kind, "The ledger ids")


class DumpHeader(NamedTuple):
    """Identity of the exported cluster. `layout` holds the bytes of its LAYOUT, None where none is stored."""

    metadata_uri: str
    instance_id: str
    layout: bytes | None
    time: str


class DumpSource(Closing):
    """A cluster or an export that gives records in order. A context manager."""

    #: Name of the source in messages.
    name: str
    header: DumpHeader

    @abstractmethod
    def records(self) -> Iterator[DumpRecord]:
        """Yield the records in ascending `place`; each call starts from the first one."""

    @abstractmethod
    def ledgers_after(self, ledger: LedgerId) -> Iterator[LedgerId]:
        """Yield the ids of the ledgers after `ledger`, in ascending order."""
