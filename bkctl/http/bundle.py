"""The bundle that support asks for: a tar.gz of what a cluster says of itself, bounded in size, without secrets.

`RecordedCluster` reads one as a cluster that cannot be changed. A bundle is a stranger's file: no name in it becomes a
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from itertools import islice, tee
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, NoReturn, Union, get_args, get_origin, get_type_hints

from bkctl.bookie.local import active_cluster
from bkctl.errors import BkctlError, Corrupt, Unsupported, on_error
from bkctl.formats.metadata import BookieServiceInfo, LedgerMetadata
from bkctl.http.bookie_client import BookieApi
from bkctl.http.bookie_load import ClusterLoad, LoadWatch, ask_all
from bkctl.http.why import Explanation, log_tail
from bkctl.metadata.admin.dump.importing import import_records, prepare_target
from bkctl.metadata.admin.dump.sources import ClusterSource, DumpRecord, ExportFile, write_export
from bkctl.metadata.admin.health import HealthFinding
from bkctl.metadata.cluster import Cluster, RegisteredBookie, open_cluster
from bkctl.metadata.store import Versioned, attempt
from bkctl.redaction import is_secret_name, without_secrets, without_secrets_in

METADATA: Final = "metadata.ndjson"
#: The members that `RecordedCluster` reads, and the bytes of a bundle, uncompressed, up to the last of them.
_READ: Final = (METADATA, "bookies.json", "health.json", "why.json", "load.json")
_CHANGES: Final = (
    "put", "put_many", "put_all", "delete", "delete_root", "sequence", "ephemeral", "claim", "claim_many",
)  # fmt: skip
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
        """Add a document, of named tuples and dataclasses, too."""
        self._add(name, json.dumps(without_secrets_in(_plain(document), HIDDEN), indent=1, default=str).encode())

    def export(self, cluster: Cluster) -> None:
        """Add the metadata, without the passwords of ledgers, as `RecordedCluster` reads it."""
        lines: list[bytes] = []
        write_export(_WithoutSecrets(cluster, self.left_out), lines.append)
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
    bundle: Bundle,
    cluster: Cluster,
    api_of: Callable[[RegisteredBookie], BookieApi],
    watch: LoadWatch,
    *,
    pause_s: float,
    wait_s: float,
) -> None:
    """Add metadata, registrations, cookies, logs of a local cluster, and what the bookies' HTTP servers say.

    Metrics are read twice, `pause_s` apart, and so is the load. Parts that fail are named in `bundle.left_out`.
    """
    bookies = cluster.bookies.list()
    bundle.export(cluster)
    bundle.json("bookies.json", bookies)
    up = [bookie for bookie in bookies if bookie.state != "down"]

    def ask(directory: str, suffix: str, read: Callable[[BookieApi], Any]) -> None:
        for bookie_id, question in ask_all(up, lambda bookie: read(api_of(bookie)), wait_s).items():
            name = f"{directory}/{bookie_id.replace('/', '_')}{suffix}"
            if question.answer is None:
                bundle.left_out[name] = question.problem or f"no answer within {wait_s:g} s"
            elif isinstance(question.answer, str):
                bundle.text(name, question.answer)
            else:
                bundle.json(name, question.answer)

    ask("metrics-1", ".txt", lambda api: api.metrics())
    watch.look()
    time.sleep(pause_s)
    bundle.json("load.json", watch.look())
    ask("metrics-2", ".txt", lambda api: api.metrics())
    ask("config", ".json", lambda api: api.config())
    ask("garbage", ".json", lambda api: api.garbage_collection())
    local = active_cluster()
    for each in local.bookies() if local is not None and local.metadata_uri == cluster.uri else ():
        for directory, path in (("logs", each.log), ("conf", each.conf)):
            try:
                bundle.text(f"{directory}/{each.bookie_id}.txt", log_tail(path, MEMBER_SIZE_BYTES_MAX))
            except OSError as error:
                bundle.left_out[f"{directory}/{each.bookie_id}"] = str(error)


def _plain(value: Any) -> Any:
    """Return named tuples and dataclasses as objects of JSON, which `typed` reads."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def typed(kind: Any, value: Any) -> Any:
    """Return a value of JSON as `kind`, whose fields it names. Raise ValueError, TypeError or KeyError for another."""
    arguments = get_args(kind)
    origin = get_origin(kind) or kind
    if kind is Any or (value is None and NoneType in arguments):
        return value
    if origin in (Union, UnionType):
        return typed(next(each for each in arguments if each is not NoneType), value)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(typed(arguments[0], each) for each in value)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: typed(arguments[1], each) for name, each in value.items()}
    if hasattr(kind, "_fields") or is_dataclass(kind):
        hints = get_type_hints(kind, localns={"RegisteredBookie": RegisteredBookie})
        return kind(**{name: typed(hints[name], each) for name, each in value.items()})
    if issubclass(kind, StrEnum) or (kind is float and isinstance(value, int)):
        return kind(value)
    if not isinstance(value, kind):
        raise ValueError(f"not {kind.__name__}: {value!r}")
    return value


class _WithoutSecrets(ClusterSource):
    """The records of a cluster without secrets, and without ledgers behind the first LEDGERS_MAX."""

    def __init__(self, cluster: Cluster, left_out: dict[str, str]) -> None:
        super().__init__(cluster)
        self.header = self.header._replace(metadata_uri=without_secrets(self.header.metadata_uri, HIDDEN))
        self._left_out = left_out

    def records(self) -> Iterator[DumpRecord]:
        """See DumpSource.records. Unreadable ledgers are left out: their bytes may hold a password."""
        ledger_count = 0
        if not self.may_read_racks:
            self._left_out["racks"] = "the store refuses to show them"
        for record in super().records():
            if record.kind != "ledger":
                yield record._replace(value=_hidden("", record.value))
                continue
            ledger_count += 1
            if ledger_count > LEDGERS_MAX:
                self._left_out["ledgers"] = f"all after the first {LEDGERS_MAX:,}"
                return
            metadata = attempt(LedgerMetadata.parse, record.value)
            if isinstance(metadata, BkctlError):
                self._left_out[f"ledger {record.ledger}"] = metadata.message
            else:
                custom = {name: _hidden(name, value) for name, value in metadata.custom_metadata.items()}
                yield record._replace(value=metadata._replace(password=b"", custom_metadata=custom).serialize())


def _hidden(name: str, value: bytes) -> bytes:
    if is_secret_name(name):
        return HIDDEN.encode()
    with suppress(ValueError, RecursionError):
        document = json.loads(value)
        hidden = without_secrets_in(document, HIDDEN)
        return value if hidden == document else json.dumps(hidden).encode()
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


class RecordedCluster:
    """A bundle, read. Raise Corrupt for another kind of file, OSError.

    `open` returns a cluster of its metadata, which refuses changes; the rest is what the cluster's bookies answered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._members: dict[str, bytes] = {}
        with (
            self._checked("is not a bundle, or is damaged"),
            gzip.open(path) as raw,
            tarfile.open(fileobj=_Bounded(raw), mode="r|") as archive,
        ):
            for member in archive:
                name = member.name.removeprefix("bkctl-bundle/")
                if name in _READ and name not in self._members and member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    file = archive.extractfile(member)
                    self._members[name] = file.read() if file is not None else b""
                    if len(self._members) == len(_READ):
                        break
        if missing := [name for name in _READ if name not in self._members]:
            raise Corrupt(f"{path} is not a bundle, or an older one: it has no {missing[0]}", hint="collect it again")

    @contextmanager
    def _checked(self, problem: str) -> Iterator[None]:
        """Raise Corrupt for whatever a stranger's file leads to."""
        try:
            yield
        except (
            BkctlError, tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, TypeError, KeyError,
            AttributeError, IndexError, StopIteration, OverflowError, RecursionError,
        ) as error:  # fmt: skip
            raise Corrupt(f"{self.path} {problem}: {error}", hint="collect it again") from error

    def _read(self, name: str, kind: Any) -> Any:
        with self._checked(f"is a damaged bundle: {name}"):
            return typed(kind, json.loads(self._members[name]))

    def open(self) -> tuple[Cluster, str]:
        """Return the metadata as a cluster that refuses changes, and its time."""
        bookies: list[RegisteredBookie] = self._read("bookies.json", list[RegisteredBookie])
        files = tempfile.TemporaryDirectory(prefix="bkctl-bundle-")
        export = Path(files.name) / METADATA
        export.write_bytes(self._members[METADATA])
        with on_error(files.cleanup):
            cluster = open_cluster(f"sqlite://{files.name}/metadata.db", create_store=True)
            with on_error(cluster.close), self._checked("is a damaged bundle"):
                with ExportFile(export) as source:
                    source.check()
                    prepare_target(cluster, source)
                    import_records(source.records(), cluster)
                    ctimes = {each.path(cluster): each.ctime_ms for each in source.records() if each.kind == "ledger"}
                    at = source.header.time
                if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", at, re.ASCII) is None:
                    raise Corrupt("its time is not a time")
                for each in bookies:
                    if each.state != "down":
                        cluster.bookies.register(each.bookie_id, each.info or BookieServiceInfo(), each.state == "ro")
        for name in _CHANGES:
            setattr(cluster.store, name, _refuse)
        read = cluster.store.get_many

        def get_many(paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
            asked, places = tee(paths)
            for path, found in zip(places, read(asked), strict=True):  # with the cluster's times, not the import's
                yield found and found._replace(ctime_ms=ctimes.get(path))

        cluster.store.get_many = get_many  # type: ignore[method-assign]
        cluster.__dict__["bundle_files"] = files  # removed with the cluster
        return cluster, at

    def explanation(self, command: str) -> Explanation:
        """Return the explanation of a command. Raise Unsupported without one."""
        recorded: dict[str, Explanation] = self._read("why.json", dict[str, Explanation])
        if command in recorded:
            return recorded[command]
        held = ", ".join(f"'{each}'" for each in islice(recorded, 10)) or "none"
        problem = f"'{command}' cannot be answered: {self.path} is a bundle"
        raise Unsupported(problem, hint=f"it has the answers of: {held}")

    def findings(self) -> list[HealthFinding]:
        """Return the findings of the cluster's health."""
        return self._read("health.json", list[HealthFinding])  # type: ignore[no-any-return]

    def load(self) -> ClusterLoad:
        """Return the load of the bookies."""
        return self._read("load.json", ClusterLoad)  # type: ignore[no-any-return]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Unsupported("A bundle cannot be changed", hint="name a cluster in its place")
