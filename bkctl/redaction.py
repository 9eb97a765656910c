"""Recognition and removal of secrets in settings, command lines and URIs."""

from __future__ import annotations

import re
from typing import Any, Final

#: Parts of the names of settings whose values are secrets, as part of a regular expression.
SECRET_WORDS: Final = (
    r"passw|passphrase|pwd|secret|token|credential|(?:access|account|api|private|master)[._-]?key"
    r"|\bsas\b|\bsig\b|signature"
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


#: Secrets by their own form: private keys, tokens of HTTP, of JWT, and of well-known services.
_FORMS: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:bearer|basic|digest)\s+[\w+/=.~-]{6,}"
    r"|\beyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)?"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b|\bAIza[\w-]{20,}|\bgh[a-z]_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bxox[a-z]-[\w-]{8,}|\bsk[-_][\w-]{16,}",
    re.DOTALL | re.IGNORECASE,
)
#: A name, and everything behind it in its line: `password = a b`, `"token": "x"`, `--secret x`, `Cookie: x`.
_NAMED: Final = re.compile(
    rf"([\w.-]*(?:{SECRET_WORDS}|authorization|cookie:|sasl\.jaas)[\w.-]*)([\"']?(?:\s*[:=]\s*|\s+))(?=\S)[^\n]*",
    re.IGNORECASE,
)


def without_secrets(text: str, shown: str) -> str:
    """Return a text of any kind (log, settings, metrics) with what may be a secret as `shown`; rather more than less.

    A secret is known by its form, or by a name before it: the rest of its line is hidden then.
    """

    def hide(match: re.Match[str]) -> str:
        return match[0] if _ABOUT_A_SECRET.search(match[1]) else f"{match[1]}{match[2]}{shown}"

    lines = _FORMS.sub(shown, text).split("\n")
    return "\n".join(_NAMED.sub(hide, without_user_info(line, shown)) for line in lines)


def without_secrets_in(document: Any, shown: str) -> Any:
    """Return a JSON document with the values of secret names, and secrets in its texts, as `shown`."""
    if isinstance(document, dict):
        return {
            name: shown if is_secret_name(str(name)) else without_secrets_in(value, shown)
            for name, value in document.items()
        }
    if isinstance(document, list | tuple):
        return [without_secrets_in(each, shown) for each in document]
    return without_secrets(document, shown) if isinstance(document, str) else document
