"""A disk that fails from one operation on, for repairs that must be atomic."""

from __future__ import annotations

from pathlib import Path

from bkctl.disk import Files


class FailingFiles(Files):
    """Files whose changing operations fail with `error` from number `at` on."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.count = at, error, 0

    def _step(self) -> None:
        self.count += 1
        if self.count >= self.at:
            raise self.error

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        self._step()
        super().exchange(one, other)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def _mkdir(self, path: Path) -> None:
        self._step()
        super()._mkdir(path)

    def sync_directory(self, path: Path) -> None:
        self._step()
        super().sync_directory(path)
