"""The files at the paths, patterns and directories that a source of files is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from glob import glob, has_magic
from pathlib import Path
from socket import gethostname
from typing import NamedTuple, cast

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile, cookie_at
from bkctl.formats.names import SCOPED_DIRECTORY


class Place(NamedTuple):
    """A file to read: its path, the id in its name, whether it holds scoped ledgers, and its bookie."""

    path: str
    file_id: int | None
    scoped: bool
    bookie_id: str | None
    #: Found in a directory or by a pattern: a bookie may delete it before it is read.
    found: bool


def resolve(
    texts: Iterable[str],
    files_in: Callable[[BookieDirectories], Iterable[BookieFile]],
    id_of: Callable[[str], int | None],
) -> list[Place]:
    """Return the files that paths, patterns and directories of bookies name, in this order, each once.

    `files_in` returns the files to read among a bookie's directories, `id_of` the id in a file's name. Raises NotFound
    for a path or pattern that matches nothing, and for a directory without files of a bookie; UsageError for a URI that
    is not `file://`.
    """
    places: dict[Path, Place] = {}
    bookie_at = cache(bookie_id_at)

    def add(path: Path, file_id: int | None, scoped: bool, found: bool) -> None:
        home = path.parent.parent if scoped else path.parent
        places.setdefault(path.resolve(), Place(str(path), file_id, scoped, bookie_at(home), found))

    for text in texts:
        for path, exact in local_paths(text):
            if path.is_dir():
                for file in files_in(BookieDirectories.at(path).of_a_bookie()):
                    add(file.path, cast("int | None", file.id), file.scoped, True)
            elif exact or id_of(path.name) is not None:
                add(path, id_of(path.name), path.parent.name == SCOPED_DIRECTORY, not exact)
    return list(places.values())


def local_paths(text: str) -> Iterator[tuple[Path, bool]]:
    """Yield the paths that `text` names, in order, and whether `text` is that path rather than a pattern.

    Raises NotFound for a pattern that matches nothing, UsageError for a URI that is not `file://`.
    """
    scheme, colon, rest = text.partition("://")
    if colon:
        if scheme != "file":
            raise UsageError(f"{text} is not a path of files", hint="mount it: bookies' files are read as files")
        text = rest
    if not has_magic(text) or Path(text).exists():
        yield Path(text), True
        return
    found = sorted(glob(text, recursive=True, include_hidden=True))
    if not found:
        raise NotFound(f"No file matches {text}")
    for path in found:
        yield Path(path), False


def unseen(path: Path | str, directory: Path | None = None) -> BkctlError:
    """Return the error of a file that a task does not find, though the plan has it.

    A UsageError, which no mode permits, if this machine lacks the bookie's `directory` (default: the file's), since all
    of the bookie's entries would count as lost.
    """
    directory = Path(path).parent if directory is None else directory
    if not directory.is_dir():
        return UsageError(
            f"{path} cannot be seen by the executor on {gethostname()}: {directory} does not exist there",
            hint="mount the bookies' disks at the same paths on every executor",
        )
    return NotFound(
        f"{path} was deleted after the plan was made",
        hint="a bookie compacted or deleted it: its live entries are in other files now; run again",
    )


def bookie_id_at(directory: Path) -> str | None:
    """Return the bookie that the cookie in `directory` names; None without a readable cookie."""
    cookie = cookie_at(directory)
    return None if cookie is None else cookie.bookie_id
