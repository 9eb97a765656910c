"""Which files the paths, patterns and directories mean that a source of files is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple, cast

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME, SCOPED_DIRECTORY


class Place(NamedTuple):
    """A file to read: its path, the id that its name says, whether it holds scoped ledgers, whose it is."""

    path: str
    file_id: int | None
    scoped: bool
    bookie_id: str | None
    #: Nobody named it: it was found in a directory or by a pattern, and may go away.
    found: bool


def resolve(
    texts: Iterable[str],
    files_in: Callable[[BookieDirectories], Iterable[BookieFile]],
    id_of: Callable[[str], int | None],
) -> list[Place]:
    """The files that paths, patterns and directories of bookies name, in that order, each once.

    `files_in` says which files of a bookie's directories are meant, `id_of` which id a file's name says. Raises
    NotFound for a path or pattern that fits nothing, and for a directory in which nothing is a bookie's; UsageError for
    a URI of anything but files.
    """
    places: dict[Path, Place] = {}
    cookies: dict[Path, str | None] = {}

    def add(path: Path, file_id: int | None, scoped: bool, found: bool) -> None:
        home = path.parent.parent if scoped else path.parent
        if home not in cookies:
            cookies[home] = bookie_id_at(home)
        places.setdefault(path.resolve(), Place(str(path), file_id, scoped, cookies[home], found))

    for text in texts:
        for path, exact in local_paths(text):
            if path.is_dir():
                for file in files_in(BookieDirectories.at(path).of_a_bookie()):
                    add(file.path, cast("int | None", file.id), file.scoped, True)
            elif exact or id_of(path.name) is not None:
                add(path, id_of(path.name), path.parent.name == SCOPED_DIRECTORY, not exact)
    return list(places.values())


def local_paths(text: str) -> Iterator[tuple[Path, bool]]:
    """Yield the paths that `text` names, in order, and whether it is the path itself and no pattern.

    Raises NotFound where a pattern fits nothing, UsageError for a URI of anything but files.
    """
    scheme, colon, rest = text.partition("://")
    if colon:
        if scheme != "file":
            raise UsageError(f"{text} is no path", hint="mount it: bookies' files are read as files")
        text = rest
    if not has_magic(text) or Path(text).exists():
        yield Path(text), True
        return
    found = sorted(glob(text, recursive=True, include_hidden=True))
    if not found:
        raise NotFound(f"Nothing fits {text}")
    for each in found:
        yield Path(each), False


def bookie_id_at(directory: Path) -> str | None:
    """Whose directory it is, as its cookie says; None without a readable one."""
    path = directory / COOKIE_NAME
    try:
        return Cookie.parse(path.read_bytes(), str(path)).bookie_id
    except (OSError, BkctlError):
        return None
