"""Completions for the shells' scripts: ledger ids and file names, within 300 ms or not at all.

The scripts in completions/ know groups, commands and options themselves; for a value they run
`_BKCTL_COMPLETE=KIND bkctl WORDS…`, where the last word is the one to complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from .settings import SETTINGS, GlobalOptions, read_environment

if TYPE_CHECKING:
    from bkctl.files.directories import BookieDirectories, BookieFile
    from bkctl.metadata.cluster import Cluster

TIME_LIMIT_S: Final = 0.3
CANDIDATES_MAX: Final = 200
#: Bash puts a candidate into the command line as it is, and names of bookies and racks come from the metadata store.
_WORD: Final = re.compile(r"(?!-)[\w./:@%+=,\[\]-]+")

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
    import threading

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
    """Yield the completions of the last of `words`, those that no shell expands; `kind` is one of `_SOURCES`."""
    prefix = words[-1] if words else ""
    if prefix.startswith("--"):
        prefix = prefix.partition("=")[2]
    options = _options(words[:-1])
    source = _SOURCES.get(kind)
    if source is not None:
        given = set(words[:-1])
        yield from (
            text for text in source(options) if text.startswith(prefix) and text not in given and _WORD.fullmatch(text)
        )


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


def _ledgers(options: dict[str, list[str]]) -> Iterator[str]:
    with _cluster(options) as cluster:
        yield from map(str, cluster.ledgers.ledgers(None))


def _scopes(options: dict[str, list[str]]) -> Iterator[str]:
    with _cluster(options) as cluster:
        yield from map(str, cluster.ledgers.scopes())


def _bookies(options: dict[str, list[str]]) -> Iterator[str]:
    with _cluster(options) as cluster:
        yield from (bookie.bookie_id for bookie in cluster.bookies.list())


def _racks(options: dict[str, list[str]]) -> Iterator[str]:
    from bkctl.metadata.racks import BookieRacks

    with _cluster(options) as cluster:
        yield from dict.fromkeys(each.rack for each in BookieRacks(cluster).all() if each.rack is not None)


def _cluster(options: dict[str, list[str]]) -> Cluster:
    from bkctl.metadata.cluster import open_cluster

    from .connection import connect_to, store_security

    given: dict[str, Any] = {each.field: options[each.field][-1] for each in SETTINGS if each.field in options}
    conf = given.pop("conf", None)
    after = GlobalOptions(**given, conf=None if conf is None else Path(conf))
    environment = read_environment(os.environ)
    connection = connect_to([("", after), (None, environment)], os.environ)
    security = store_security(after.over(environment).over(connection.settings), os.environ)
    return open_cluster(connection.uri, timeout_s=TIME_LIMIT_S, security=security)


def _journals(options: dict[str, list[str]]) -> Iterator[str]:
    return map(_file_name, _directories(options).journals())


def _entry_logs(options: dict[str, list[str]]) -> Iterator[str]:
    return map(_file_name, _directories(options).entry_logs())


def _contexts(options: dict[str, list[str]]) -> Iterator[str]:
    from .connection import LOCAL_CONTEXT, local_uri
    from .contexts import Contexts

    names = Contexts.read(os.environ).names
    yield from names
    if LOCAL_CONTEXT not in names and local_uri() is not None:
        yield LOCAL_CONTEXT


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


_SOURCES: Final[dict[str, Callable[[dict[str, list[str]]], Iterator[str]]]] = {
    "ledger": _ledgers,
    "bookie": _bookies,
    "scope": _scopes,
    "rack": _racks,
    "journal": _journals,
    "entrylog": _entry_logs,
    "context": _contexts,
}
