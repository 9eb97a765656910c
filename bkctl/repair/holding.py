"""The processes that hold a bookie's directories: with a file open there, or a lock on a database or directory.

Apache's bookie locks only its RocksDBs, so open files are the evidence; it always has a journal open. Our bookie also
locks its directories. Source: JournalChannel, KeyValueStorageRocksDB; `Files.lock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from bkctl.disk import Files, restrict_new_files
from bkctl.errors import DirectoryInUse, NotFound, UsageError
from bkctl.files.directories import cookie_at, current_of
from bkctl.formats.names import ROCKSDB_LOCK, ROCKSDB_NAMES

log: Final = logging.getLogger("bkctl.repair")

T = TypeVar("T")
_PROC: Final = Path("/proc")
_COMMAND_SIZE_MAX: Final = 80
#: struct flock: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")
_DELETED: Final = " (deleted)"
_HINT: Final = "stop it first, then try again"


class Holder(NamedTuple):
    """A process that uses a directory: `path` is the file or directory that it has open or locked.

    `pid` is None for a process that is not visible here (in another container, or of another user).
    """

    pid: int | None
    command: str
    path: Path

    def __str__(self) -> str:
        return self.command if self.pid is None else f"process {self.pid} ({self.command})"


def holders(directories: Iterable[Path]) -> list[Holder]:
    """Return the other processes that hold any of `directories`, each once, by process id.

    Any file below a directory counts, open to read or to write, or mapped to memory. Only root sees the files of other
    users' processes; their locks are visible to all. Directories that do not exist have no holders.
    """
    roots = [directory.resolve() for directory in directories if directory.is_dir()]
    found: dict[int | None, Holder] = {}
    for holder in chain(_by_locks(roots), _by_open_files(roots) if roots else ()):
        found.setdefault(holder.pid, holder)
    return sorted(found.values(), key=lambda holder: (holder.pid is None, holder.pid or 0))


def refuse_writers(directories: Iterable[Path]) -> None:
    """Raise DirectoryInUse, naming the process, if another one has a file of `directories` open to write.

    That is a bookie's mark even when it has no lock (Apache's) and its registration is lost; readers do not count.
    """
    roots = [directory.resolve() for directory in directories if directory.is_dir()]
    _refuse(list(_by_open_files(roots, writing=True)) if roots else [])


@contextlib.contextmanager
def hold(
    directories: Iterable[Path], files: Files | None = None, *, note: Callable[[str], object] = log.warning
) -> Iterator[None]:
    """Keep `directories` (each with or without `current`) for this process while it changes them.

    No other process may hold them, or other directories of the same bookie (by their cookies). Meanwhile our own bookie
    and other commands cannot start on them, nor can Apache's bookie with DbLedgerStorage, and new files get the modes
    of a bookie's files.
    `note` is called with a sentence where files that another process has open cannot be seen.
    Raises DirectoryInUse, naming the process; NotFound for a directory that does not exist.
    """
    given = list(dict.fromkeys(current_of(directory) for directory in directories))
    watched = [*given, *_siblings(given)]
    _refuse(holders(watched))
    blindness = _blindness(watched)
    if blindness:
        note(blindness)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context((files or Files()).lock(sorted(given)))
            _refuse(holders(watched))
            # Locked last: looking for the owner of such a lock, as `_refuse` does, would release ours.
            for current in given:
                for name in ROCKSDB_NAMES:
                    _lock_database(current / name, held)
        except (DirectoryInUse, BlockingIOError) as error:
            _refuse(holders(watched))
            raise DirectoryInUse(f"Another process holds {', '.join(map(str, given))}", hint=_HINT) from error
        # RocksDB names no modes for its files.
        held.callback(os.umask, restrict_new_files())
        yield


def _blindness(directories: Sequence[Path]) -> str:
    """Return why open files of the directories' owner cannot be seen, "" where they can.

    Apache's bookie has no other mark than these.
    """
    owners = {directory.stat().st_uid for directory in directories if directory.is_dir()}
    if not _attempt(os.listdir, _PROC / "self/fd"):
        reason = "this system has no /proc"
    elif os.geteuid() and owners - {os.geteuid()}:
        reason = "they belong to another user; run the command as that user or as root"
    else:
        return ""
    where = ", ".join(map(str, directories))
    return f"Cannot see whether a bookie of Apache's has files of {where} open: {reason}"


def _refuse(found: Sequence[Holder]) -> None:
    if found:
        first = found[0]
        others = f" and {len(found) - 1} others" if len(found) > 1 else ""
        raise DirectoryInUse(f"{first.path} is in use by {first}{others}", hint=_HINT)


def _siblings(currents: Sequence[Path]) -> list[Path]:
    """Return the other directories of the same bookies, from the cookies in `directories`.

    A copy of a bookie's directories has its cookie too, but is not one of the directories that the cookie names.
    """
    found: dict[Path, None] = {}
    for current in currents:
        if (cookie := cookie_at(current)) is None:
            continue
        named = []
        for directory in (*cookie.journal_dirs, *cookie.ledger_dirs, *(cookie.index_dirs or ())):
            with contextlib.suppress(NotFound, UsageError):
                named.append(current_of(Path(directory)))
        if any(_attempt(current.samefile, path) for path in named):
            found.update(dict.fromkeys(path for path in named if path not in currents))
    return list(found)


# --- locks ----------------------------------------------------------------------------------------------------------


def _lock_database(database: Path, held: contextlib.ExitStack) -> None:
    """Take RocksDB's own lock of a database, so that no process opens it to write."""
    if not (database / ROCKSDB_LOCK).is_file():
        return
    fd = os.open(database / ROCKSDB_LOCK, os.O_RDWR | os.O_CLOEXEC)
    held.callback(os.close, fd)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _by_locks(roots: Sequence[Path]) -> Iterator[Holder]:
    for root in roots:
        databases = [root / name for name in ROCKSDB_NAMES]
        for database in [*databases, *(root / "current" / name for name in ROCKSDB_NAMES), root]:
            lock = database / ROCKSDB_LOCK
            pid = _lock_owner(lock)
            if pid is not None and pid != os.getpid():
                yield _holder(pid, lock)
    for path, pid in _flocks(roots):
        if pid != os.getpid():
            yield _holder(pid, path)


def _lock_owner(path: Path) -> int | None:
    """Return the process with a POSIX lock on a file (0: not visible here); None without a lock."""
    fd = _attempt(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if fd is None:
        return None
    try:
        answer = _attempt(lambda: fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)))
    finally:
        os.close(fd)
    if answer is None:
        return None
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _flocks(roots: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """Yield (directory, process id) for each of `roots`, or its `current`, that a bookie of ours has locked."""
    places = {}
    for path in [*roots, *(root / "current" for root in roots)]:
        with contextlib.suppress(OSError):
            status = path.stat()
            places[f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"] = path
    for line in (_attempt((_PROC / "locks").read_text) or "").splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5] in places and words[4].lstrip("-").isdecimal():
            yield places[words[5]], max(int(words[4]), 0)


# --- open files -----------------------------------------------------------------------------------------------------


def _by_open_files(roots: Sequence[Path], *, writing: bool = False) -> Iterator[Holder]:
    prefixes = tuple(f"{root}/" for root in roots)
    namespace = _attempt(os.readlink, _PROC / "self/ns/mnt")

    @cache
    def inodes() -> set[tuple[int, int] | None]:
        places = (place for root in roots for place in os.walk(root))
        return {_inode(Path(directory, name)) for directory, _, names in places for name in ("", *names)} - {None}

    for process in _attempt(os.listdir, _PROC) or ():
        if not process.isdecimal() or int(process) == os.getpid():
            continue
        directory = _PROC / process / "fd"
        # In another mount namespace (a container) a file has another path, or another file has its path.
        is_elsewhere = _attempt(os.readlink, _PROC / process / "ns/mnt") not in (None, namespace)
        mapped = None if writing else _mapped(_PROC / process / "maps", prefixes)
        if mapped is not None and (not is_elsewhere or _inode(_PROC / process / f"root{mapped}") in inodes()):
            yield _holder(int(process), mapped)
            continue
        for name in _attempt(os.listdir, directory) or ():
            target = _attempt(os.readlink, directory / name)
            if target is None or not target.startswith("/"):
                continue
            target = target.removesuffix(_DELETED)
            is_held = _inode(directory / name) in inodes() if is_elsewhere else f"{target}/".startswith(prefixes)
            if is_held and (not writing or _is_written(_PROC / process / "fdinfo" / name)):
                yield _holder(int(process), Path(target))
                break


def _mapped(maps: Path, prefixes: tuple[str, ...]) -> Path | None:
    """Return a file below `prefixes` that a process has in its memory, open or not; None without one."""
    lines = (_attempt(maps.read_text, None, "surrogateescape") or "").splitlines()
    # address, permissions, offset, device, inode, path
    names = (line.split(maxsplit=5)[5].removesuffix(_DELETED) for line in lines if "/" in line)
    return next((Path(name) for name in names if name.startswith(prefixes)), None)


def _is_written(description: Path) -> bool:
    """Return True if a descriptor is open to write, by its file in /proc/PID/fdinfo."""
    lines = (_attempt(description.read_text) or "").splitlines()
    flags = next((line.split()[1] for line in lines if line.startswith("flags:")), None)
    return flags is not None and int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _inode(path: Path) -> tuple[int, int] | None:
    status = _attempt(path.stat)
    return None if status is None else (status.st_dev, status.st_ino)


def _attempt(call: Callable[..., T], *arguments: object) -> T | None:
    """Return the result of `call`; None if it raises OSError: a process or file just ended, or is another user's."""
    try:
        return call(*arguments)
    except OSError:
        return None


def _holder(pid: int, path: Path) -> Holder:
    if pid == 0:
        return Holder(None, "a process that cannot be seen from here", path)
    return Holder(pid, _command_of(pid), path)


def _command_of(pid: int) -> str:
    """Return a short form of a process's command line; for Java the main class."""
    line = _attempt((_PROC / str(pid) / "cmdline").read_bytes) or b""
    words = [word for word in line.decode(errors="replace").split("\0") if word]
    if not words:
        return "unknown command"
    name = os.path.basename(words[0])
    if name == "java":
        words = _without_jvm_options(words)
    return " ".join([name, *words[1:]])[:_COMMAND_SIZE_MAX]


def _without_jvm_options(words: list[str]) -> list[str]:
    rest = iter(words[1:])
    for word in rest:
        if word in ("-cp", "-classpath", "--class-path", "-p", "--module-path"):
            next(rest, None)
        elif not word.startswith("-"):
            return [words[0], word, *rest]
    return words
