"""Files read front to back in windows: memory stays flat, and a file that shrinks meanwhile just ends sooner."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from bkctl.disk import Closing, data_of, open_regular, skip_hole
from bkctl.errors import BkctlError, Corrupt, NotFound, UsageError, on_error

WINDOW_SIZE_BYTES: Final = 1 << 20
_WINDOW_SIZE_MIN_BYTES: Final = 512
#: The first step over lost bytes. Each further step is twice as long, up to a window: a failing disk may take seconds
#: for every read.
_JUMPS_MAX: Final = 64
_JUMPS_SHORT: Final = 8
#: Errors of a failing disk, or of a file system that verifies checksums, for lost bytes.
_LOST: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})


class FileReader(Closing):
    """One file, open to read. Use as a context manager. `path` is as given, `name` the path for messages.

    Raises NotFound, UsageError (not a regular file), BkctlError (no permission); reads raise Corrupt if the disk fails.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = str(path)
        self._fd = -1
        try:
            self._fd = open_regular(self.path, os.O_RDONLY)
        except OSError as error:
            irregular = UsageError(f"{path} is not a regular file")
            raise irregular if error.errno == errno.ENXIO else _file_error(error, self.name) from error
        except ValueError as error:
            raise UsageError(f"{self.name!r} is not a file name") from error
        with on_error(self.close):
            self._begin()

    def _begin(self) -> None:
        """Read the header of a file that has one; its errors are the constructor's."""

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a file, as the constructor does."""
        return cls(path)

    def close(self) -> None:
        """Close the file. Safe to call again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def size(self) -> int:
        """Return the present size of the file in bytes."""
        return self.stat().st_size

    def stat(self) -> os.stat_result:
        """Return the present status of the file."""
        return os.fstat(self._fd)

    def read(self, at: int, size: int) -> bytes:
        """Return the `size` bytes from offset `at`; fewer at the end of the file, which bounds the allocation."""
        data = b""
        try:
            data = os.pread(self._fd, min(size, max(0, self.size() - at)) if size > WINDOW_SIZE_BYTES else size, at)
            while len(data) < size and (more := os.pread(self._fd, size - len(data), at + len(data))):
                data += more
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno in _LOST:
                raise Corrupt(f"{self.name}: the disk fails at byte {at + len(data)}: {error.strerror}") from error
            raise _file_error(error, self.name) from error
        return data

    def window(self, at: int, needed: int = 0) -> bytes:
        """Return a window from offset `at`: 1 MiB, or `needed` bytes if that is more; less at the end of the file.

        If the disk fails within it, the window ends before; raises Corrupt if that leaves less than `needed` bytes.
        """
        size = max(needed, WINDOW_SIZE_BYTES)
        while True:
            try:
                return self.read(at, size)
            except Corrupt:
                size //= 2
                if size < max(needed, _WINDOW_SIZE_MIN_BYTES):
                    raise

    def next_window(self, at: int) -> tuple[int, bytes]:
        """Return (offset, window): the first readable window at or behind `at`.

        The window is empty at the end of the file, and if the disk fails over a long range.
        """
        step = _WINDOW_SIZE_MIN_BYTES
        for attempt in range(_JUMPS_MAX):
            try:
                self.read(at, _WINDOW_SIZE_MIN_BYTES)
                return at, self.window(at)
            except Corrupt:
                at += step - at % step
                if attempt >= _JUMPS_SHORT:
                    step = min(2 * step, WINDOW_SIZE_BYTES)
        return at, b""

    def next_data(self, at: int) -> int | None:
        """Return the offset of the first nonzero byte from `at` on; None if only zeros or nothing follow."""
        while True:
            hole_end = self.skip_hole(at)
            if hole_end is None or not (window := self.window(hole_end)):
                return None
            if rest := window.lstrip(b"\0"):
                return hole_end + len(window) - len(rest)
            at = hole_end + len(window)

    def skip_hole(self, at: int) -> int | None:
        """Return `at`, or the end of the file's hole at `at`; None if no data follows."""
        try:
            return skip_hole(self._fd, at)
        except OSError as error:
            raise _file_error(error, self.name) from error

    def data(self, at: int) -> list[tuple[int, int]]:
        """Return (begin, end) of each range of data from `at` on; the file has holes between them."""
        try:
            return list(data_of(self._fd, at))
        except OSError as error:
            raise _file_error(error, self.name) from error


def _file_error(error: OSError | OverflowError, name: str) -> BkctlError:
    if isinstance(error, OverflowError):
        return UsageError(f"{name}: the offset is larger than any file")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if os.path.islink(name):  # no bookie deleted it, so readers must not skip it
            return BkctlError(f"{name} is a link to a missing file")
        return NotFound(f"{name} does not exist")
    if isinstance(error, IsADirectoryError):
        return UsageError(f"{name} is a directory, a file is needed")
    return BkctlError(f"{name} cannot be read: {error.strerror or error}")


class WindowCursor:
    """The place of a scan: byte `begin` of `window`, which is at byte `at` of its file and has `limit` bytes."""

    __slots__ = ("_load", "at", "begin", "limit", "window")

    def __init__(self, load: Callable[[int, int], bytes], at: int) -> None:
        self._load = load
        self.at, self.begin = at, 0
        self.reload()

    @property
    def offset(self) -> int:
        """Return the file offset of the place."""
        return self.at + self.begin

    def reload(self, needed: int = 0) -> None:
        """Load the window that begins at the place, with at least `needed` bytes unless the file ends."""
        self.at, self.begin = self.at + self.begin, 0
        self.window = self._load(self.at, needed)
        self.limit = len(self.window)
