"""Values of Pulsar's nodes in the metadata store: managed ledgers (topics), cursors, schemas; binary, text, compressed.

And the message ids in the custom metadata of compacted ledgers. Source: MetaStoreImpl, CompressionCodecProvider,
BookkeeperSchemaStorage, MessageIdData. The messages are in managed_ledger.proto.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from bkctl.errors import Corrupt, Unsupported

if TYPE_CHECKING:
    from google.protobuf.message import Message

    M = TypeVar("M", bound=Message)

_MAGIC: Final = b"\x47\x78"
_HEADER_SIZE: Final = 6
#: Values that Pulsar 1.x wrote as text begin with the name of a field; binary ones never with a letter.
_TEXT: Final = (b"ledgerInfo", b"cursorsLedgerId", b"terminatedPosition")
#: The bytes that a value may have, uncompressed: nodes hold 1 MiB.
_SIZE_BYTES_MAX: Final = 256 << 20
#: By the number of Pulsar's CompressionType: its name, and that of Arrow's codec.
_CODECS: Final = {1: ("LZ4", "lz4_raw"), 2: ("ZLIB", None), 3: ("ZSTD", "zstd"), 4: ("SNAPPY", "snappy")}


def parse_message(kind: type[M], data: bytes, where: str) -> M:
    """Return the message of `kind` in the value `data` of a node; `where` names the node in errors.

    Raises Corrupt; Unsupported for an unknown compression, or one whose library is not installed.
    """
    from google.protobuf import text_format
    from google.protobuf.message import DecodeError

    message = kind()
    try:
        if data.startswith(_TEXT):
            text_format.Parse(data, message, allow_unknown_field=True)
        else:
            message.ParseFromString(_decompressed(data, where) if data.startswith(_MAGIC) else data)
    except (DecodeError, text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{where} is not a {kind.__name__}: {error}") from error
    if not message.IsInitialized():
        raise Corrupt(f"{where} is not a {kind.__name__}: required fields are missing")
    return message


def message_id_text(data: bytes) -> str | None:
    """Return the message id in `data` as `ledger:entry`, None for other bytes."""
    from google.protobuf.message import DecodeError

    from bkctl.formats.managed_ledger_pb2 import Position

    found = Position()  # It has the first fields of MessageIdData, which alone are required.
    try:
        found.ParseFromString(data)
    except DecodeError:
        return None
    return f"{found.ledgerId}:{found.entryId}" if found.IsInitialized() else None


def _decompressed(data: bytes, where: str) -> bytes:
    from google.protobuf.message import DecodeError

    from bkctl.formats.managed_ledger_pb2 import CompressedInfo

    end = _HEADER_SIZE + int.from_bytes(data[2:_HEADER_SIZE])
    header = CompressedInfo()
    try:
        header.ParseFromString(data[_HEADER_SIZE:end])
    except DecodeError as error:
        raise Corrupt(f"{where}: the header of its compression is damaged") from error
    size, number = header.uncompressedSize, header.compressionType
    if end > len(data) or not header.IsInitialized() or not 0 <= size <= _SIZE_BYTES_MAX:
        raise Corrupt(f"{where}: the header of its compression is damaged")
    if number == 0 or size == 0:
        return data[end:]
    if number not in _CODECS:
        raise Unsupported(f"{where}: its compression {number} is unknown", hint="1 to 4: LZ4, ZLIB, ZSTD, SNAPPY")
    name, codec = _CODECS[number]
    try:
        found = _inflate(data[end:], size) if codec is None else _arrow(codec).decompress(data[end:], size).to_pybytes()
    except ImportError as error:
        raise Unsupported(
            f"{where} is compressed with {name}, which needs the library pyarrow", hint="pip install 'bkctl[facts]'"
        ) from error
    except (ValueError, OSError) as error:
        raise Corrupt(f"{where}: not {name}: {error}") from error
    if len(found) != size:
        raise Corrupt(f"{where}: {len(found)} bytes after decompression ({name}), {size} expected")
    return found


def _inflate(data: bytes, size: int) -> bytes:
    import zlib

    try:
        return zlib.decompressobj().decompress(data, size)
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _arrow(codec: str) -> Any:
    import pyarrow

    return pyarrow.Codec(codec)
