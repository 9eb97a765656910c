"""Completions for the shells' scripts: ledger ids and file names, within 300 ms or not at all.

What a cluster answers is kept for a few seconds in the user's cache directory, for the next press of the key.

The scripts in completions/ know groups, commands and options themselves; for a value they run
`_BKCTL_COMPLETE=KIND bkctl WORDS…`, where the last word is the one to complete.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from zlib import crc32

from .connection import connect_to, context_names, store_security
from .contexts import Contexts
from .settings import SETTINGS, GlobalOptions, read_environment

if TYPE_CHECKING:
    from bkctl.files.directories import BookieDirectories, BookieFile
    from bkctl.metadata.cluster import Cluster

TIME_LIMIT_S: Final = 0.3
CANDIDATES_MAX: Final = 200
#: Bash puts a candidate into the command line as it is, and names of bookies and racks come from the metadata store.
_WORD: Final = re.compile(r"(?!-)[\w./:@%+=,\[\]-]+")
#: The age of answers of a cluster that are still offered.
CACHE_S: Final = 10.0

#: The options that say where candidates come from → their place in `_options`.
_VALUES: Final = {"--dir": "dir"} | {
    name: setting.field
    for setting in SETTINGS
    if setting.field in ("metadata_uri", "conf", "context")
    for name in (setting.flag, setting.short or setting.flag)
}


def complete(kind: str, words: list[str]) -> NoReturn:
    """Print the candidates for the last of `words`, one a line, and end the process.

    After the time limit, and on any error, nothing is printed: messages would disturb a shell's prompt.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    found: list[str] = []

    def search() -> None:
        found.extend(islice(candidates(kind, words), CANDIDATES_MAX))

    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    thread.join(TIME_LIMIT_S)
    if not thread.is_alive() and found:
        os.write(1, ("\n".join(found) + "\n").encode("utf-8", "surrogateescape"))
    # No clean-up: a connection attempt that hangs must not hold up the shell.
    os._exit(0)


def candidates(kind: str, words: list[str]) -> Iterator[str]:
    """Yield completions of the last of `words` that no shell expands; `kind` is one of `_OF_CLUSTER` or `_SOURCES`."""
    prefix = words[-1] if words else ""
    if prefix.startswith("--"):
        prefix = prefix.partition("=")[2]
    options = _options(words[:-1])
    if kind == "ledger" and (mark := next((mark for mark in ":-" if mark in prefix), None)):
        kind += mark
    if kind in _OF_CLUSTER:
        found: Iterator[str] = iter(_ask_cluster(kind, options, prefix))
    elif kind in _SOURCES:
        found = _SOURCES[kind](options)
    else:
        return
    given = set(words[:-1])
    yield from (text for text in found if text.startswith(prefix) and text not in given and _WORD.fullmatch(text))


def _options(words: list[str]) -> dict[str, list[str]]:
    """Return the connection and directory options among `words`, by kind, in order."""
    options: dict[str, list[str]] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _VALUES and equals and name.startswith("--"):
            options.setdefault(_VALUES[name], []).append(value)
        elif word in _VALUES and index + 1 < len(words):
            options.setdefault(_VALUES[word], []).append(words[index + 1])
    return options


def _racks(cluster: Cluster) -> Iterator[str]:
    from bkctl.metadata.racks import BookieRacks

    return iter(dict.fromkeys(each.rack for each in BookieRacks(cluster).all() if each.rack is not None))


def _ask_cluster(kind: str, options: dict[str, list[str]], prefix: str) -> list[str]:
    """Return the first candidates that begin with `prefix`: kept ones that are complete, else the cluster's."""
    from bkctl.metadata.cluster import open_cluster

    given: dict[str, Any] = {each.field: options[each.field][-1] for each in SETTINGS if each.field in options}
    conf = given.pop("conf", None)
    after = GlobalOptions(**given, conf=None if conf is None else Path(conf))
    environment = read_environment(os.environ)
    connection = connect_to([("", after), (None, environment)], os.environ)
    settings = after.over(environment).over(connection.settings)
    place = f"{kind} {settings.metadata_user or ''} {connection.uri}"
    kept = _read_kept(place, prefix)
    if kept is None:
        security = store_security(settings, os.environ)
        with open_cluster(connection.uri, timeout_s=TIME_LIMIT_S, security=security) as cluster:
            fitting = (text for text in _OF_CLUSTER[kind](cluster) if text.startswith(prefix))
            kept = list(islice(fitting, CANDIDATES_MAX))
        _keep(place, prefix, kept)
    return kept


def _cache_file(place: str, prefix: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "bkctl", "completion", f"{crc32(f'{place} {prefix}'.encode('utf-8', 'surrogateescape')):08x}")


def _read_kept(place: str, prefix: str) -> list[str] | None:
    """Return the candidates that were kept for `prefix`, or for a shorter one if these were all; None without any."""
    for size in range(len(prefix), -1, -1):
        shorter = prefix[:size]
        try:
            with open(_cache_file(place, shorter), encoding="utf-8", errors="surrogateescape") as file:
                if not 0 <= time.time() - os.fstat(file.fileno()).st_mtime <= CACHE_S:
                    continue
                head, *found = file.read().splitlines()
        except (OSError, ValueError):
            continue
        if head == f"{place} {shorter}" and (size == len(prefix) or len(found) < CANDIDATES_MAX):
            return found
    return None


def _keep(place: str, prefix: str, found: list[str]) -> None:
    """Keep candidates for the next completions, and remove files that are too old. Failures leave no cache."""
    from bkctl.disk import make_private_directory

    from .work import replace_file

    path = _cache_file(place, prefix)
    with suppress(OSError):
        make_private_directory(path.parent)
        for other in path.parent.iterdir():
            if time.time() - other.stat().st_mtime > CACHE_S:
                other.unlink()
        replace_file(path, "\n".join([f"{place} {prefix}", *found]).encode("utf-8", "surrogateescape"))


def _file_name(file: BookieFile) -> str:
    return f"scoped/{file.path.name}" if file.scoped else file.path.name


def _directories(options: dict[str, list[str]]) -> BookieDirectories:
    from bkctl.files.directories import BookieDirectories

    if "dir" in options:
        return BookieDirectories.at(*options["dir"])
    conf = options["conf"][-1] if "conf" in options else os.environ.get("BKCTL_CONF")
    if not conf:
        return BookieDirectories()
    from bkctl.config import BookieConfig

    config = BookieConfig.load(conf)
    return BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)


_OF_CLUSTER: Final[dict[str, Callable[[Cluster], Iterator[str]]]] = {
    "ledger": lambda cluster: map(str, cluster.ledgers.ledgers(None)),
    # In the form that is typed: SCOPE:ID, or a UUID.
    "ledger:": lambda cluster: (f"{scope_id}:{ledger_id}" for scope_id, ledger_id in cluster.ledgers.ledgers(None)),
    "ledger-": lambda cluster: (ledger.uuid for ledger in cluster.ledgers.ledgers(None)),
    "bookie": lambda cluster: (bookie.bookie_id for bookie in cluster.bookies.list()),
    "scope": lambda cluster: map(str, cluster.ledgers.scopes()),
    "rack": _racks,
}
_SOURCES: Final[dict[str, Callable[[dict[str, list[str]]], Iterator[str]]]] = {
    "journal": lambda options: map(_file_name, _directories(options).journals()),
    "entrylog": lambda options: map(_file_name, _directories(options).entry_logs()),
    "context": lambda _: iter(context_names(Contexts.read(os.environ))),
}
