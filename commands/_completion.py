"""What the completion scripts ask for: ledger ids and file names, within 300 ms or not at all.

The scripts in completions/ know groups, commands and options themselves; for a value they run
`_BKCTL_COMPLETE=KIND bkctl WORDS…`, where the last word is the one to complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NoReturn

TIME_LIMIT_S: Final = 0.3
CANDIDATES_MAX: Final = 200

_VALUES: Final = {"-u": "uri", "--metadata-uri": "uri", "-c": "conf", "--conf": "conf", "-x": "context"} | {
    "--context": "context",
    "--dir": "dir",
}


def complete(kind: str, words: list[str]) -> NoReturn:
    """Print the candidates for the last of `words`, one a line, and end the process.

    After the time limit, and on any error, nothing is printed: a shell's prompt is no place for messages.
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
    """What may stand in place of the last of `words`; `kind` is `ledger`, `journal` or `entrylog`."""
    prefix = words[-1] if words else ""
    options = _options(words[:-1])
    source = _SOURCES.get(kind)
    if source is not None:
        yield from (text for text in source(options, prefix) if text.startswith(prefix))


def _options(words: list[str]) -> dict[str, str]:
    """The connection and directory options among `words`; the last of each counts."""
    options: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _VALUES and equals and name.startswith("--"):
            options[_VALUES[name]] = value
        elif word in _VALUES and index + 1 < len(words):
            options[_VALUES[word]] = words[index + 1]
    return options


def _ledgers(options: dict[str, str], prefix: str) -> Iterator[str]:
    from bkctl.metadata.cluster import open_cluster

    from ._options import Globals, connect_to, environment_globals

    conf = options.get("conf")
    given = Globals(
        metadata_uri=options.get("uri"), conf=None if conf is None else Path(conf), context=options.get("context")
    )
    uri = connect_to([("", given), ("", environment_globals(os.environ))], os.environ).uri
    with open_cluster(uri, timeout_s=TIME_LIMIT_S) as cluster:
        yield from map(str, cluster.ledgers.ledgers(None))


_SOURCES: Final[dict[str, Callable[[dict[str, str], str], Iterator[str]]]] = {"ledger": _ledgers}
