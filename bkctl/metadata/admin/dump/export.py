"""Writing an export."""

from __future__ import annotations

import hashlib
import json
from binascii import b2a_base64
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.disk import atomic_write
from bkctl.errors import AlreadyExists, UsageError
from bkctl.metadata.admin.dump.records import FORMAT, KINDS, VERSION, DumpHeader, DumpSource

_WRITE_SIZE_BYTES: Final = 1 << 20


class ExportSummary(NamedTuple):
    """A written export: records by kind, size, and the SHA-256 in its last line."""

    counts: dict[str, int]
    size_bytes: int
    sha256: str


def write_export(
    source: DumpSource, write: Callable[[bytes], object], progress: Callable[[int], None] = lambda _: None
) -> ExportSummary:
    """Write all records of `source` as an export. Any error of the source or `write` leaves the export incomplete."""
    digest = hashlib.sha256()
    counts: Counter[str] = Counter()
    size = 0

    def put(lines: list[str]) -> None:
        nonlocal size
        data = "".join(lines).encode("ascii")
        digest.update(data)
        write(data)
        size += len(data)

    lines = [_json_line(_header_fields(source.header))]
    held = 0
    for count, (kind, key, value, ctime_ms) in enumerate(source.records(), 1):
        ctime = "" if ctime_ms is None else f',"ctime":{ctime_ms}'
        name = key if kind in ("ledger", "mark") else json.dumps(key)[1:-1]
        lines.append(f'{{"kind":"{kind}","key":"{name}","value":"{_base64(value)}"{ctime}}}\n')
        counts[kind] += 1
        held += len(lines[-1])
        if held >= _WRITE_SIZE_BYTES:
            put(lines)
            lines, held = [], 0
        progress(count)
    put(lines)
    sha256 = digest.hexdigest()
    end = _json_line({"kind": "end", "records": counts.total(), "sha256": sha256})
    write(end.encode("ascii"))
    return ExportSummary({kind: counts[kind] for kind in KINDS}, size + len(end), sha256)


def _header_fields(header: DumpHeader) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "time": header.time,
        "metadataUri": header.metadata_uri,
        "instanceId": header.instance_id,
        "layout": None if header.layout is None else _base64(header.layout),
    }


def _json_line(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


def export_to_file(
    source: DumpSource, path: Path, *, overwrite: bool = False, progress: Callable[[int], None] = lambda _: None
) -> ExportSummary:
    """Write an export to `path`, readable by its owner only. The file appears once it is complete and on disk.

    Raises AlreadyExists for an existing file, unless `overwrite`; UsageError for a directory; OSError.
    """
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is not a regular file, and would be replaced by one", hint="write to - and redirect stdout"
        )
    if path.exists() and not overwrite:
        raise AlreadyExists(f"{path} exists", hint="choose another file, or add --overwrite")
    with atomic_write(path) as file:  # readable by its owner only: ledger metadata holds passwords
        return write_export(source, file.write, progress)


def _base64(value: bytes) -> str:
    return b2a_base64(value, newline=False).decode("ascii")
