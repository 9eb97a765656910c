"""The values in BookKeeper's metadata store: ledger metadata, cookies, layout, bookie registration.

Every function that writes gives the same bytes as Apache BookKeeper. Source: LedgerMetadataSerDe, Cookie, LedgerLayout,
BookieServiceInfo, DataFormats.proto.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from bkctl.errors import Corrupt, Unsupported, UsageError
from bkctl.formats.entry import INVALID_ENTRY_ID, DigestType
from bkctl.ids import is_bookie_id

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    from bkctl.formats.data_formats_pb2 import LedgerMetadataFormat, LedgerMetadataView

M = TypeVar("M", bound="Message")

#: Above the value size limit of every metadata store; larger values are refused before they are parsed.
METADATA_SIZE_BYTES_MAX: Final = 64 << 20
#: Larger messages are refused without the names of all the fields that they lack: one name for every 2 bytes.
_NAMED_SIZE_BYTES_MAX: Final = 4096
#: Defaults in LedgerMetadataView: the number is absent.
_ABSENT_32: Final = -(1 << 31)
_ABSENT_64: Final = -(1 << 63)
#: Parts of larger metadata are not kept for the next ledgers.
_SHARED_SIZE_BYTES_MAX: Final = 4096
METADATA_FORMAT_VERSION_MAX: Final = 3
COOKIE_LAYOUT_VERSION: Final = 5
LAYOUT_FORMAT_VERSION: Final = 2

_METADATA_HEADER = re.compile(rb"BookieMetadataFormatVersion\t([+-]?[0-9]{1,9})\n")
_V3_HEADER = b"BookieMetadataFormatVersion\t3\n"
_V3_HEADER_SIZE: Final = len(_V3_HEADER)
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_LINE_END = re.compile(r"\r\n|\n|\r")
_V1_CLOSED = "CLOSED"
_V1_IN_RECOVERY_ENTRY_ID = -102
#: LAYOUT format 1 names a type where format 2 names a class.
_LAYOUT_TYPES = {
    "flat": "org.apache.bookkeeper.meta.FlatLedgerManagerFactory",
    "hierarchical": "org.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory",
}


class LedgerState(IntEnum):
    """The state of a ledger, by its number in the metadata."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


#: By number: a lookup takes a quarter of the time of a call of the enum.
_STATES: Final[Mapping[int, LedgerState]] = {state.value: state for state in LedgerState}
_DIGEST_TYPES: Final[Mapping[int, DigestType]] = {digest_type.value: digest_type for digest_type in DigestType}


class Fragment(NamedTuple):
    """The entries from `first_entry_id` on, striped over the ensemble `bookies`."""

    first_entry_id: int
    bookies: tuple[str, ...]


class Ensembles(tuple[Fragment, ...]):
    """The fragments of a ledger, which many ledgers share; `shown` is for what is made of them once."""

    shown: Any = None


class CustomMetadata(dict[str, bytes]):
    """The custom metadata of a ledger, which many ledgers share; `shown` is for what is made of it once."""

    shown: Any = None


class LedgerMetadata(NamedTuple):
    """One ledger's metadata; changes are made with `_replace`.

    `ensembles` is in order of the first entry id. `digest_type` and `password` are both known or both None (ledgers
    of BookKeeper 4.1 and metadata version 1). `length` (bytes) and `last_entry_id` are 0 and -1 unless CLOSED.
    `ctime_ms` is None where the metadata itself lacks the creation time, `c_token` where it lacks a token.
    Source: LedgerMetadataImpl, LedgerMetadataFormat.
    """

    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    digest_type: DigestType | None
    password: bytes | None
    ensembles: tuple[Fragment, ...]
    state: LedgerState = LedgerState.OPEN
    length: int = 0
    last_entry_id: int = INVALID_ENTRY_ID
    ctime_ms: int | None = None
    custom_metadata: Mapping[str, bytes] = {}
    c_token: int | None = None
    format_version: int = METADATA_FORMAT_VERSION_MAX

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self._asdict().items() if name != "password")
        return f"LedgerMetadata({', '.join(shown)})"

    @staticmethod
    def parse(data: bytes, where: str = "") -> LedgerMetadata:
        """Return the metadata in a store's value `data`, in any of the versions 1 to 3.

        Raises Unsupported for another version or an unknown digest type, else Corrupt; `where` names the value.
        """
        at = f"{where}: " if where else ""
        if len(data) > METADATA_SIZE_BYTES_MAX:
            raise Corrupt(f"{at}Ledger metadata has {len(data)} bytes, at most {METADATA_SIZE_BYTES_MAX} are possible")
        if data.startswith(_V3_HEADER):  # nearly always
            version, body = 3, data[len(_V3_HEADER) :]
        else:
            header = _METADATA_HEADER.match(data)
            if header is None:
                raise Corrupt(f"{at}Ledger metadata does not begin with a BookieMetadataFormatVersion line")
            version, body = int(header[1]), data[header.end() :]
        if version == 1:
            metadata = _parse_v1(body, at)
        elif version == 2:
            message = parse_text("LedgerMetadataFormat", body, f"{at}Ledger metadata")
            metadata = _from_message(message.SerializeToString(), 2, at)
        elif version == 3:
            metadata = _from_message(body[slice(*_message_place(body, at))], 3, at)
        else:
            raise Unsupported(f"{at}Ledger metadata has format version {version}, 1 to 3 are known")
        if version == 1 and (problem := metadata._problem()):
            raise Corrupt(f"{at}Ledger metadata: {problem}")
        return metadata

    def serialize(self) -> bytes:
        """Return the bytes that a store keeps, in `format_version`.

        Version 1 drops password, digest, ack quorum, ctime and custom metadata; only version 3 keeps `c_token`.
        Raises UsageError when the values contradict each other.
        """
        if problem := self._problem():
            raise UsageError(f"Ledger metadata cannot be written: {problem}")
        closed = self.state is LedgerState.CLOSED
        header = b"BookieMetadataFormatVersion\t%d\n" % self.format_version
        if self.format_version == 1:
            return header + self._serialize_v1(closed)
        message = self._to_message(closed)
        if self.format_version == 2:
            return header + print_text(message).encode("ascii")
        from google.protobuf import proto

        body = io.BytesIO()
        proto.serialize_length_prefixed(message, body)
        return header + body.getvalue()

    def fragment_of(self, entry_id: int) -> Fragment:
        """Return the fragment of entry `entry_id`. Raises UsageError for an entry before the first fragment."""
        index = bisect_right(self.ensembles, entry_id, key=lambda fragment: fragment.first_entry_id)
        if index == 0:
            raise UsageError(f"Entry {entry_id} is before the ledger's first entry")
        return self.ensembles[index - 1]

    def extents(self) -> Iterator[tuple[int, int | None, tuple[str, ...]]]:
        """Yield first entry, last entry (None while a writer may add more) and bookies of each fragment."""
        ends = [*(fragment.first_entry_id - 1 for fragment in self.ensembles[1:]), None]
        if self.is_closed:
            ends[-1] = self.last_entry_id
        for (first, bookies), last in zip(self.ensembles, ends, strict=False):  # Damaged metadata may have none.
            yield first, last, bookies

    @property
    def last_fragment(self) -> Fragment:
        """Return the fragment for the next entry of an open ledger."""
        return self.ensembles[-1]

    @property
    def is_closed(self) -> bool:
        """Return whether `length` and `last_entry_id` are final."""
        return self.state is LedgerState.CLOSED

    def _problem(self) -> str | None:
        if not 1 <= self.format_version <= METADATA_FORMAT_VERSION_MAX:
            return f"format version {self.format_version} is not 1 to {METADATA_FORMAT_VERSION_MAX}"
        if (self.digest_type is None) != (self.password is None):
            return "only one of digest type and password is known"
        return _ensembles_problem(self.ensembles, self.ensemble_size, self.write_quorum_size, self.ack_quorum_size)

    def _serialize_v1(self, closed: bool) -> bytes:
        lines = [str(self.write_quorum_size), str(self.ensemble_size), str(self.length if closed else 0)]
        lines += ["\t".join((str(first), *bookies)) for first, bookies in self.ensembles]
        if closed:
            lines.append(f"{self.last_entry_id}\t{_V1_CLOSED}")
        elif self.state is LedgerState.IN_RECOVERY:
            lines.append(f"{_V1_IN_RECOVERY_ENTRY_ID}\t{_V1_CLOSED}")
        else:
            lines.append("")
        return "\n".join(lines).encode()

    def _to_message(self, closed: bool) -> LedgerMetadataFormat:
        message: LedgerMetadataFormat = _messages().LedgerMetadataFormat(
            quorumSize=self.write_quorum_size,
            ensembleSize=self.ensemble_size,
            length=self.length if closed else 0,
            lastEntryId=self.last_entry_id if closed else INVALID_ENTRY_ID,
            state=self.state.name,
            digestType=None if self.digest_type is None else self.digest_type.name,
            password=self.password,
            ackQuorumSize=self.ack_quorum_size,
        )
        for first_entry_id, bookies in self.ensembles:
            message.segment.add(ensembleMember=bookies, firstEntryId=first_entry_id)
        if self.ctime_ms is not None:
            message.ctime = self.ctime_ms
        for key, value in self.custom_metadata.items():
            message.customMetadata.add(key=key, value=value)
        if self.c_token is not None and self.format_version > 2:
            message.cToken = self.c_token
        return message


def parse_many(values: Sequence[bytes]) -> list[LedgerMetadata]:
    """Return the metadata in each of a store's values in version 3, in less than half of the time of `parse`.

    Raises Corrupt or Unsupported where `parse` does for one of them, and for other versions.
    """
    try:
        views = _messages().LedgerMetadataViews.FromString(b"".join(map(_framed, values)))
    except _decode_error() as error:
        raise Corrupt("Ledger metadata is not a protobuf message of that kind") from error
    if not views.IsInitialized():
        raise Corrupt("Ledger metadata lacks required fields")
    return [_from_view(view, 3, len(value)) for view, value in zip(views.ledgers, values, strict=True)]


def _parse_v1(body: bytes, at: str) -> LedgerMetadata:
    lines = _LINE_END.split(decoded(body, f"{at}Ledger metadata (version 1)"))
    if lines and not lines[-1]:
        lines.pop()
    if len(lines) < 3:
        raise Corrupt(f"{at}Ledger metadata (version 1) has {len(lines)} lines, at least 3 are needed")
    write_quorum_size, ensemble_size = (_integer(line, 32, at) for line in lines[:2])
    length = _integer(lines[2], 64, at)
    fragments: list[Fragment] = []
    state, last_entry_id = LedgerState.OPEN, INVALID_ENTRY_ID
    for line in lines[3:]:
        first, *bookies = line.rstrip("\t").split("\t")
        if not bookies:
            raise Corrupt(f"{at}Ledger metadata (version 1): the line {line[:80]!r} names no bookie")
        entry_id = _integer(first, 64, at)
        if bookies[0] == _V1_CLOSED:
            if entry_id == _V1_IN_RECOVERY_ENTRY_ID:
                state = LedgerState.IN_RECOVERY
            else:
                state, last_entry_id = LedgerState.CLOSED, entry_id
            break
        fragments.append(Fragment(entry_id, tuple(bookies)))
    return LedgerMetadata(
        ensemble_size=ensemble_size,
        write_quorum_size=write_quorum_size,
        ack_quorum_size=write_quorum_size,
        digest_type=None,
        password=None,
        ensembles=tuple(fragments),
        state=state,
        length=length if state is LedgerState.CLOSED else 0,
        last_entry_id=last_entry_id,
        format_version=1,
    )


@cache  # Millions are parsed, and an import statement takes as long as to parse one.
def _messages() -> Any:
    """Return the module of the messages of data_formats.proto."""
    from bkctl.formats import data_formats_pb2

    return data_formats_pb2


@cache
def _decode_error() -> type[Exception]:
    from google.protobuf.message import DecodeError

    return DecodeError


def _message_place(body: bytes, at: str) -> tuple[int, int]:
    """Return the begin and the end of the message in version 3's `body`. Raises Corrupt."""
    size = index = 0
    while index == 0 or body[index - 1] >= 0x80:
        if index == len(body) or index == 5:
            raise Corrupt(f"{at}Ledger metadata (version 3): its message length is cut short or malformed")
        size |= (body[index] & 0x7F) << 7 * index
        index += 1
    if size > len(body) - index:
        raise Corrupt(f"{at}Ledger metadata (version 3) needs {size} bytes of message, {len(body) - index} are there")
    return index, index + size


def _framed(data: bytes) -> bytes:
    """Return the message of version 3 in `data` as an element of LedgerMetadataViews. Raises Corrupt."""
    body = data[_V3_HEADER_SIZE:]
    if not data.startswith(_V3_HEADER):
        raise Corrupt("Ledger metadata is not of version 3")
    # Nearly always the length has two bytes, and nothing is behind the message.
    if not (len(body) > 1 and body[1] < 0x80 <= body[0] and body[1] << 7 | body[0] & 0x7F == len(body) - 2):
        body = body[: _message_place(body, "")[1]]
    return b"\n" + body


def _ensembles_problem(
    ensembles: tuple[Fragment, ...], ensemble_size: int, write_quorum_size: int, ack_quorum_size: int
) -> str | None:
    if ensemble_size < 1:
        return f"ensemble size {ensemble_size} is below 1"
    if not ensemble_size >= write_quorum_size >= ack_quorum_size >= 0:
        return (
            f"ensemble size {ensemble_size}, write quorum {write_quorum_size} and "
            f"ack quorum {ack_quorum_size} are not in descending order"
        )
    if not ensembles:
        return "the list of ensembles is empty"
    previous = None
    for first_entry_id, bookies in ensembles:
        if len(bookies) != ensemble_size:
            return f"the ensemble from entry {first_entry_id} has {len(bookies)} bookies, not {ensemble_size}"
        if previous is not None and first_entry_id <= previous:
            return f"the ensemble from entry {first_entry_id} comes after that from entry {previous}"
        previous = first_entry_id
        if not all(map(is_bookie_id, bookies)):
            bad = next(bookie_id for bookie_id in bookies if not is_bookie_id(bookie_id))
            return f"the ensemble from entry {first_entry_id} has the impossible bookie id {bad!r}"
    return None


def _fragment(data: bytes) -> Fragment:
    segment = parse_message(_messages().LedgerMetadataFormat.Segment, data, "Ledger metadata: an ensemble")
    return Fragment(segment.firstEntryId, tuple(segment.ensembleMember))


def _ensembles(segments: tuple[bytes, ...], *sizes: int) -> Ensembles:
    """Return the fragments, checked against the sizes of ensemble, write quorum and ack quorum. Raises Corrupt."""
    ensembles = Ensembles(map(_fragment, segments))
    if problem := _ensembles_problem(ensembles, *sizes):
        raise Corrupt(f"Ledger metadata: {problem}")
    return ensembles


def _custom_metadata(items: tuple[bytes, ...]) -> CustomMetadata:
    entry = _messages().LedgerMetadataFormat.cMetadataMapEntry
    found = (parse_message(entry, data, "Ledger metadata: a custom field") for data in items)
    return CustomMetadata((item.key, item.value) for item in found)


#: Of millions of ledgers, many have the same ensembles or the same custom metadata.
_known_ensembles: Final = lru_cache(maxsize=16384)(_ensembles)
_known_custom_metadata: Final = lru_cache(maxsize=4096)(_custom_metadata)
_view_numbers: Final = attrgetter(
    "state", "digestType", "ensembleSize", "quorumSize", "ackQuorumSize", "length", "lastEntryId", "ctime", "cToken"
)


def _from_message(data: bytes, version: int, at: str) -> LedgerMetadata:
    view = parse_message(_messages().LedgerMetadataView, data, f"{at}Ledger metadata")
    try:
        return _from_view(view, version, len(data))
    except (Corrupt, Unsupported) as error:
        raise type(error)(f"{at}{error}") from error


def _from_view(view: LedgerMetadataView, version: int, size_bytes: int) -> LedgerMetadata:
    number, digest, ensemble_size, write_quorum, ack_quorum, length, last_entry_id, ctime_ms, c_token = _view_numbers(
        view
    )
    state, digest_type = _STATES.get(number), _DIGEST_TYPES.get(digest)
    if state is None:
        raise Corrupt("Ledger metadata lacks state")
    if digest_type is None and digest:
        raise Unsupported(f"Ledger metadata names the unknown digest type {digest}")
    if state is not LedgerState.CLOSED:
        length, last_entry_id = 0, INVALID_ENTRY_ID
    if ack_quorum == _ABSENT_32:
        ack_quorum = write_quorum
    # CRC32 is the format's default of a digest type that is absent beside a password.
    password = view.password or (b"" if view.HasField("password") else None)
    is_small = size_bytes <= _SHARED_SIZE_BYTES_MAX
    ensembles = (_known_ensembles if is_small else _ensembles)(
        tuple(view.segment[:]),
        ensemble_size,
        write_quorum,
        ack_quorum,  # A slice is a list at once.
    )
    custom = (_known_custom_metadata if is_small else _custom_metadata)(tuple(view.customMetadata[:]))
    return tuple.__new__(  # A call of the class takes twice as long.
        LedgerMetadata,
        (
            ensemble_size,
            write_quorum,
            ack_quorum,
            None if password is None else digest_type or DigestType.CRC32,
            password,
            ensembles,
            state,
            length,
            last_entry_id,
            None if ctime_ms == _ABSENT_64 else ctime_ms,
            custom,
            None if c_token == _ABSENT_64 else c_token,
            version,
        ),
    )


@dataclass(frozen=True, slots=True)
class Cookie:
    """The cookie that ties a bookie's directories to its id: `VERSION` in each directory, a node in the store.

    Directories are as configured, without `/current`; `index_dirs` and `instance_id` may be unknown. Source: Cookie.
    """

    bookie_id: str
    journal_dirs: tuple[str, ...]
    ledger_dirs: tuple[str, ...]
    instance_id: str | None = None
    index_dirs: tuple[str, ...] | None = None
    layout_version: int = COOKIE_LAYOUT_VERSION

    @classmethod
    def parse(cls, data: bytes, where: str = "") -> Cookie:
        """Return the cookie in a `VERSION` file or a store's value.

        Raises Unsupported for a layout older than 3, else Corrupt; `where` names the file or node.
        """
        at = f"{where}: " if where else ""
        first, _, rest = bytes(data).partition(b"\n")
        try:
            version = _integer(first.decode().strip(), 32, "")
        except (UnicodeDecodeError, Corrupt) as error:
            raise Corrupt(f"{at}Cookie does not begin with its layout version") from error
        if version < 3:
            raise Unsupported(f"{at}Cookie has layout version {version}, 3 and later are known")
        if version == 3:
            lines = [*_LINE_END.split(decoded(rest, f"{at}Cookie")), "", ""]
            bookie_id, journal_dirs, ledger_dirs = lines[:3]
            instance_id = index_dirs = None
        else:
            message = parse_text("CookieFormat", rest, f"{at}Cookie")
            bookie_id, journal_dirs, ledger_dirs = message.bookieHost, message.journalDir, message.ledgerDirs
            instance_id, index_dirs = message.instanceId or None, message.indexDirs or None
        if not bookie_id or not journal_dirs or not ledger_dirs:
            raise Corrupt(f"{at}Cookie does not name its bookie, journal directories and ledger directories")
        return cls(
            bookie_id=bookie_id,
            journal_dirs=tuple(journal_dirs.split(",")),
            ledger_dirs=_decode_dirs(ledger_dirs, at),
            instance_id=instance_id,
            index_dirs=None if index_dirs is None else _decode_dirs(index_dirs, at),
            layout_version=version,
        )

    def serialize(self) -> bytes:
        """Return the bytes of the `VERSION` file, in the current layout (as plain lines for a cookie of layout 3)."""
        if self.layout_version == 3:
            lines = (self.bookie_id, ",".join(self.journal_dirs), _encode_dirs(self.ledger_dirs))
            return f"{COOKIE_LAYOUT_VERSION}\n{lines[0]}\n{lines[1]}\n{lines[2]}\n".encode()
        message = _messages().CookieFormat(
            bookieHost=self.bookie_id,
            journalDir=",".join(self.journal_dirs),
            ledgerDirs=_encode_dirs(self.ledger_dirs),
            instanceId=self.instance_id,
            indexDirs=None if self.index_dirs is None else _encode_dirs(self.index_dirs),
        )
        return f"{COOKIE_LAYOUT_VERSION}\n{print_text(message)}".encode("ascii")

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their JSON names."""
        return {
            "layoutVersion": self.layout_version,
            "bookieId": self.bookie_id,
            "journalDirs": list(self.journal_dirs),
            "ledgerDirs": list(self.ledger_dirs),
            "indexDirs": None if self.index_dirs is None else list(self.index_dirs),
            "instanceId": self.instance_id,
        }

    def differences(self, stored: Cookie) -> Iterator[CookieDifference]:
        """Yield the fields in which the cookie `stored` differs from that of a bookie configured as `self`."""
        own, other = (
            (
                (cookie.bookie_id,), cookie.journal_dirs, cookie.ledger_dirs,
                cookie.index_dirs or cookie.ledger_dirs, (cookie.instance_id,) if cookie.instance_id else (),
            )
            for cookie in (self, stored)
        )  # fmt: skip
        for (name, words), mine, theirs in zip(_COOKIE_FIELDS.items(), own, other, strict=True):
            if mine != theirs:
                yield CookieDifference(name, words, mine, theirs)


class CookieDifference(NamedTuple):
    """A field of a cookie, with its name in words, and its differing values: `mine` expected, `theirs` found."""

    name: str
    words: str
    mine: tuple[str, ...]
    theirs: tuple[str, ...]

    @property
    def is_expansion(self) -> bool:
        """Return whether ledger or index directories are only added, or reordered."""
        return self.name in ("ledgerDirs", "indexDirs") and set(self.mine) >= set(self.theirs)

    def __str__(self) -> str:
        mine, theirs = (",".join(values) or None for values in (self.mine, self.theirs))
        if self.name in ("ledgerDirs", "indexDirs"):
            return f"the {self.words} {mine}, the cookie has {theirs}"
        return f"the {self.words} {mine!r}, the cookie has {theirs!r}"


_COOKIE_FIELDS: Final = {
    "bookieId": "bookie id is",
    "journalDirs": "journal directories are",
    "ledgerDirs": "ledger directories are",
    "indexDirs": "index directories are",
    "instanceId": "instance id is",
}


def _encode_dirs(dirs: tuple[str, ...]) -> str:
    return "\t".join((str(len(dirs)), *dirs))


def _decode_dirs(text: str, at: str) -> tuple[str, ...]:
    count, *dirs = text.split("\t")
    if _integer(count, 32, at) != len(dirs):
        raise Corrupt(f"{at}Cookie says {count} directories and names {len(dirs)}")
    return tuple(dirs)


@dataclass(frozen=True, slots=True)
class LedgerLayout:
    """The `LAYOUT` node, which names the ledger manager of a cluster. Source: LedgerLayout."""

    format_version: int
    factory_class: str
    manager_version: int

    @classmethod
    def parse(cls, data: bytes, where: str = "") -> LedgerLayout:
        """Return the layout in a store's value. Raises Unsupported for format versions except 1 and 2, else Corrupt."""
        at = f"{where}: " if where else ""
        lines = decoded(bytes(data), f"{at}Layout").split("\n")
        version = _integer(lines[0], 32, f"{at}Layout: ")
        if not 1 <= version <= LAYOUT_FORMAT_VERSION:
            raise Unsupported(f"{at}Layout has format version {version}, 1 and 2 are known")
        factory_class, colon, number = (lines[1] if len(lines) > 1 else "").partition(":")
        if not colon or not factory_class or ":" in number:
            raise Corrupt(f"{at}Layout does not name its ledger manager as CLASS:VERSION")
        return cls(version, _LAYOUT_TYPES.get(factory_class, factory_class), _integer(number, 32, f"{at}Layout: "))

    def serialize(self) -> bytes:
        """Return the bytes of the `LAYOUT` node, in format version 2, without a final line end."""
        return f"{LAYOUT_FORMAT_VERSION}\n{self.factory_class}:{self.manager_version}".encode()


class BookieEndpoint(NamedTuple):
    """An address where a bookie serves `protocol` (`bookie-rpc`, `http`). Source: BookieServiceInfo.BookieEndpoint."""

    id: str
    port: int
    host: str
    protocol: str
    auth: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BookieServiceInfo:
    """The endpoints and properties that a bookie registers. Source: BookieServiceInfo."""

    endpoints: tuple[BookieEndpoint, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes, where: str = "") -> BookieServiceInfo:
        """Return the service info in a registration node, an empty one for empty bytes (legacy). Raises Corrupt."""
        at = f"{where}: " if where else ""
        message = parse_message(_messages().BookieServiceInfoFormat, data, f"{at}Bookie service info")
        return cls(
            tuple(
                BookieEndpoint(
                    found.id, found.port, found.host, found.protocol, tuple(found.auth), tuple(found.extensions)
                )
                for found in message.endpoints
            ),
            dict(message.properties),
        )

    def serialize(self) -> bytes:
        """Return the bytes of the registration node."""
        message = _messages().BookieServiceInfoFormat(properties=self.properties)
        for endpoint in self.endpoints:
            message.endpoints.add(**endpoint._asdict())
        return bytes(message.SerializeToString(deterministic=True))


def _integer(text: str, bits: int, at: str) -> int:
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise Corrupt(f"{at}{text[:80]!r} is not a number of {bits} bits")
    return value


def decoded(data: bytes, what: str) -> str:
    """Return the UTF-8 text in `data`; `what` names it in errors. Raises Corrupt."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"{what} is not UTF-8") from error


def parse_message(kind: type[M], data: bytes, what: str) -> M:
    """Return the protobuf message in `data`; `what` names it in errors. Raises Corrupt.

    Checks that its strings are UTF-8: another string is bytes, or raises UnicodeDecodeError when read, depending on
    protobuf's build.
    """
    message = kind()
    try:
        message.ParseFromString(bytes(data))
    except _decode_error() as error:
        raise Corrupt(f"{what} is not a protobuf message of that kind") from error
    return _complete(message, what, len(data))


def parse_text(kind: str, data: bytes, what: str) -> Any:
    """Return the message `kind` of data_formats.proto in the text `data`; `what` names it in errors. Raises Corrupt."""
    from google.protobuf import text_format

    message = getattr(_messages(), kind)()
    text = decoded(data, what)
    try:
        text_format.Merge(text, message)
    except (text_format.ParseError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Corrupt(f"{what} is not a text of that kind: {reason}") from error
    return _complete(message, what, len(data))


def _complete(message: M, what: str, size_bytes: int) -> M:
    if not message.IsInitialized():
        if size_bytes > _NAMED_SIZE_BYTES_MAX:
            raise Corrupt(f"{what} lacks required fields")
        missing: list[str] = []
        message.IsInitialized(missing)  # type: ignore[call-arg]
        raise Corrupt(f"{what} lacks {', '.join(missing)}")
    if not _is_utf8(message):
        raise Corrupt(f"{what} has a text that is not UTF-8")
    return message


def _is_utf8(message: Message) -> bool:
    """Return whether every string is UTF-8; protobuf returns others as bytes, or raises, depending on its build."""
    try:
        for name, is_repeated, is_message in _text_fields(message.DESCRIPTOR):
            value = getattr(message, name)
            if isinstance(value, Mapping):
                value = [*value.keys(), *value.values()]
            for item in value if is_repeated else (value,):
                if not _is_utf8(item) if is_message else isinstance(item, bytes):
                    return False
    except UnicodeDecodeError:
        return False
    return True


@lru_cache
def _text_fields(descriptor: Descriptor) -> tuple[tuple[str, bool, bool], ...]:
    """Return (name, is repeated, is a message) of the string and message fields; maps count as strings."""
    return tuple(
        (field.name, field.is_repeated, (kind := field.message_type) is not None and not kind.GetOptions().map_entry)
        for field in descriptor.fields
        if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)
    )


_ESCAPES: Final = {
    **{byte: chr(byte) for byte in range(0x20, 0x7F)},
    **{ord(char): f"\\{name}" for char, name in zip("\b\f\n\r\t\\'\"", "bfnrt\\'\"", strict=True)},
}


def print_text(message: Message, indent: str = "") -> str:
    """Return the protobuf text format of `message`, character for character as BookKeeper 4.18 prints it.

    Older releases print bytes 7 and 11 as \\a and \\v, not in octal; every release reads both. Source: LightProto.
    """
    return "".join(_text_lines(message, indent))


def _text_lines(message: Message, indent: str) -> Iterator[str]:
    for descriptor, value in message.ListFields():
        for item in value if descriptor.is_repeated else (value,):
            if descriptor.message_type is not None:
                yield f"{indent}{descriptor.name} {{\n{print_text(item, indent + '  ')}{indent}}}\n"
                continue
            if descriptor.enum_type is not None:
                text = descriptor.enum_type.values_by_number[item].name
            elif isinstance(item, bool):
                text = "true" if item else "false"
            elif isinstance(item, str | bytes):
                data = item.encode() if isinstance(item, str) else item
                text = '"' + "".join(_ESCAPES.get(byte) or f"\\{byte:03o}" for byte in data) + '"'
            else:
                text = str(item)
            yield f"{indent}{descriptor.name}: {text}\n"
