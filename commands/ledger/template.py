"""Entries in a form that the user gives, in kcat's way: `%e %s\\n`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from bkctl.columns import base64_text
from bkctl.errors import UsageError
from bkctl.ids import LedgerId

#: The bytes to write for an entry.
EntryBytes = Callable[[Any], bytes]

_FIELDS: Final[dict[str, EntryBytes]] = {
    "e": lambda entry: b"%d" % entry.entry_id,
    "s": lambda entry: bytes(entry.payload),
    "S": lambda entry: b"%d" % len(entry.payload),
    "x": lambda entry: entry.payload.hex().encode(),
    "b": lambda entry: base64_text(entry.payload).encode(),
    "c": lambda entry: b"%d" % entry.last_add_confirmed,
    "n": lambda entry: b"%d" % entry.length,
}
FIELDS_HELP: Final = (
    "%e entry id, %s payload, %S its bytes, %x payload in hex, %b in base64, %l ledger, %c last add confirmed, "
    "%n ledger length so far, %% a percent sign, \\n \\t \\0 \\xHH"
)
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_PART: Final = re.compile(r"%(?P<field>.?)|\\x(?P<hex>[0-9a-fA-F]{2})|\\(?P<escape>.?)|[^%\\]+", re.DOTALL)


def template_form(template: str, ledger: LedgerId) -> EntryBytes:
    """Return the function that writes an entry of `ledger` as `template` says. Raises UsageError."""
    parts = _parts(template, "--template", ledger)
    return lambda entry: b"".join([part if isinstance(part, bytes) else part(entry) for part in parts])


def raw_form(delimiter: str | None) -> EntryBytes:
    """Return the function that writes an entry's payload, and `delimiter` behind it. Raises UsageError."""
    if not delimiter:
        return lambda entry: entry.payload
    end = b"".join(part for part in _parts(delimiter, "--delimiter", None) if isinstance(part, bytes))
    return lambda entry: b"%b%b" % (entry.payload, end)


def _parts(text: str, flag: str, ledger: LedgerId | None) -> list[bytes | EntryBytes]:
    """Return the parts of `text`: bytes, and fields where there is a ledger (else a percent sign is itself)."""
    parts: list[bytes | EntryBytes] = []
    for match in _PART.finditer(text):
        field, digits, escape = match["field"], match["hex"], match["escape"]
        if digits is not None:
            parts.append(bytes.fromhex(digits))
        elif escape is not None:
            if escape not in _ESCAPES:
                raise UsageError(
                    f"{flag} {text!r}: \\{escape} is not an escape", hint="use \\n, \\t, \\r, \\0, \\xHH or \\\\"
                )
            parts.append(_ESCAPES[escape])
        elif field is None or ledger is None:
            parts.append(match[0].encode("utf-8", "surrogateescape"))
        elif field == "%":
            parts.append(b"%")
        elif field == "l":
            parts.append(str(ledger).encode())
        elif field in _FIELDS:
            parts.append(_FIELDS[field])
        else:
            raise UsageError(f"{flag} {text!r}: %{field} is not a field", hint=FIELDS_HELP)
    return parts
