"""JSON values as YAML, in block style."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

#: Strings that no YAML reader takes for anything else, so that they need no quotes.
_PLAIN: Final = re.compile(
    r"(?!(?:true|false|yes|no|on|off|null|y|n)\Z)[A-Za-z_/][\w./@+-]*(?: [\w./@+-]+)*", re.ASCII | re.I
)
#: Characters that YAML does not take unescaped, beside those that JSON escapes.
_UNPRINTABLE: Final = re.compile("[\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufffe\uffff\u2028\u2029\x85]")


def yaml_items(lines: str) -> str:
    """Return `lines` of ndjson as items of a YAML list."""
    return "".join("\n".join(_block([json.loads(line)], "")) + "\n" for line in lines.splitlines())


def yaml_text(document: Any) -> str:
    """Return one JSON value as a YAML document."""
    return "\n".join(_block(document, "")) + "\n"


def _block(value: Any, indent: str) -> Iterator[str]:
    """Yield the lines of a value that begins on a line of its own."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if isinstance(item, dict | list) and item:
                yield f"{indent}{_scalar(key)}:"
                yield from _block(item, indent + "  ")
            else:
                yield f"{indent}{_scalar(key)}: {_scalar(item)}"
    elif isinstance(value, list) and value:
        for item in value:
            first, *others = _block(item, indent + "  ")
            yield f"{indent}- {first[len(indent) + 2 :]}"
            yield from others
    else:
        yield f"{indent}{_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
