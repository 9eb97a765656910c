"""A simulated disk: tracks synced and unsynced changes, fails on request, and lays out the state after a crash."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bkctl.disk import SECTOR_SIZE_BYTES, DiskUsage, Files, StorageFile
from bkctl.formats.layout import Buffer


class SimulatedCrash(BaseException):
    """The machine crashed. Not an Exception, so that no code under test handles it."""


@dataclass(slots=True)
class _Inode:
    """A file: its synced content, and the changes since, in order: (offset, bytes) or (None, new size)."""

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
    """A directory: its synced names, and its current names."""

    durable: dict[str, _Inode | _Directory] = field(default_factory=dict)
    current: dict[str, _Inode | _Directory] = field(default_factory=dict)


class Fault(NamedTuple):
    """A failure with `code` of the next `times` operations of `kind` on a path that contains `path`.

    Kinds: write, sync, allocate, create, rename, remove, directory.
    """

    kind: str
    path: str
    code: int
    times: int = 1


class SimulatedFiles(Files):
    """Files below `root` on a simulated disk that can be full, fail, write short, and crash.

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
        self.bad_bytes: dict[str, int] = {}
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
        """Count one changing operation; crash or fail if the test asked for it."""
        self.operations += 1
        if self.crash_at is not None and self.operations >= self.crash_at:
            raise SimulatedCrash(f"operation {self.operations}: {kind} {path}")
        for index, fault in enumerate(self.faults):
            if fault.kind == kind and fault.path in str(path):
                self.faults[index] = fault._replace(times=fault.times - 1)
                if fault.times <= 1:
                    del self.faults[index]
                raise OSError(fault.code, os.strerror(fault.code), str(path))

    def fail_read(self, path: Path, offset: int, size: int) -> None:
        """Raise OSError (EIO) if the bytes include one that `bad_bytes` has for a part of this path."""
        for part, at in self.bad_bytes.items():
            if part in str(path) and offset <= at < offset + size:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def _directory(self, path: Path) -> _Directory:
        found = self._top
        for name in path.relative_to(self.root).parts:
            below = found.current.get(name)
            if below is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            assert isinstance(below, _Directory)
            found = below
        return found

    def take_space(self, size: int) -> int:
        """Return how many of `size` new bytes fit on the disk. Raises OSError (ENOSPC) if none."""
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
        return SimulatedFile(super().open(path, create=create), self, inode)

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

    def remove_directory(self, path: Path) -> None:
        self.step("remove", path)
        super().remove_directory(path)
        del self._directory(path.parent).current[path.name]

    def note_written(self, directory: Path) -> None:
        """Count all files in `directory` as synced."""
        self.step("sync", directory)
        parent = self._directory(directory.parent)
        parent.durable[directory.name] = parent.current[directory.name] = self._scan(directory)

    def disk_usage(self, path: Path) -> DiskUsage:
        if self.capacity_bytes is None:
            return DiskUsage(1 << 40, 1 << 39, 1)
        return DiskUsage(1 << 40, 1 << 39 if self.capacity_bytes else 0, 1)

    def crash(self, into: Path, *, keep: float = 0.0, tear: bool = False) -> Path:
        """Lay out the files after a crash below `into` (created, emptied), and return it.

        Each unsynced change survives with probability `keep`; with `tear`, each sector of it does.
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


class SimulatedFile(StorageFile):
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
        try:
            self._files.step("sync", self.path)
        except OSError as error:
            if error.errno == errno.EIO:
                self._inode.pending.clear()  # as Linux does: the next sync succeeds without them
            raise
        self._inode.sync()

    def read(self, offset: int, size: int) -> Buffer:
        self._files.fail_read(self.path, offset, size)
        return super().read(offset, size)

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
