"""The bundle that support asks for: a tar.gz of what a cluster says of itself, bounded in size, without secrets.

`open_bundle` reads one as a cluster that cannot be changed. A bundle is a stranger's file: no name in it becomes a
path, nothing that it names is connected to, and all that is read of it is bounded.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from bkctl.bookie.local import active_cluster
from bkctl.errors import BkctlError, Corrupt, Unsupported
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, LedgerMetadata
from bkctl.http.bookie_client import BookieApi
from bkctl.http.bookie_load import ask_all
from bkctl.http.why import Explanation, Fact, Way, log_tail
from bkctl.metadata.admin.dump.export_file import DumpRecord, ExportFile
from bkctl.metadata.admin.dump.importing import import_records, prepare_target
from bkctl.metadata.admin.dump.sources import ClusterSource, write_export
from bkctl.metadata.admin.health import HealthFinding, Severity
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import attempt
from bkctl.redaction import is_secret_name, without_secrets, without_secrets_in

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.metadata.ledgers import VersionedMetadata

T = TypeVar("T")
METADATA: Final = "metadata.ndjson"
#: The members that `open_bundle` reads, and the bytes of a bundle, uncompressed, up to the last of them.
_READ: Final = (METADATA, "bookies.json", "health.json", "why.json")
READ_SIZE_BYTES_MAX: Final = 256 << 20
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

    def export(self, cluster: Cluster) -> None:
        """Add the metadata, without the passwords of ledgers, as `open_bundle` reads it."""
        lines: list[bytes] = []
        write_export(_WithoutSecrets(cluster), lines.append)
        self._add(METADATA, b"".join(lines))

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
    bundle.export(cluster)
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


class _WithoutSecrets(ClusterSource):
    """The records of a cluster without passwords, and without ledgers behind the first LEDGERS_MAX."""

    def records(self) -> Iterator[DumpRecord]:
        """See DumpSource.records. Unreadable ledgers are left out: their bytes may hold a password."""
        ledger_count = 0
        for record in super().records():
            if record.kind != "ledger":
                yield record
                continue
            ledger_count += 1
            if ledger_count > LEDGERS_MAX:
                return
            metadata = attempt(LedgerMetadata.parse, record.value)
            if not isinstance(metadata, BkctlError):
                custom = {name: _hidden(name, value) for name, value in metadata.custom_metadata.items()}
                yield record._replace(value=metadata._replace(password=b"", custom_metadata=custom).serialize())


def _hidden(name: str, value: bytes) -> bytes:
    if is_secret_name(name):
        return HIDDEN.encode()
    return without_secrets(value.decode("latin-1"), HIDDEN).encode("latin-1")


class _Bounded(io.RawIOBase):
    """The first READ_SIZE_BYTES_MAX bytes of an uncompressed file. Raise Corrupt behind them."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file, self._left = file, READ_SIZE_BYTES_MAX

    def read(self, size: int = -1) -> bytes:
        found = self._file.read(min(size if size >= 0 else self._left + 1, self._left + 1))
        self._left -= len(found)
        if self._left < 0:
            raise Corrupt(f"more than {READ_SIZE_BYTES_MAX:,} bytes")
        return found


def read_members(path: Path) -> dict[str, bytes]:
    """Return the members of a bundle that `open_bundle` needs. Raise Corrupt for another kind of file, OSError."""
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as raw, tarfile.open(fileobj=_Bounded(raw), mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("bkctl-bundle/")
                if name in _READ and name not in found and member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    file = archive.extractfile(member)
                    found[name] = file.read() if file is not None else b""
                    if len(found) == len(_READ):
                        break
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, Corrupt, ValueError, OverflowError) as error:
        raise Corrupt(f"{path} is not a bundle, or is damaged: {error}", hint="collect it again") from error
    if missing := [name for name in _READ if name not in found]:
        raise Corrupt(f"{path} is not a bundle, or an older one: it has no {missing[0]}", hint="collect it again")
    return found


def open_bundle(path: Path) -> tuple[Cluster, str]:
    """Return a bundle as a cluster that refuses changes, and its time. Raise Corrupt, OSError."""
    members = read_members(path)
    files = tempfile.TemporaryDirectory(prefix="bkctl-bundle-")
    export = Path(files.name) / METADATA
    export.write_bytes(members[METADATA])
    cluster = open_cluster(f"sqlite://{files.name}/metadata.db", create_store=True)
    try:
        with ExportFile(export) as source:
            source.check()
            prepare_target(cluster, source)
            import_records(source.records(), cluster)
            at = source.header.time
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", at, re.ASCII) is None:
            raise Corrupt("its time is not a time")
        for each in _json(members["bookies.json"], list):
            if each["state"] != "down":
                info = each["info"] or {"endpoints": (), "properties": {}}
                endpoints = tuple(BookieEndpoint(**endpoint) for endpoint in info["endpoints"])
                properties = {str(name): str(value) for name, value in info["properties"].items()}
                registration = BookieServiceInfo(endpoints, properties)
                cluster.bookies.register(str(each["bookie_id"]), registration, each["state"] == "ro")
    except (BkctlError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cluster.close()
        files.cleanup()
        raise Corrupt(f"{path} is a damaged bundle: {error}", hint="collect it again") from error
    for name in ("put", "put_many", "put_all", "delete", "delete_root", "sequence", "ephemeral", "claim", "claim_many"):
        setattr(cluster.store, name, _refuse)
    cluster.__dict__["bundle_files"] = files  # removed with the cluster
    return cluster, at


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Unsupported("A bundle cannot be changed", hint="name a cluster in its place")


def _json(data: bytes, kind: type[T]) -> T:
    document = json.loads(data)
    if not isinstance(document, kind):
        raise ValueError(f"not a {kind.__name__}")
    return document


def recorded_explanation(path: Path, command: str) -> Explanation:
    """Return the explanation that a bundle holds for a command. Raise Unsupported without one, Corrupt, OSError."""
    try:
        recorded = _json(read_members(path)["why.json"], dict)
        if (found := recorded.get(command)) is not None:
            facts = [Fact(str(what), str(evidence)) for what, evidence in found["facts"]]
            ways = [Way(str(way), str(effect)) for way, effect in found["ways"]]
            return Explanation(str(found["subject"]), str(found["verdict"]), facts, ways)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path} is a damaged bundle: why.json: {error}", hint="collect it again") from error
    held = ", ".join(f"'{each}'" for each in islice(recorded, 10)) or "none"
    raise Unsupported(f"'{command}' cannot be answered: {path} is a bundle", hint=f"it has the answers of: {held}")


def recorded_findings(path: Path) -> list[HealthFinding]:
    """Return the health findings that a bundle holds. Raise Corrupt, OSError."""
    try:
        codes = {code.value: code for code in HealthCode}
        return [
            HealthFinding(**{**each, "code": codes[each["code"]], "severity": Severity(each["severity"])})
            for each in _json(read_members(path)["health.json"], list)
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Corrupt(f"{path} is a damaged bundle: health.json: {error}", hint="collect it again") from error
