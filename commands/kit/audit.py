"""The audit log: user, command, time, place and outcome of every change.

One JSON object a line. A command that changes something writes `"event":"begin"` before its first change and
`"event":"end"` with its exit code; a begin without an end is a command that was killed. The file is
`bkctl/audit.ndjson` in the user's state directory (`$XDG_STATE_HOME`, else `~/.local/state`); BKCTL_AUDIT_LOG names
another, or `none`. `acceptedLoss` says what a destructive command was allowed to destroy, by --yes or on the terminal.
Passwords on the command line are written as `***`. At 8 MiB the file becomes `audit.ndjson.1`, replacing the last one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from bkctl.columns import iso_time
from bkctl.redaction import SECRET_WORDS, without_secret_values, without_user_info

SIZE_BYTES_MAX: Final = 8 << 20
NONE: Final = "none"
_HIDDEN: Final = "***"
_SECRET_OPTION: Final = re.compile(r"--?[\w-]*(?:password|secret|token|master-key)", re.ASCII | re.IGNORECASE)
#: A JSON object or array with a secret in it.
_SECRET_JSON: Final = re.compile(
    rf"(?:--?[\w-]+=)?(?=\s*[{{\[].*(?:{SECRET_WORDS}))", re.ASCII | re.IGNORECASE | re.DOTALL
)


def state_directory(environment: Mapping[str, str]) -> Path:
    """Return the user's state directory for bkctl: `$XDG_STATE_HOME/bkctl`, else `~/.local/state/bkctl`."""
    return Path(environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "bkctl")


def audit_file(environment: Mapping[str, str]) -> Path | None:
    """Return the path of the log; None if BKCTL_AUDIT_LOG switches it off."""
    given = environment.get("BKCTL_AUDIT_LOG")
    if given:
        return None if given == NONE else Path(given)
    return state_directory(environment) / "audit.ndjson"


def shown_uri(uri: str) -> str:
    """Return a metadata URI as it may be printed: user and password as `***`."""
    return without_user_info(uri, _HIDDEN)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the command line with the values of options that hold secrets, and user names in URIs, as `***`."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide:
            shown.append(_HIDDEN)
            hide = False
        elif _SECRET_OPTION.fullmatch(name):
            shown.append(f"{name}={_HIDDEN}" if equals else word)
            hide = not equals
        elif match := _SECRET_JSON.match(word):
            shown.append(f"{match[0]}{_HIDDEN}")
        else:
            shown.append(shown_uri(without_secret_values(word, _HIDDEN)))
    return shown


class Audit:
    """The log's two lines for one run of a command that changes something; a failed write is kept as `problem`."""

    def __init__(self, path: Path, words: Sequence[str]) -> None:
        self.path = path
        self._began = time.monotonic()
        self._entry: dict[str, Any] = {
            "id": os.urandom(8).hex(),
            "user": user_name(),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "directory": None,
            "command": without_secrets(words),
        }
        with suppress(OSError):
            self._entry["directory"] = os.getcwd()
        self._has_begun = False
        #: The error that kept a line from being written.
        self.problem: OSError | None = None

    @property
    def id(self) -> str:
        """The id of the run in the log."""
        return str(self._entry["id"])

    def note(self, **fields: str) -> None:
        """Add fields to the lines that are still to be written."""
        self._entry.update(fields)

    def begin(self) -> None:
        """Write the first line; a second call does nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._write({"event": "begin"})

    def end(self, exit_code: int, error: str | None) -> None:
        """Write the last line, if there was a first: before, nothing can have been changed."""
        if not self._has_begun:
            return
        # Errors repeat what they were given.
        shown = {"error": without_secret_values(error, _HIDDEN)} if error else {}
        seconds = round(time.monotonic() - self._began, 3)
        self._write({"event": "end", "exitCode": exit_code, **shown, "seconds": seconds})

    def _write(self, fields: Mapping[str, Any]) -> None:
        import json

        moment = iso_time(time.time_ns() // 1_000_000)
        line = json.dumps({"time": moment, **fields, **self._entry}, ensure_ascii=True) + "\n"
        try:
            _append(self.path, line.encode("ascii"))
        except OSError as error:
            self.problem = error


def _append(path: Path, line: bytes) -> None:
    """Append a line in one write, so that lines of several processes stay whole."""
    from bkctl.disk import make_private_directory

    make_private_directory(path.parent)
    # A pipe without a reader must not hold up the command.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_size >= SIZE_BYTES_MAX:
            file = _rotate(path, file, status)
        elif stat.S_ISREG(status.st_mode) and not _ends_with_a_line(path):
            line = b"\n" + line
        written = os.write(file, line)
        if written < len(line):
            raise OSError(errno.EIO, "Only part of a line could be written", str(path))
    finally:
        os.close(file)


def _ends_with_a_line(path: Path) -> bool:
    """Return False if a full disk cut the last line, which the next one must not join."""
    with suppress(OSError), open(path, "rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(0, end - 1))
        return log.read(1) in (b"", b"\n")
    return True


def _rotate(path: Path, file: int, status: os.stat_result) -> int:
    """Put the full file aside; the file to write to, which is the full one where that cannot be done."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), status):
            os.replace(path, f"{path}.1")
        fresh = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return file
    os.close(file)
    return fresh


def run_result(exit_code: int | None) -> str:
    """Return `done`, `findings`, `failed`, `interrupted`, or without an exit code `unfinished`."""
    if exit_code is not None and exit_code > 128:
        return "interrupted"
    return {None: "unfinished", 0: "done", 3: "findings"}.get(exit_code, "failed")


def user_name() -> str:
    """Return the user; under sudo both users: `alice as root`."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    before = os.environ.get("SUDO_USER")
    return f"{before} as {name}" if before and before != name else name
