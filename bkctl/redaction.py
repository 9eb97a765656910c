"""Recognition and removal of secrets in settings, command lines and URIs."""

from __future__ import annotations

import re
from typing import Final

#: Parts of the names of settings whose values are secrets, as part of a regular expression.
SECRET_WORDS: Final = (
    r"passw|secret|token|credential|(?:access|account|api|private|master)[._-]?key|\bsas\b|\bsig\b|signature"
)
_SECRET_NAME: Final = re.compile(SECRET_WORDS, re.IGNORECASE)
#: A setting whose value is the place of a secret, or its use.
_ABOUT_A_SECRET: Final = re.compile(r"(?:path|file|dir|directory|enabled?|type|class)$", re.IGNORECASE)
#: Greedy: a password may have `/`, `@` and spaces in it, so that the last `@` ends it.
_NOT_IN_NAMES: Final = re.compile(r"[^\w.-]", re.ASCII)
_USER_INFO: Final = re.compile(r"(://)(?!/).*@", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Return True if the setting `name` holds a secret; one that names a file or a class does not."""
    return _SECRET_NAME.search(name) is not None and _ABOUT_A_SECRET.search(name) is None


def without_secret_values(text: str, shown: str) -> str:
    """Return `text` with everything after the first `NAME=` that `is_secret_name` finds as `shown`.

    The name may stand anywhere: in a query (`?token=…`), or in another setting's value (`…Options=-Dpassword=…`).
    """
    size = 0
    for piece in text.split("=")[:-1]:
        size += len(piece) + 1
        if is_secret_name(_NOT_IN_NAMES.split(piece.rstrip())[-1]):
            return text[:size] + shown
    return text


def without_user_info(text: str, shown: str) -> str:
    """Return `text` with user and password, between `://` and `@` in a URI, as `shown`.

    Where several URIs or an `@` further right leave it open how long the password is, more is hidden, never less.
    """
    return _USER_INFO.sub(lambda match: f"{match[1]}{shown}@", text)
