"""The disk seam: everything a bookie does to files and directories goes through `Files`.

`Files` is the real disk. The tests replace it by a simulated one that loses unsynced changes and fails on request.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from bkctl.errors import BkctlError, DirectoryInUse, on_error
from bkctl.formats.layout import Buffer

#: Most buffers of one pwritev.
IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16
#: A disk writes at least this many bytes whole or not at all.
SECTOR_SIZE_BYTES: Final = 512
#: Modes of what a bookie creates, less the umask: other local users must not read entries and metadata.
FILE_MODE: Final = 0o640
DIRECTORY_MODE: Final = 0o750
#: Errors of a full disk: another directory may have room.
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Errors of a write that end without a repair, once files are deleted or descriptors closed.
NO_SPACE: Final = DISK_FULL | {errno.EMFILE, errno.ENFILE}
_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2

log: Final = logging.getLogger("bkctl.bookie")


def disk_failure(error: Exception) -> OSError:
    """Return `error` as the OSError that a failed write is reported as; log one that neither disk nor format raises."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, BkctlError):
        return OSError(errno.EIO, str(error))
    log.error("A write failed with an unexpected error", exc_info=error)
    return OSError(errno.EIO, repr(error))


class DiskUsage(NamedTuple):
    """Sizes of the file system below a directory in bytes, and its device number."""

    total: int
    free: int
    device: int

    @property
    def ratio(self) -> float:
        """Return the used part, 0.0 to 1.0. Source: DiskChecker.checkDiskFull (usable space, not free blocks)."""
        return 1.0 - self.free / self.total if self.total else 0.0


class Closing(ABC):
    """A context manager that ends with `close`."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what it holds; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StorageFile(Closing):
    """One open file; every method raises OSError as the system does. Garbage collection closes it."""

    __slots__ = ("_can_read_cached", "fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._can_read_cached = bool(_RWF_NOWAIT)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self.fd).st_size

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        """Write all `buffers` one after the other at byte `offset`, unsynced; return the number of bytes."""
        at = offset
        for start in range(0, len(buffers), IOV_MAX):
            group = buffers[start : start + IOV_MAX]
            expected = sum(map(len, group))
            written = self._write_some(at, group)
            if written < expected:
                rest = memoryview(b"".join(group))
                while written < expected:
                    count = self._write_some(at + written, (rest[written:],))
                    if count == 0:
                        raise OSError(errno.EIO, "The system wrote 0 bytes", str(self.path))
                    written += count
            at += expected
        return at - offset

    def _write_some(self, offset: int, buffers: Sequence[Buffer]) -> int:
        return os.pwritev(self.fd, buffers, offset)

    def read(self, offset: int, size: int) -> Buffer:
        """Return `size` bytes from byte `offset`; fewer only at the end of the file."""
        data = os.pread(self.fd, size, offset)
        while len(data) < size:
            more = os.pread(self.fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def read_cached(self, offset: int, size: int) -> Buffer | None:
        """Return up to `size` bytes at `offset` that need no disk; None without any, or if the system cannot tell."""
        if not self._can_read_cached:
            return None
        buffer = bytearray(size)
        try:
            count = os.preadv(self.fd, (buffer,), offset, _RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
            self._can_read_cached = False
            return None
        return buffer if count == size else memoryview(buffer)[:count]

    def data(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each range of data, from `offset` on; between them are holes, zeros."""
        return data_of(self.fd, offset)

    def sync(self) -> None:
        """Write all data and the size of the file to disk (fdatasync)."""
        os.fdatasync(self.fd)

    def allocate(self, end: int) -> None:
        """Reserve space up to byte `end`: writes below it cannot fail for want of space; the new bytes are 0."""
        start = self.size()
        if end <= start:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, start, end - start)
        else:
            os.ftruncate(self.fd, end)

    def forget_cache(self, end: int) -> None:
        """Advise the system to drop its cache of the bytes below `end`."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, end, os.POSIX_FADV_DONTNEED)

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        os.ftruncate(self.fd, size)

    def close(self) -> None:
        """Close the file, without a sync; harmless when it is closed."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor; do not wait for the other end of a pipe.

    Raises OSError: IsADirectoryError, or ENXIO, which a socket has too, for any other kind of file.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
    raise OSError(code, os.strerror(code), str(path))


def skip_hole(fd: int, offset: int) -> int | None:
    """Return `offset`, or the next offset with data if the file has a hole there; None when no data follows.

    File systems without holes have data everywhere. Raises OSError.
    """
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno == errno.EINVAL:
            return offset
        raise


def data_of(fd: int, offset: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each range of data in a file from `offset` on; holes separate them. Raises OSError."""
    begin = skip_hole(fd, offset)
    while begin is not None:
        try:
            end = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            end = os.fstat(fd).st_size
        yield begin, end
        begin = skip_hole(fd, end) if end > begin else None


class Files:
    """Real files. Paths are absolute or relative to the working directory; errors are OSError."""

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        """Open `path` for reading and writing; `create` creates a missing file (its name needs a directory sync).

        With `create`, a symbolic link is refused (ELOOP): the owner of a directory could plant one for root to follow.
        """
        flags = os.O_RDWR | (os.O_CREAT | os.O_NOFOLLOW if create else 0)
        return StorageFile(path, open_regular(path, flags))

    def open_to_read(self, path: Path) -> StorageFile:
        """Open `path` for reading."""
        return StorageFile(path, open_regular(path, os.O_RDONLY))

    def make_directory(self, path: Path, *, unsynced: dict[Path, None] | None = None) -> None:
        """Create `path` and its missing parents, each name durable in its parent.

        With `unsynced`, add the directories to sync there instead: the caller syncs each of them once.
        """
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            self._mkdir(directory)
            if unsynced is None:
                self.sync_directory(directory.parent)
            else:
                unsynced[directory.parent] = None

    def _mkdir(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)

    def sync_directory(self, path: Path) -> None:
        """Make created, renamed and removed names in `path` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_file_system(self, path: Path) -> None:
        """Make all contents and names durable that any process wrote to the file system of `path`."""
        import ctypes

        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                sync = ctypes.CDLL(None, use_errno=True).syncfs
            except AttributeError:
                os.sync()  # other systems than Linux: all file systems
                return
            if sync(fd):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file to `target`, which it replaces, in one step; both directories need a sync."""
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap the names of two files or directories in one step; both parent directories need a sync.

        Raises OSError, with EINVAL or ENOSYS where the system or the file system cannot.
        """
        import ctypes

        try:
            rename = ctypes.CDLL(None, use_errno=True).renameat2
        except AttributeError:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one)) from None
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(one), None, str(other))

    def remove(self, path: Path) -> None:
        """Remove a file; a missing file is ignored."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory; its parent needs a sync. Raises OSError, with ENOTEMPTY for one with files."""
        os.rmdir(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the content of `path` by `data` in one durable step: a crash leaves the old or the new content.

        A crash may also leave `<name>.new` beside it; the next call overwrites that file, but follows no link of the
        name.
        """
        with self.naming(self.open(path.with_name(path.name + ".new"), create=True), path) as file:
            file.truncate(0)
            file.write(0, (data,))

    @contextlib.contextmanager
    def naming(self, file: StorageFile, path: Path, *, overwrite: bool = True) -> Iterator[StorageFile]:
        """Write `file` within; then sync it and give it the name `path`, durably. After an error, remove it.

        Raises OSError; FileExistsError for a `path` that exists, unless `overwrite`.
        """
        with on_error(partial(self.remove, file.path), OSError):
            with file:
                yield file
                file.sync()
            if overwrite:
                self.rename(file.path, path)
            else:
                os.link(file.path, path)
                self.remove(file.path)
        self.sync_directory(path.parent)

    def note_written(self, directory: Path) -> None:
        """Record that a library wrote and synced files in `directory`. A real disk needs nothing."""

    def has_descriptors(self) -> bool:
        """Return whether this process can open another file."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return False
        return True

    def disk_usage(self, path: Path) -> DiskUsage:
        """Return the usage of the file system of `path`."""
        found = os.statvfs(path)
        return DiskUsage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, os.stat(path).st_dev)

    @contextlib.contextmanager
    def lock(self, paths: Sequence[Path]) -> Iterator[None]:
        """Lock the directories `paths` for one process. Raises DirectoryInUse if another process has locked one."""
        with contextlib.ExitStack() as held:
            for path in paths:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise DirectoryInUse(
                        f"Another bookie uses {path}", hint="stop it, or give this one directories of its own"
                    ) from None
            yield


def make_private_directory(path: Path) -> None:
    """Create `path` and its missing parents with mode 0700, whatever the umask. Raises OSError.

    `Path.mkdir` applies its mode to `path` alone: with umask 000 other users could replace its parents.
    """
    if not path.is_dir():
        if path.parent != path:
            make_private_directory(path.parent)
        path.mkdir(0o700, exist_ok=True)


def restrict_new_files() -> int:
    """Restrict new files of this process (RocksDB's too) to FILE_MODE and new directories to DIRECTORY_MODE.

    Returns the umask before.
    """
    before = os.umask(0o077)
    os.umask(before | (0o777 & ~DIRECTORY_MODE))
    return before


def create_unfinished(path: Path, *, mode: int = 0o600) -> tuple[Path, int]:
    """Create a file beside `path` for content that gets that name once it is whole; return its path and descriptor.

    Its name cannot be guessed, and neither a file nor a link had it before. The caller renames or removes it. Raises
    OSError, which names `path`.
    """
    unfinished = path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return unfinished, os.open(unfinished, flags, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def atomic_write(path: Path, *, mode: int = 0o600, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Yield a stream whose content gets the name `path`, durably, once the block ends; an error removes the content.

    Safe in a directory that other users write to. Raises OSError; FileExistsError for a `path` that exists, unless
    `overwrite`.
    """
    unfinished, descriptor = create_unfinished(path, mode=mode)
    naming = Files().naming(StorageFile(unfinished, descriptor), path, overwrite=overwrite)
    try:
        with naming, open(descriptor, "wb", closefd=False) as stream:
            yield stream
    except OSError as error:
        if error.filename is None and error.errno in (*DISK_FULL, errno.EFBIG):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, in any order; none when it is missing. Raises OSError."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
