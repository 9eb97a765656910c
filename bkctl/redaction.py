"""Recognition and removal of secrets in settings, command lines and URIs."""

from __future__ import annotations

import re
from typing import Any, Final

#: Parts of the names of settings whose values are secrets, as part of a regular expression.
SECRET_WORDS: Final = (
    r"passw|passphrase|pwd|secret|token|credential|(?:access|account|api|private|master)[._-]?key"
    r"|authentication_?param|\bsas\b|\bsig\b|signature"
)
#: Names of settings only: the words are common in texts.
_NAMES: Final = r"(?<!by)(?<!com)pass(?=\b|_)|\bauthorization\b|\bcookie\b|sasl\.jaas"
_SECRET_NAME: Final = re.compile(f"{SECRET_WORDS}|{_NAMES}", re.IGNORECASE)
#: A setting whose value is the place of a secret, or its use.
_ABOUT: Final = ("path", "file", "dir", "directory", "enable", "enabled", "type", "class")
#: Greedy: a password may have `/`, `@` and spaces in it, so that the last `@` ends it.
_NOT_IN_NAMES: Final = re.compile(r"[^\w.-]", re.ASCII)
_USER_INFO: Final = re.compile(r"(://)(?!/).*@", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Return True if the setting `name` holds a secret; one that names a file or a class does not."""
    return _SECRET_NAME.search(name) is not None and not name.lower().endswith(_ABOUT)


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
    end = text.rfind("@") + 1
    return _USER_INFO.sub(lambda match: f"{match[1]}{shown}@", text[:end]) + text[end:]


_KEY: Final = "[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
#: Secrets by their own form: private keys, tokens of HTTP, of JWT, and of well-known services, keytabs, hashes.
_FORMS: Final = re.compile(
    rf"-----BEGIN {_KEY}.*?(?:-----END {_KEY}|\Z)|\A[\w+/=\s]*-----END {_KEY}"
    r"|\b(?:bearer|basic)[ \t]+[\w+/=.~-]{6,}|\bdigest[ \t:]+[^\s:]+:\S+"
    r"|\beyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)?"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b|\bAIza[\w-]{20,}|\bgh[a-z]_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bxox[a-z]-[\w-]{8,}|\bsk[-_][\w-]{16,}|\bhv[sbr]\.[\w-]{16,}"
    r"|\bBQIA[\w+/]{16,}=*|\$(?:\d\w?|y|apr1|argon2\w*|scrypt)\$[\w$,=./+-]{8,}"
    r"|(?<=jdbc:oracle:thin:)[^\s@]{1,200}+(?=@)|(?<=\s-u )[^\s:/]+:(?!/)\S+|(?<=--user[ =])[^\s:/]+:(?!/)\S+",
    re.DOTALL | re.IGNORECASE,
)
_REST: Final = r"[\w.-]{0,60}+" + "".join(f"(?<!{each})" for each in _ABOUT)
_ANY_NAME: Final = rf"(?:{SECRET_WORDS}|{_NAMES}){_REST}"
#: A name, and everything behind it in its line: `password = a b`, `"token": "x"`, `--secret x`, `Cookie: x`, `<pwd>x`.
_NAMED: Final = re.compile(
    rf"({_ANY_NAME}(?=[\"'\s]*+[:=>]|[\"']?%3)|(?:{SECRET_WORDS}|-(?:store|key)?pass\b){_REST}(?=[\"']?\s))"
    r"([\"']?\s*+(?:[:=>]|%3[ad])?\s*+)(?=\S)[^\n]*",
    re.IGNORECASE,
)
#: A name as the value of an element of XML or of a pair, and everything behind its value.
_PAIRED: Final = re.compile(
    rf"({_ANY_NAME})(</name>\s*+<value>|[\"']?,?\s*+[\"']?value[\"']?\s*+[:=]\s*+)(?=\S)[^\n]*", re.IGNORECASE
)
#: A name whose value is in the following lines, further right.
_OPENED: Final = re.compile(rf"\s*[\"'\w.-]*?{_ANY_NAME}[\"']?\s*[:=]\s*(?:[|>][+-]?|\[|\{{)?\s*", re.IGNORECASE)


_NAME_LENGTH_MAX: Final = 200
_INDENT_MAX: Final = 1 << 30


def without_secrets(text: str, shown: str) -> str:
    """Return a text of any kind (log, settings, metrics) with what may be a secret as `shown`; rather more than less.

    A secret is known by its form, or by a name before it: the rest of its line is hidden then, and lines that
    continue it.
    """
    hidden = rf"\g<1>\g<2>{shown}"
    lines = _PAIRED.sub(hidden, _FORMS.sub(shown, text)).split("\n")
    left = _INDENT_MAX
    continues = False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if continues or indent > left:
            lines[number] = " " * indent + shown
            continues = continues and line.endswith("\\")
            continue
        left = indent if _OPENED.fullmatch(line[:_NAME_LENGTH_MAX]) else _INDENT_MAX
        found = _NAMED.sub(hidden, without_user_info(line, shown))
        continues = found != line and line.endswith("\\")
        lines[number] = found
    return "\n".join(lines)


def without_secrets_in(document: Any, shown: str) -> Any:
    """Return a JSON document with the values of secret names, and secrets in its texts, as `shown`.

    The value of a pair (`{"name": "password", "value": "x"}`) counts as the value of the name.
    """
    if isinstance(document, dict):
        pair = any(is_secret_name(str(document.get(each))) for each in ("name", "key"))
        return {
            without_secrets(str(name), shown): shown
            if is_secret_name(str(name)) or (pair and str(name) not in ("name", "key"))
            else without_secrets_in(value, shown)
            for name, value in document.items()
        }
    if isinstance(document, list | tuple):
        return [without_secrets_in(each, shown) for each in document]
    return without_secrets(document, shown) if isinstance(document, str) else document
