"""Long work of this user on this machine: files that say how far it is, and that pause it and change its rate.

`bkctl/progress/ID.json` in the user's state directory is the state of one run of a command. The run replaces it at most
once a second; `ID.pause` beside it pauses the run while it exists, and `ID.rate` holds a new limit. A run without such
a directory works without an id.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bkctl.disk import make_private_directory
from bkctl.metadata.backends.sessions import may_live, process_identity, process_start

from .audit import state_directory, without_secrets

if TYPE_CHECKING:
    from bkctl.pace import Pace

#: The time for which the state of work that ended, or was killed, is kept.
KEPT_S: Final = 3600.0
_STATE_SIZE_BYTES_MAX: Final = 1 << 20
#: Errors of reading a damaged file.
_DAMAGE: Final = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)
#: The fields that readers need, and their types.
_FORM: Final = {
    "id": str, "command": list, "host": str, "pid": int, "state": str, "began": int, "stage": str | None,
    "done": int | None, "total": int | None, "unit": str | None, "percent": int | None, "rate": float | int | None,
    "etaSeconds": int | None, "ended": int | None, "bytesPerSecondMax": float | int | None,
    "stepsPerSecondMax": float | int | None,
}  # fmt: skip


def progress_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory of the state files."""
    return state_directory(environment) / "progress"


class WorkFile:
    """The state file of this run, which began at `began` (now). No error of the file system reaches the caller."""

    def __init__(self, directory: Path, work_id: str, words: Sequence[str], began: float | None = None) -> None:
        self.id = work_id
        self._directory = directory
        self._began = time.time() if began is None else began
        self._words = words
        self._state: dict[str, Any] = {}
        self._identity: dict[str, Any] = {}
        self._rate: bytes | None = None
        self._has_failed = False
        #: True once other terminals see the work.
        self.is_published = False

    def publish(self, **fields: Any) -> None:
        """Write the state of the work."""
        if self._has_failed:
            return
        if not self._identity:
            command, began = without_secrets(self._words), round(self._began * 1000)
            self._identity = {"id": self.id, "command": command, **_identity(), "began": began}
        self._state = {**self._identity, **fields, "updated": round(time.time() * 1000)}
        try:
            if not self.is_published:
                make_private_directory(self._directory)
                _remove_old(self._directory)
            replace_file(self._directory / f"{self.id}.json", json.dumps(self._state).encode())
        except OSError:
            self._has_failed = True
        else:
            self.is_published = True

    def steer(self, pace: Pace) -> None:
        """Apply to `pace` what `ask_to_pause` and `ask_for_rate` left for this work."""
        if not self.is_published:
            return
        is_paused = os.path.exists(self._directory / f"{self.id}.pause")
        if is_paused != pace.is_paused:
            (pace.pause if is_paused else pace.resume)()
        with suppress(*_DAMAGE, AttributeError):
            wanted = _read(self._directory / f"{self.id}.rate")
            if wanted != self._rate:
                self._rate = wanted
                limits = json.loads(wanted)
                pace.limit(bytes_per_s=limits.get("bytesPerSecond"), steps_per_s=limits.get("stepsPerSecond"))

    def end(self, state: str) -> None:
        """Write how the work ended."""
        if self.is_published:
            fields = {name: value for name, value in self._state.items() if name not in ("etaSeconds", "rate")}
            self.publish(**fields | {"state": state, "ended": round(time.time() * 1000)})
            _remove_requests(self._directory, self.id)


def list_work(directory: Path) -> list[dict[str, Any]]:
    """Return the states of work on this machine, running first, then oldest first; a dead process's is `killed`."""
    _remove_old(directory)
    found = []
    ours = _identity()
    for path in sorted(directory.glob("*.json")):
        with suppress(*_DAMAGE):
            state = json.loads(_read(path))
            is_here = all(state[name] == ours[name] for name in ("host", "namespace"))
            if _is_whole(state) and state["id"] == path.stem and is_here:
                if _is_running(state) and not _is_alive(state, ours):
                    state["state"] = "killed"
                found.append(state)
    return sorted(found, key=lambda state: (not _is_running(state), state["began"]))


def ask_to_pause(directory: Path, work_id: str, *, pause: bool) -> None:
    """Let the work pause at its next step, or continue. Raises OSError."""
    path = directory / f"{work_id}.pause"
    replace_file(path, b"") if pause else path.unlink(missing_ok=True)


def ask_for_rate(directory: Path, work_id: str, *, bytes_per_s: float | None, steps_per_s: float | None) -> None:
    """Let the work go at another rate; None for both removes its limit. Raises OSError."""
    limits = {"bytesPerSecond": bytes_per_s, "stepsPerSecond": steps_per_s}
    replace_file(directory / f"{work_id}.rate", json.dumps(limits).encode())


def _identity() -> dict[str, Any]:
    pid, start, namespace, boot_id = process_identity()
    return {"host": os.uname().nodename, "pid": pid, "start": start, "namespace": namespace, "bootId": boot_id}


def _is_whole(state: Any) -> bool:
    """Return whether a state has what every run writes, in its form: a full disk or a user may have cut it."""
    return (
        isinstance(state, dict)
        and all(isinstance(state.get(name), kind) for name, kind in _FORM.items())
        and all(isinstance(word, str) for word in state["command"])
        # Not for NaN, nor for what json makes of 1e999.
        and all(-(1 << 63) < each < 1 << 63 for each in state.values() if isinstance(each, int | float))
    )


def _is_running(state: Mapping[str, Any]) -> bool:
    return state["state"] in ("running", "paused")


def _is_alive(state: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    if state["bootId"] != ours["bootId"]:
        return False
    start = process_start(state["pid"])
    return may_live(state["pid"]) if start is None else start == state["start"]


def _remove_old(directory: Path) -> None:
    """Remove the files of work that ended KEPT_S ago, however it ended."""
    for path in sorted(directory.glob("*.json")):
        # Running work replaces its file every second; a stopped process (Ctrl-Z) does not.
        with suppress(*_DAMAGE):
            if time.time() - path.stat().st_mtime > KEPT_S:
                state = json.loads(_read(path))
                if not _is_running(state) or not _is_alive(state, _identity()):
                    _remove_requests(directory, path.stem)
                    path.unlink(missing_ok=True)


def _remove_requests(directory: Path, work_id: str) -> None:
    for suffix in ("pause", "rate"):
        with suppress(OSError):
            (directory / f"{work_id}.{suffix}").unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file of the private directory, which need not survive a crash of the machine. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _read(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(file, _STATE_SIZE_BYTES_MAX)
    finally:
        os.close(file)
