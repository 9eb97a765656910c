"""Files read front to back in windows: memory stays flat, and a file that shrinks meanwhile only ends sooner."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bkctl.disk import data_of, skip_hole
from bkctl.errors import BkctlError, Corrupt, NotFound, UsageError

WINDOW_SIZE_BYTES: Final = 1 << 20
_WINDOW_SIZE_MIN_BYTES: Final = 512
#: Steps over lost bytes, the first ones short, then each twice as long up to a window: a failing disk may take seconds
#: for every read.
_JUMPS_MAX: Final = 64
_JUMPS_SHORT: Final = 8
#: What a sick disk, or a file system that keeps checksums, says of bytes that are lost.
_LOST: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})


class FileReader:
    """One file, open to read; a context manager. Subclasses say what is in it. `path` is as given, `name` for messages.

    Raises NotFound, UsageError (a directory), BkctlError (no permission), and reading it Corrupt (the disk failed).
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = name = str(path)
        self._fd = -1
        try:
            # A pipe without a writer must not hold us.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            mode = os.fstat(self._fd).st_mode
        except OSError as error:
            raise _file_error(error, self.name) from error
        except ValueError as error:
            raise UsageError(f"{self.name!r} is no file name") from error
        if not stat.S_ISREG(mode):
            self.close()
            raise UsageError(f"{name} is a directory, a file is needed" if stat.S_ISDIR(mode) else f"{name} is no file")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; safe to call again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def size(self) -> int:
        """The file's bytes at present."""
        return os.fstat(self._fd).st_size

    def read(self, at: int, size: int) -> bytes:
        """The `size` bytes from offset `at`; fewer at the end of the file, which bounds what is allocated."""
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
        """A window of 1 MiB from offset `at`, or `needed` bytes if that is more; fewer at the end of the file.

        Where the disk fails in it, a smaller one of at least `needed` bytes ends before; raises Corrupt when none does.
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
        """A window as `window` gives it and its offset: `at`, or behind it the first that the disk gives.

        It is empty at the end of the file, and where the disk gives nothing for long.
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
        """The offset of the first byte from `at` on that is not zero; None when only zeros follow, or nothing."""
        while True:
            hole_end = self.skip_hole(at)
            if hole_end is None or not (window := self.window(hole_end)):
                return None
            if rest := window.lstrip(b"\0"):
                return hole_end + len(window) - len(rest)
            at = hole_end + len(window)

    def skip_hole(self, at: int) -> int | None:
        """`at`, or where data begins again if the file has a hole at `at`; None when no data follows."""
        try:
            return skip_hole(self._fd, at)
        except OSError as error:
            raise _file_error(error, self.name) from error

    def data(self, at: int) -> list[tuple[int, int]]:
        """Where data begins and ends, from `at` on: what is between are holes of the file."""
        try:
            return list(data_of(self._fd, at))
        except OSError as error:
            raise _file_error(error, self.name) from error


def _file_error(error: OSError | OverflowError, name: str) -> BkctlError:
    if isinstance(error, OverflowError):
        return UsageError(f"{name}: the offset is larger than any file")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"{name} does not exist")
    return BkctlError(f"{name} cannot be read: {error.strerror or error}")
