"""The disk seam: everything a bookie does to files and directories goes through `Files`.

`Files` is the real thing. `SimulatedFiles` works on a real directory too, but keeps apart what was synced from what was
only written, fails on request, and can lay out what a crash would have left: without anything that was not synced, or
with an arbitrary part of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.errors import DirectoryInUse
from bkctl.formats.layout import Buffer

#: Buffers that one pwritev takes.
IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16
SECTOR_SIZE_BYTES: Final = 512
#: Errors of a disk that is full: another directory may have room.
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Errors of a write that pass without a repair: there is room again once files are deleted, or descriptors closed.
NO_SPACE: Final = DISK_FULL | {errno.EMFILE, errno.ENFILE}
_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class DiskUsage(NamedTuple):
    """Sizes of the file system below a directory in bytes, and its device number."""

    total: int
    free: int
    device: int

    @property
    def ratio(self) -> float:
        """The used part, 0.0 to 1.0. Source: DiskChecker.checkDiskFull (usable space counts, not free blocks)."""
        return 1.0 - self.free / self.total if self.total else 0.0


class StorageFile:
    """One open file; every method raises OSError as the system does. It closes itself when nobody holds it."""

    __slots__ = ("_can_read_cached", "fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._can_read_cached = bool(_RWF_NOWAIT)

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self.fd).st_size

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        """Write `buffers` one after the other at byte `offset`, all of them; the bytes written. Nothing is synced."""
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
                        raise OSError(errno.EIO, "The system writes nothing", str(self.path))
                    written += count
            at += expected
        return at - offset

    def _write_some(self, offset: int, buffers: Sequence[Buffer]) -> int:
        return os.pwritev(self.fd, buffers, offset)

    def read(self, offset: int, size: int) -> Buffer:
        """At most `size` bytes from byte `offset`; fewer only at the end of the file."""
        data = os.pread(self.fd, size, offset)
        while len(data) < size:
            more = os.pread(self.fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def read_cached(self, offset: int, size: int) -> Buffer | None:
        """Up to `size` bytes at `offset`, as many as need no disk; None when none, or where the system cannot tell."""
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

    def sync(self) -> None:
        """Return when everything written, and the size, is on disk (fdatasync)."""
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
        """Tell the system that nobody will read the bytes below `end` soon."""
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

    def __enter__(self) -> StorageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Files:
    """Real files. Paths are absolute or relative to the working directory; errors are OSError."""

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        """Open `path` for reading and writing; `create` makes a missing file (its name needs a directory sync)."""
        return StorageFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644))

    def open_to_read(self, path: Path) -> StorageFile:
        """Open `path` for reading."""
        return StorageFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def make_directory(self, path: Path, *, unsynced: dict[Path, None] | None = None) -> None:
        """Make `path` and what is missing above it, each name durable in its parent when this returns.

        With `unsynced`, those parents are put there instead: the caller syncs them, each once.
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
            os.mkdir(path)

    def sync_directory(self, path: Path) -> None:
        """Make the names in `path` durable: created, renamed and removed ones."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_file_system(self, path: Path) -> None:
        """Make everything durable that anybody wrote to the file system below `path` before: contents and names."""
        import ctypes

        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                sync = ctypes.CDLL(None, use_errno=True).syncfs
            except AttributeError:
                os.sync()  # no Linux: all file systems
                return
            if sync(fd):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file over `target`, in one step; both directories need a sync."""
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Let two names change places in one step, directories too; their directories need a sync.

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
        """Remove a file; nothing happens when it is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Give `path` the content `data` in one durable step: after a crash it is the old or the new one."""
        beside = path.with_name(path.name + ".new")
        try:
            with self.open(beside, create=True) as file:
                file.truncate(0)
                file.write(0, (data,))
                file.sync()
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(beside)
            raise
        self.rename(beside, path)
        self.sync_directory(path.parent)

    def note_written(self, directory: Path) -> None:
        """A library has written files in `directory` by itself, and synced them. Nothing to do on a real disk."""

    def has_descriptors(self) -> bool:
        """Return whether this process can open another file."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return False
        return True

    def disk_usage(self, path: Path) -> DiskUsage:
        """How full the file system below `path` is."""
        found = os.statvfs(path)
        return DiskUsage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, os.stat(path).st_dev)

    @contextlib.contextmanager
    def lock(self, paths: Sequence[Path]) -> Iterator[None]:
        """Hold the directories `paths` for one process. Raises DirectoryInUse when another has one of them."""
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


# --- the simulation ------------------------------------------------------------------------------------------------


class SimulatedCrash(BaseException):
    """The machine died here; not an Exception, so that nothing handles it."""


@dataclass(slots=True)
class _Inode:
    """A file: what was synced, and the changes since, in order: (offset, bytes) or (None, new size)."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int | None, bytes | int]] = field(default_factory=list)

    def apply(self, content: bytearray, change: tuple[int | None, bytes | int]) -> None:
        offset, value = change
        if isinstance(value, int):
            del content[value:]
            content.extend(bytes(value - len(content)))
        elif offset is not None:
            content.extend(bytes(max(0, offset + len(value) - len(content))))
            content[offset : offset + len(value)] = value

    def sync(self) -> None:
        for change in self.pending:
            self.apply(self.durable, change)
        self.pending.clear()


@dataclass(slots=True)
class _Directory:
    """A directory: the names that were synced, and those of now."""

    durable: dict[str, _Inode | _Directory] = field(default_factory=dict)
    current: dict[str, _Inode | _Directory] = field(default_factory=dict)


class Fault(NamedTuple):
    """Let operations of `kind` (write, sync, allocate, create, rename, remove, directory) on a path containing `path`
    fail with `code`, `times` times."""

    kind: str
    path: str
    code: int
    times: int = 1


class SimulatedFiles(Files):
    """Files below `root` whose syncs matter, on a disk that can be full, fail, write short, and crash.

    `crash_at` counts the changing operations from 1: the one of that number, and all after it, raise SimulatedCrash.
    `operations` is the number so far. `capacity_bytes` bounds the bytes that new writes may take. Not thread safe.
    """

    def __init__(
        self,
        root: Path,
        *,
        seed: int = 0,
        crash_at: int | None = None,
        capacity_bytes: int | None = None,
        short_writes: bool = False,
    ) -> None:
        self.root = root
        self.operations = 0
        self.crash_at = crash_at
        self.capacity_bytes = capacity_bytes
        self.short_writes = short_writes
        self.faults: list[Fault] = []
        self.random = random.Random(seed)
        self._top = self._scan(root)

    def _scan(self, path: Path) -> _Directory:
        names: dict[str, _Inode | _Directory] = {}
        for entry in os.scandir(path):
            if entry.is_dir():
                names[entry.name] = self._scan(Path(entry.path))
            else:
                names[entry.name] = _Inode(bytearray(Path(entry.path).read_bytes()))
        return _Directory(dict(names), names)

    def step(self, kind: str, path: Path) -> None:
        """Count one changing operation; crash or fail here if that was asked for."""
        self.operations += 1
        if self.crash_at is not None and self.operations >= self.crash_at:
            raise SimulatedCrash(f"operation {self.operations}: {kind} {path}")
        for index, fault in enumerate(self.faults):
            if fault.kind == kind and fault.path in str(path):
                self.faults[index] = fault._replace(times=fault.times - 1)
                if fault.times <= 1:
                    del self.faults[index]
                raise OSError(fault.code, os.strerror(fault.code), str(path))

    def _directory(self, path: Path) -> _Directory:
        found = self._top
        for name in path.relative_to(self.root).parts:
            below = found.current[name]
            assert isinstance(below, _Directory)
            found = below
        return found

    def take_space(self, size: int) -> int:
        """How many of `size` new bytes the disk still takes. Raises ENOSPC when none."""
        if self.capacity_bytes is None or size <= 0:
            return size
        granted = min(size, self.capacity_bytes)
        if granted == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.capacity_bytes -= granted
        return granted

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        parent = self._directory(path.parent)
        inode = parent.current.get(path.name)
        if inode is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            self.step("create", path)
            inode = parent.current[path.name] = _Inode()
        assert isinstance(inode, _Inode)
        return _SimulatedFile(super().open(path, create=create), self, inode)

    def _mkdir(self, path: Path) -> None:
        self.step("directory", path)
        super()._mkdir(path)
        self._directory(path.parent).current.setdefault(path.name, _Directory())

    def sync_directory(self, path: Path) -> None:
        self.step("sync", path)
        if path == self.root or self.root in path.parents:
            found = self._directory(path)
            found.durable = dict(found.current)

    def sync_file_system(self, path: Path) -> None:
        self.step("sync", path)
        self._sync_all(self._top)

    def _sync_all(self, directory: _Directory) -> None:
        directory.durable = dict(directory.current)
        for node in directory.current.values():
            if isinstance(node, _Directory):
                self._sync_all(node)
            else:
                node.sync()

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename", target)
        super().rename(source, target)
        self._directory(target.parent).current[target.name] = self._directory(source.parent).current.pop(source.name)

    def exchange(self, one: Path, other: Path) -> None:
        self.step("rename", other)
        super().exchange(one, other)
        mine, theirs = self._directory(one.parent).current, self._directory(other.parent).current
        mine[one.name], theirs[other.name] = theirs[other.name], mine[one.name]

    def remove(self, path: Path) -> None:
        if path.exists():
            self.step("remove", path)
            super().remove(path)
            del self._directory(path.parent).current[path.name]

    def note_written(self, directory: Path) -> None:
        """The crash comes before that, or keeps all files in `directory` as they are now."""
        self.step("sync", directory)
        parent = self._directory(directory.parent)
        parent.durable[directory.name] = parent.current[directory.name] = self._scan(directory)

    def disk_usage(self, path: Path) -> DiskUsage:
        if self.capacity_bytes is None:
            return DiskUsage(1 << 40, 1 << 39, 1)
        return DiskUsage(1 << 40, 1 << 39 if self.capacity_bytes else 0, 1)

    def crash(self, into: Path, *, keep: float = 0.0, tear: bool = False) -> Path:
        """Lay out below `into` (made, emptied) what is on disk after a crash; returns it.

        Of what was not synced each change survives with probability `keep`; with `tear`, each sector of it.
        """
        shutil.rmtree(into, ignore_errors=True)
        self._lay_out(self._top, into, keep, tear)
        return into

    def _lay_out(self, directory: _Directory, into: Path, keep: float, tear: bool) -> None:
        into.mkdir(parents=True)
        for name in sorted(directory.durable.keys() | directory.current.keys()):
            node = directory.durable.get(name)
            if directory.current.get(name) is not node and self.random.random() < keep:
                node = directory.current.get(name)
            if isinstance(node, _Directory):
                self._lay_out(node, into / name, keep, tear)
            elif node is not None:
                (into / name).write_bytes(self._surviving(node, keep, tear))

    def _surviving(self, inode: _Inode, keep: float, tear: bool) -> bytes:
        content = bytearray(inode.durable)
        for offset, value in inode.pending:
            if offset is None or isinstance(value, int):
                if self.random.random() < keep:
                    inode.apply(content, (offset, value))
                continue
            start = 0
            while start < len(value):
                size = SECTOR_SIZE_BYTES - (offset + start) % SECTOR_SIZE_BYTES if tear else len(value)
                if self.random.random() < keep:
                    inode.apply(content, (offset + start, value[start : start + size]))
                start += size
        return bytes(content)


class _SimulatedFile(StorageFile):
    __slots__ = ("_cut", "_files", "_inode")

    def __init__(self, real: StorageFile, files: SimulatedFiles, inode: _Inode) -> None:
        super().__init__(real.path, real.fd)
        real.fd = -1
        self._files = files
        self._inode = inode
        self._cut = False

    def _write_some(self, offset: int, buffers: Sequence[Buffer]) -> int:
        self._files.step("write", self.path)
        data = b"".join(buffers)
        whole = len(data)
        if self._files.short_writes:
            # The system stops between pages, never within a sector.
            cut = self._files.random.randint(0, len(data))
            cut -= (offset + cut) % SECTOR_SIZE_BYTES
            data = data[:cut] if cut > 0 else data
        new = max(0, offset + len(data) - max(offset, self.size()))
        data = data[: len(data) - new + self._files.take_space(new)]
        pending = self._inode.pending
        start, before = pending[-1] if self._cut and pending else (None, 0)
        if start is not None and isinstance(before, bytes) and start + len(before) == offset:
            pending[-1] = (start, before + data)  # the rest of a short write: the disk sees both as one
        else:
            pending.append((offset, data))
        self._cut = len(data) < whole
        return os.pwrite(self.fd, data, offset)

    def sync(self) -> None:
        self._cut = False
        self._files.step("sync", self.path)
        self._inode.sync()

    def allocate(self, end: int) -> None:
        size = self.size()
        if end <= size:
            return
        self._files.step("allocate", self.path)
        if self._files.capacity_bytes is not None and self._files.capacity_bytes < end - size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._files.take_space(end - size)
        self._inode.pending.append((None, end))
        os.ftruncate(self.fd, end)

    def truncate(self, size: int) -> None:
        self._cut = False
        self._files.step("write", self.path)
        self._inode.pending.append((None, size))
        super().truncate(size)
