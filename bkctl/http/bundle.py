"""The bundle that support asks for: a tar.gz of what a cluster says of itself, bounded in size, without secrets."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from bkctl.bookie.local import active_cluster
from bkctl.errors import BkctlError
from bkctl.http.bookie_client import BookieApi
from bkctl.http.bookie_load import ask_all
from bkctl.http.why import log_tail
from bkctl.metadata.store import attempt
from bkctl.redaction import without_secrets, without_secrets_in

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.metadata.ledgers import VersionedMetadata

MEMBER_SIZE_BYTES_MAX: Final = 4 << 20
LEDGERS_MAX: Final = 20_000
HIDDEN: Final = "<hidden>"


@dataclass
class Bundle:
    """Members are added to `file`, each without secrets; what is over `size_bytes_max` in all is left out and named."""

    file: tarfile.TarFile
    size_bytes_max: int
    size_bytes: int = 0
    members: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def text(self, name: str, text: str) -> None:
        """Add the end of a text, which is not JSON."""
        self._add(name, without_secrets(text, HIDDEN).encode()[-MEMBER_SIZE_BYTES_MAX:])

    def json(self, name: str, document: Any) -> None:
        """Add a document."""
        self._add(name, json.dumps(without_secrets_in(document, HIDDEN), indent=1, default=str).encode())

    def _add(self, name: str, data: bytes) -> None:
        if self.size_bytes + len(data) > self.size_bytes_max or name in self.members:
            self.left_out[name] = f"{len(data):,} bytes are more than the bundle has room for"
            return
        info = tarfile.TarInfo(f"bkctl-bundle/{name}")
        info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
        self.file.addfile(info, io.BytesIO(data))
        self.size_bytes += len(data)
        self.members.append(name)


def add_cluster(
    bundle: Bundle, cluster: Cluster, api_of: Callable[[RegisteredBookie], BookieApi], *, pause_s: float, wait_s: float
) -> None:
    """Add metadata, registrations, cookies, logs of a local cluster, and what the bookies' HTTP servers say.

    Metrics are read twice, `pause_s` apart. Parts that fail are named in `bundle.left_out`.
    """
    bookies = cluster.bookies.list()
    bundle.json("bookies.json", [{**each._asdict(), "info": _plain(each.info)} for each in bookies])
    bundle.json("cookies.json", {each: _cookie(cluster, each) for each in cluster.cookies.list()})
    ledgers = cluster.ledgers.read_many(islice(cluster.ledgers.ledgers(None), LEDGERS_MAX))
    bundle.json("ledgers.json", [_ledger(*each) for each in ledgers])
    up = [bookie for bookie in bookies if bookie.state != "down"]
    for number in (1, 2):
        if number == 2:
            time.sleep(pause_s)
        _ask(bundle, up, f"metrics-{number}", ".txt", lambda bookie: api_of(bookie).metrics(), wait_s)
    _ask(bundle, up, "config", ".json", lambda bookie: api_of(bookie).config(), wait_s)
    _ask(bundle, up, "garbage", ".json", lambda bookie: api_of(bookie).garbage_collection()._asdict(), wait_s)
    local = active_cluster()
    for each in local.bookies() if local is not None and local.metadata_uri == cluster.uri else ():
        for directory, path in (("logs", each.log), ("conf", each.conf)):
            try:
                bundle.text(f"{directory}/{each.bookie_id}.txt", log_tail(path, MEMBER_SIZE_BYTES_MAX))
            except OSError as error:
                bundle.left_out[f"{directory}/{each.bookie_id}"] = str(error)


def _ask(
    bundle: Bundle,
    bookies: Iterable[RegisteredBookie],
    directory: str,
    suffix: str,
    read: Callable[[RegisteredBookie], Any],
    wait_s: float,
) -> None:
    for bookie_id, question in ask_all(bookies, read, wait_s).items():
        name = f"{directory}/{bookie_id.replace('/', '_')}{suffix}"
        if question.answer is None:
            bundle.left_out[name] = question.problem or f"no answer within {wait_s:g} s"
        elif isinstance(question.answer, str):
            bundle.text(name, question.answer)
        else:
            bundle.json(name, question.answer)


def _plain(info: Any) -> Any:
    if info is None:
        return None
    return {"endpoints": [each._asdict() for each in info.endpoints], "properties": dict(info.properties)}


def _cookie(cluster: Cluster, bookie_id: str) -> Any:
    found = attempt(cluster.cookies.read, bookie_id)
    return str(found) if isinstance(found, BkctlError) or found is None else asdict(found.value)


def _ledger(ledger: LedgerId, found: VersionedMetadata | BkctlError) -> dict[str, Any]:
    if isinstance(found, BkctlError):
        return {"ledger": str(ledger), "problem": str(found)}
    metadata = found.metadata
    custom = {name: value.decode("utf-8", "replace") for name, value in metadata.custom_metadata.items()}
    ensembles = {str(each.first_entry_id): each.bookies for each in metadata.ensembles}
    kept = {"state": metadata.state.name, "customMetadata": custom, "ensembles": ensembles, "ctime": found.ctime_ms}
    numbers = ("ensemble_size", "write_quorum_size", "ack_quorum_size", "length", "last_entry_id", "format_version")
    return {"ledger": str(ledger), **{name: getattr(metadata, name) for name in numbers}, **kept}
