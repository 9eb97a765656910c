"""The disk of a process in a world: each operation takes time, and other threads and processes go on meanwhile."""

from __future__ import annotations

from pathlib import Path

from simulation.runtime import Killed, Process
from support.simulated_disk import SimulatedFile, SimulatedFiles

from bkctl.disk import StorageFile
from bkctl.formats.layout import Buffer


class WorldFiles(SimulatedFiles):
    """SimulatedFiles whose operations take the world's time.

    Only what was written before a sync began is sure to be on disk after it. `lies`: the probability that a sync
    returns with nothing synced.
    """

    def __init__(self, root: Path, process: Process, *, seed: int) -> None:
        super().__init__(root, seed=seed)
        self.process = process
        self.world = process.world
        self.lies = 0.0
        #: True if it was ever full or broken: then a bookie may give up.
        self.has_failed = False
        #: The number of syncs that did nothing.
        self.lie_count = 0
        #: The extra time of a sync over a good disk's.
        self.sync_s = 0.001

    def step(self, kind: str, path: Path) -> None:
        world = self.world
        if not self.process.is_alive:
            raise Killed
        if world.current.process is self.process and world.current is not self.process.loop.fiber:
            delay_s = world.random.random() * 20e-6
            if kind == "sync":
                delay_s += self.sync_s * (0.2 + 1.6 * world.random.random())
                if world.random.random() < 0.01:
                    delay_s += world.random.random() * 0.3
            world.sleep(delay_s)
        if not self.process.is_alive:
            raise Killed
        super().step(kind, path)

    def is_a_lie(self) -> bool:
        """Return True if the disk only claims to have synced."""
        if self.lies and self.world.random.random() < self.lies:
            self.lie_count += 1
            return True
        return False

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        file = super().open(path, create=create)
        file.__class__ = _WorldFile
        return file

    def open_to_read(self, path: Path) -> StorageFile:
        if not self.process.is_alive:
            raise Killed
        file = super().open_to_read(path)
        return _WorldReadFile(file, self)

    def sync_file_system(self, path: Path) -> None:
        if self.is_a_lie():
            self.step("sync", path)
        else:
            super().sync_file_system(path)

    def sync_directory(self, path: Path) -> None:
        if self.is_a_lie():
            self.step("sync", path)
        else:
            super().sync_directory(path)


class _WorldFile(SimulatedFile):
    __slots__ = ()

    def sync(self) -> None:
        files, inode = self._files, self._inode
        assert isinstance(files, WorldFiles)
        self._cut = False
        before = list(inode.pending)
        files.step("sync", self.path)
        if files.is_a_lie():
            return
        # Without what came meanwhile, and what another sync took already.
        synced = {id(change) for change in before}
        for change in [each for each in inode.pending if id(each) in synced]:
            inode.apply(inode.durable, change)
        inode.pending[:] = [each for each in inode.pending if id(each) not in synced]

    def read_cached(self, offset: int, size: int) -> Buffer | None:
        return self.read(offset, size) if self._files.random.random() < 0.5 else None


class _WorldReadFile(StorageFile):
    __slots__ = ("_files",)

    def __init__(self, real: StorageFile, files: WorldFiles) -> None:
        super().__init__(real.path, real.fd)
        real.fd = -1
        self._files = files

    def read(self, offset: int, size: int) -> Buffer:
        world = self._files.world
        if world.current.process is self._files.process and world.current is not self._files.process.loop.fiber:
            world.sleep(world.random.random() * 100e-6)
        return super().read(offset, size)

    def read_cached(self, offset: int, size: int) -> Buffer | None:
        return super().read(offset, size) if self._files.random.random() < 0.5 else None
