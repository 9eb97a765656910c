"""Completions for the shells: the words of commands and options, and ledger ids, bookies and files within 300 ms.

The shells' scripts run `_BKCTL_COMPLETE=SHELL bkctl WORD…`, where the last word is the one to complete. The answer of a
cluster is kept for a few seconds in the user's cache directory, for the next press of the key.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from zlib import crc32

from .access import connect_to, context_names, store_security
from .columns import Output
from .contexts import Contexts
from .parser import Group, Option, context_of, read_parameters
from .settings import GlobalOptions, read_environment

if TYPE_CHECKING:
    from bkctl.files.directories import BookieDirectories, BookieFile
    from bkctl.metadata.cluster import Cluster

TIME_LIMIT_S: Final = 0.3
CANDIDATES_MAX: Final = 200
#: Bash puts a candidate into the command line as it is, and names of bookies and racks come from the metadata store.
_WORD: Final = re.compile(r"(?!-)[\w./:@%+=,\[\]-]+")
#: The age of answers of a cluster that are still offered.
CACHE_S: Final = 10.0

#: The exit code where the shell's own file names complete the word.
FILES_CODE: Final = 3

#: Shell → the script in completions/ that asks bkctl for all candidates, as git and kubectl have them.
SCRIPTS: Final = {"bash": "bkctl.bash", "zsh": "_bkctl", "fish": "bkctl.fish"}


class Candidate(NamedTuple):
    """A word that may stand in the place of the last one, and its help."""

    text: str
    help: str = ""

    def line(self, shell: str) -> str:
        """Return the line that the script of `shell` reads."""
        if shell == "zsh":
            return ":".join([self.text.replace("\\", "\\\\").replace(":", "\\:"), self.help]).rstrip(":")
        return f"{self.text}\t{self.help}" if shell == "fish" and self.help else self.text


def complete(tree: Any, shell: str, words: list[str]) -> NoReturn:
    """Print the candidates for the last of `words`, one a line, and end the process; see FILES_CODE.

    Nothing is printed on any error, and nothing of a cluster after the time limit: messages would disturb the prompt.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    line = CommandLine(tree, words)
    found = line.candidates()
    if found is None:
        asked: list[Candidate] = []
        thread = threading.Thread(target=lambda: asked.extend(line.asked()), daemon=True)
        thread.start()
        thread.join(TIME_LIMIT_S)
        found = [] if thread.is_alive() else asked
    text = "".join(f"{each.line(shell)}\n" for each in found)
    os.write(1, text.encode("utf-8", "surrogateescape"))
    # No clean-up: a connection attempt that hangs must not hold up the shell.
    os._exit(FILES_CODE if not found and line.takes_files else 0)


class CommandLine:
    """The words of a command line up to the one to complete, read as the commands below `tree` declare them."""

    def __init__(self, tree: Any, words: list[str]) -> None:
        self._tree, self._words = tree, words[:-1]
        self._command, self._context = tree, context_of(tree, "bkctl", None)
        #: The options that were given, by the names of their parameters.
        self._given: dict[str, list[str]] = {}
        self._place = 0
        pending = None
        for word in self._words:
            name, equals, value = word.partition("=")
            if pending is not None:
                self._given[pending.name].append(word)
                pending = None
            elif self._begin(word):
                continue
            elif word.startswith("-"):
                if not word.startswith("--") and len(word) > 2:  # -uURI
                    name, equals, value = word[:2], "=", word[2:]
                param = self._param(name)
                if param is not None:
                    self._given.setdefault(param.name, []).extend([value] if equals else [])
                    pending = None if equals or getattr(param, "is_flag", False) else param
            else:
                self._place += 1
        if words and words[-1].startswith("-"):
            self._begin(words[-1])
        self._lead, word, kinds = "", words[-1] if words else "", None
        parameters = read_parameters(self._command, self._context)
        self._options = [(param, option) for param, option in parameters if option.names]
        arguments = [option for _, option in parameters if not option.names]
        if pending is None and word.startswith("--") and "=" in word:
            name, _, word = word.partition("=")
            pending, self._lead = self._param(name), f"{name}="
        if pending is not None or self._lead:
            kinds = [option for param, option in parameters if param is pending][:1]
        elif not word.startswith("-"):
            kinds = [*arguments[self._place :], *(each for each in arguments[-1:] if each.repeatable)][:1]
        #: The option or argument that the word is a value of, and the word.
        self._value = kinds[0] if kinds else None
        if self._value is not None and self._value.metavar.endswith(",…"):
            head, comma, word = word.rpartition(",")
            self._lead += head + comma
        self._prefix = word
        self._kind = self._value.metavar.lower() if self._value is not None else ""
        self.takes_files = self._kind in ("file", "dir", "journal", "log")

    def _param(self, name: str) -> Any:
        """Return the parameter of an option of the command, also of a hidden one."""
        return next((each for each in self._command.get_params(self._context) if name in each.opts), None)

    def _begin(self, word: str) -> bool:
        """Go down to the command `word` of a group, or to its default command; return True where `word` names it."""
        commands: Mapping[str, Any] = getattr(self._command, "commands", {})
        name = word if word in commands else getattr(self._command, "default", None)
        if name is None:
            return False
        self._context = context_of(self._command.get_command(self._context, name), name, self._context)
        self._command = self._context.command
        return name == word

    def candidates(self) -> list[Candidate] | None:
        """Return the candidates that the declaration of the commands has; None where files or a cluster have them."""
        found: list[Candidate]
        if self._value is not None:
            if words := self._value.choices or self._known_words(self._value):
                found = [Candidate(word) for word in words]
            elif self._kind in _OF_CLUSTER or self._kind in _OF_FILES:
                return None
            else:
                found = [] if self.takes_files or self._value.names else self._names()
        elif self._lead:
            found = []
        elif isinstance(self._command, Group) and not self._prefix.startswith("-"):
            commands = {} if self._place else self._command.commands
            shown = ((name, each) for name, each in commands.items() if not each.hidden)
            found = [Candidate(name, (each.help or "").partition("\n")[0]) for name, each in shown]
        else:
            found = self._names()
        return [each._replace(text=self._lead + each.text) for each in found if each.text.startswith(self._prefix)]

    def _names(self) -> list[Candidate]:
        """Return the long names of the options that may still be given."""
        left = (option for param, option in self._options if option.repeatable or param.name not in self._given)
        return [Candidate(name, option.help) for option in left for name in option.names if name.startswith("--")]

    def _known_words(self, value: Option) -> tuple[str, ...]:
        """Return the words of options and arguments whose types do not say them."""
        from bkctl.bookie.local import STORAGE_CLASSES
        from bkctl.files.directories import FileKind

        if {"--columns", "--sort"}.intersection(value.names):
            lead = "-" if "--sort" in value.names and self._prefix.startswith("-") else ""
            return tuple(lead + name for name in self._columns())
        digests = ("CRC32C", "CRC32", "HMAC", "DUMMY")
        known: dict[str, tuple[str, ...]] = {
            "STATE": ("OPEN", "IN_RECOVERY", "CLOSED"),
            "--digest": digests,
            "--digest-type": digests,
            "--storage": tuple(STORAGE_CLASSES),
            "--kind": tuple(kind.value for kind in FileKind),
            "--output": tuple(Output),
            "COMMAND": self._topics(),
            "--reset-clock": ("all-ledgers", "placement", "replicas"),
        }
        return next((known[name] for name in (*value.names, value.metavar) if name in known), ())

    def _topics(self) -> tuple[str, ...]:
        """Return the words that may follow those behind `help`."""
        node, context = self._tree, context_of(self._tree, "bkctl", None)
        for name in self._words[len(self._words) - self._place :]:
            if name not in getattr(node, "commands", {}):
                return ()
            node = node.get_command(context, name)
        topics = ("connection", "exit-codes") if node is self._tree else ()
        return (*getattr(node, "commands", {}), *topics)

    def _columns(self) -> tuple[str, ...]:
        """Return the JSON names of the columns that the command prints."""
        declaration = getattr(self._command.callback, "declaration", None)
        forms = [] if declaration is None else declaration.forms(Output.JSON)
        return tuple(dict.fromkeys(name for columns in forms for name in columns.names()))

    def asked(self) -> Iterator[Candidate]:
        """Return the candidates that files or a cluster have."""
        found = (text for text in candidates(self._kind, self._given, self._prefix) if text not in self._words)
        return (Candidate(self._lead + text) for text in islice(found, CANDIDATES_MAX))


def candidates(kind: str, options: Mapping[str, list[str]], prefix: str) -> Iterator[str]:
    """Yield completions of `prefix` that no shell expands; `options` are the given ones by parameter name."""
    if kind == "ledger" and (mark := next((mark for mark in ":-" if mark in prefix), None)):
        kind += mark
    found = iter(_ask_cluster(kind, options, prefix)) if kind in _OF_CLUSTER else _OF_FILES[kind](options)
    yield from (text for text in found if text.startswith(prefix) and _WORD.fullmatch(text))


def _racks(cluster: Cluster) -> Iterator[str]:
    from bkctl.metadata.racks import BookieRacks

    return iter(dict.fromkeys(each.rack for each in BookieRacks(cluster).all() if each.rack is not None))


def _ask_cluster(kind: str, options: Mapping[str, list[str]], prefix: str) -> list[str]:
    """Return the first candidates that begin with `prefix`: kept ones that are complete, else the cluster's."""
    from bkctl.metadata.cluster import open_cluster

    uri, context, conf = (options.get(f"g_{field}", [None])[-1] for field in ("metadata_uri", "context", "conf"))
    after = GlobalOptions(metadata_uri=uri, context=context, conf=None if conf is None else Path(conf))
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


def _directories(options: Mapping[str, list[str]]) -> BookieDirectories:
    from bkctl.files.directories import BookieDirectories

    if "directories" in options:
        return BookieDirectories.at(*options["directories"])
    conf = options["g_conf"][-1] if "g_conf" in options else os.environ.get("BKCTL_CONF")
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
_OF_FILES: Final[dict[str, Callable[[Mapping[str, list[str]]], Iterator[str]]]] = {
    "journal": lambda options: map(_file_name, _directories(options).journals()),
    "log": lambda options: map(_file_name, _directories(options).entry_logs()),
    "context": lambda _: iter(context_names(Contexts.read(os.environ))),
}
