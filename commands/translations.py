"""The names that Apache's tools have for our commands: the Java shell, Java's bkctl and pulsar-admin.

One table makes docs/from-the-shell.md, and the hint for a command that was typed by its Java name.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_SUGGESTIONS_MAX: Final = 3
#: Groups are meant for each other from here on: `bookie` and `bookies`.
_RELATED_RATIO: Final = 0.8


class Translation(NamedTuple):
    """One command of Apache's tools, "" where a tool lacks it, and ours."""

    shell: str
    java: str
    ours: str
    note: str = ""


#: The Java shell (`bookkeeper shell X`), Java's bkctl, ours.
TRANSLATIONS: Final = (
    Translation("listledgers", "bookie listledgers", "ledger list", "metadata is shown without -m"),
    Translation("ledgermetadata", "ledger show", "ledger show", "`metadata export` and `import` for -d and -r"),
    Translation("readledger", "bookie readledger", "ledger read", "-r is `--recover`, -m is `--body`"),
    Translation("deleteledger", "ledger delete", "ledger delete", "asks, and keeps an undo file"),
    Translation("simpletest", "ledger simpletest", "ledger test"),
    Translation("activeledgers", "", "entrylog active"),
    Translation("recover", "bookies recover", "bookies recover"),
    Translation("ledger", "bookie ledger", "bookie index show", "`bkctl ledger` is a group here"),
    Translation("listfilesondisc", "bookie listfilesondisc", "bookie files"),
    Translation("lastmark", "bookie lastmark", "journal lastmark"),
    Translation("readjournal", "bookie readjournal", "journal read"),
    Translation("readlog", "bookie readlog", "entrylog read", "a bare log id is decimal, `0x` hex"),
    Translation("readlogmetadata", "bookie readlogmetadata", "entrylog show", "a bare log id is decimal, `0x` hex"),
    Translation("localconsistencycheck", "bookie localconsistencycheck", "bookie check"),
    Translation("check-db-ledgers-index", "bookie check-db-ledgers-index", "bookie index check"),
    Translation(
        "rebuild-db-ledger-locations-index",
        "bookie rebuild-db-ledger-locations-index",
        "bookie index rebuild",
        "with `--locations`",
    ),
    Translation("rebuild-db-ledgers-index", "bookie rebuild-db-ledgers-index", "bookie index rebuild", "`--ledgers`"),
    Translation(
        "regenerate-interleaved-storage-index-file",
        "bookie regenerate-interleaved-storage-index-file",
        "bookie index regenerate",
    ),
    Translation("convert-to-db-storage", "bookie converttodbstorage", "bookie convert", "`--to db`"),
    Translation(
        "convert-to-interleaved-storage", "bookie converttointerleavedstorage", "bookie convert", "`--to interleaved`"
    ),
    Translation("bookieformat", "bookie format", "bookie format", "-n is `--yes-really ID`, -d is `--delete-cookie`"),
    Translation("initbookie", "bookie init", "bookie init"),
    Translation("bookiesanity", "bookie sanitytest", "bookie sanity", "any bookie, not only the local one"),
    Translation("listbookies", "bookies list", "bookies list", "`--state rw`, `ro` or `down`"),
    Translation("bookieinfo", "bookies info", "bookies usage"),
    Translation("endpointinfo", "bookie endpointinfo", "bookies show"),
    Translation("clusterinfo", "", "cluster info", "`cluster status` and `cluster health` say more"),
    Translation("whatisinstanceid", "bookies instanceid", "cluster id"),
    Translation("initnewcluster", "bookies init", "cluster init"),
    Translation("nukeexistingcluster", "bookies nukeexistingcluster", "cluster nuke", "-i is `--yes-really ID`"),
    Translation("metaformat", "bookies metaformat", "cluster nuke", "then `cluster init`"),
    Translation("decommissionbookie", "bookies decommission", "bookies decommission"),
    Translation("updateledgers", "bookie flip-bookie-id", "metadata replace-bookie"),
    Translation("updateBookieInLedger", "", "metadata replace-bookie"),
    Translation("", "bookieid searchreplace", "metadata replace-bookie"),
    Translation("updatecookie", "cookie admin", "cookie rename", "also `cookie expand`, `list` and `delete`"),
    Translation("cookie_create", "cookie create", "cookie create"),
    Translation("cookie_get", "cookie get", "cookie show"),
    Translation("cookie_update", "cookie update", "cookie update"),
    Translation("cookie_delete", "cookie delete", "cookie delete"),
    Translation("cookie_generate", "cookie generate", "cookie generate"),
    Translation("", "healthCheck switch", "cluster healthcheck status", "`enable` and `disable` change it"),
    Translation("autorecovery", "autorecovery toggle", "autorecovery status", "`enable` and `disable` change it"),
    Translation("queryautorecoverystatus", "", "autorecovery workers"),
    Translation("listunderreplicated", "autorecovery listunderreplicated", "autorecovery list"),
    Translation("whoisauditor", "autorecovery whoisauditor", "autorecovery auditor"),
    Translation("triggeraudit", "autorecovery triggeraudit", "autorecovery audit"),
    Translation("forceauditchecks", "", "autorecovery audit", "`--reset-clock`"),
    Translation("lostbookierecoverydelay", "autorecovery lostbookierecoverydelay", "autorecovery delay"),
)

#: `pulsar-admin bookies X` → ours.
PULSAR: Final = (
    Translation("list-bookies", "", "bookies list"),
    Translation("racks-placement", "", "bookies racks list"),
    Translation("get-bookie-rack", "", "bookies racks list"),
    Translation("set-bookie-rack", "", "bookies racks set", "-b is BOOKIE, -r `--rack`, -g `--group`"),
    Translation("delete-bookie-rack", "", "bookies racks unset", "-b is BOOKIE"),
)

#: Our commands, and first guesses for them, some by users of kubectl, ceph, etcdctl or df.
_GUESSED: Final = {
    "metadata export -f FILE": "backup",
    "cluster health": "bookie health, bookies health, check, health",
    "cluster status": "bookie status, bookies status, endpoint, stat, status",
    "bookies list": "cluster list, cluster ls, member, members, nodes, osd",
    "cookie list": "cookies",
    "bookies usage": "df, disk, disks",
    "entrylog list": "entrylogs, logs",
    "cluster health detail": "health detail",
    "cluster info": "info",
    "journal list": "journals",
    "ledger list --count": "ledger count",
    "ledger list": "ledgers, list, ls",
    "bookies list --state ro": "listbookies -ro",
    "bookies list --state rw": "listbookies -rw",
    "entrylog read": "log",
    "progress show": "ps",
    "bookies racks list": "racks",
    "autorecovery status": "repl",
    "metadata import FILE": "restore",
    "autorecovery list": "underreplicated",
    "top": "watch",
}
GUESSES: Final = {guess: ours for ours, guesses in _GUESSED.items() for guess in guesses.split(", ")}
#: Nouns behind a verb (`get topics`), and the group of their commands.
_NOUNS: Final = {"bookie": "bookies", "node": "bookies", "scope": "metadata", "topic": "pulsar"}

#: Names that other tools give to the commands of a group, and ours.
_SYNONYMS: Final = {
    "add": ("create", "set", "write"),
    "cat": ("read", "show"),
    "create": ("write", "add", "init", "start", "up"),
    "describe": ("show", "info"),
    "dump": ("read", "export", "show"),
    "get": ("show", "list"),
    "info": ("show", "status"),
    "ls": ("list", "files"),
    "new": ("create", "write", "init"),
    "ps": ("status", "list"),
    "remove": ("delete", "unset", "decommission"),
    "rm": ("delete", "unset", "decommission"),
    "stat": ("show", "status"),
    "tail": ("read", "watch"),
}


def translate(words: Iterable[str]) -> str | None:
    """Return our command for the words (one at least) of one of Apache's, typed after `bkctl`; None for others.

    A group of Java's bkctl that does not exist here stands for its command.
    """
    *group, name = [word.lower() for word in words]
    whole = " ".join([*group, name])
    return next(
        (
            each.ours
            for each in (*TRANSLATIONS, *PULSAR)
            if whole in (each.java.lower(), each.java.lower().partition(" ")[0]) or name == each.shell.lower()
        ),
        None,
    )


def guess(words: list[str], commands: Iterable[str]) -> str | None:
    """Return our command for words that are not one, typed after `bkctl`: a guess, or a verb before its noun."""
    if len(words) < 2:
        return GUESSES.get(words[0])
    verb, noun = words[0], words[1].removesuffix("s")
    group = _NOUNS.get(noun, noun)
    verbs = (*(("list",) if noun != words[1] and verb == "get" else ()), verb, *_SYNONYMS.get(verb, ()))
    known = set(commands)
    found = next((f"{group} {each}" for each in (*verbs, words[1]) if f"{group} {each}" in known), None)
    return GUESSES.get(" ".join(words[:2])) or found or GUESSES.get(verb)


def find_elsewhere(path: list[str], name: str, commands: Iterable[str]) -> list[str]:
    """Return the command of group `path` that another tool calls `name`, or the `commands` whose last word is `name`.

    At most three, the group most like `path` first.
    """
    typed = " ".join(path)
    known = list(commands)
    for synonym in _SYNONYMS.get(name, ()) if path else ():
        if f"{typed} {synonym}" in known:
            return [f"{typed} {synonym}"]

    def likeness(command: str) -> float:
        return SequenceMatcher(None, typed, command.rpartition(" ")[0]).ratio()

    found = sorted((each for each in known if each.rpartition(" ")[2] == name), key=likeness, reverse=True)
    if found and likeness(found[0]) >= _RELATED_RATIO:
        return found[:1]
    return found[:_SUGGESTIONS_MAX]
