"""The next command of each finding of the checks, and why that one. `docs/health.md` lists them.

Health has its own declaration, in `bkctl/metadata/admin/health_codes.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.columns import Column

from .audit import shown_uri

if TYPE_CHECKING:
    from .settings import GlobalOptions

#: The options of this command line that name the cluster, for the commands that it prints.
_CONNECTION: ContextVar[str] = ContextVar("_CONNECTION", default="")


class Next(NamedTuple):
    """A command with {fields} of the finding, and why that one."""

    command: str
    why: str


_VERIFY: Final = Next("bkctl ledger verify {ledger}", "it says whether other bookies have sound replicas")
_REGENERATE: Final = Next("bkctl bookie index regenerate {ledger}", "it makes the index again from the entry logs")
_REBUILD: Final = Next("bkctl bookie index rebuild --ledgers --locations", "it makes them again from the entry logs")
_NOTHING_LOST: Final = Next("bkctl bookie gc", "it is removed by the next collection: nothing is lost")
_EXTRACT: Final = Next("bkctl entrylog extract {file} --ledger LEDGER -f FILE", "it saves the readable entries")
_RECHECK: Final = Next("bkctl bookie check", "entries that the indexes know are in the entry logs")
_LIST_COOKIE: Final = Next("bkctl cookie show {bookie}", "it shows what the metadata store expects")
_COPY: Final = Next("bkctl autorecovery mark {ledger} --missing {bookie}", "workers copy what it lacks from the others")

#: Check → kind of finding → the step.
STEPS: Final[Mapping[str, Mapping[str, Next]]] = {
    "ledger verify": {
        "missing": _COPY,
        "damaged": _COPY,
        "different": Next("bkctl ledger locate {ledger}", "it shows the bookies to compare: one has other bytes"),
        "unavailable": Next("bkctl why bookie {bookie}", "it shows why the bookie does not answer"),
        "length": Next("bkctl ledger show {ledger}", "the metadata's length is wrong; the entries are sound"),
    },
    "bookie check": {
        "wrongEntry": _VERIFY,
        "noRecord": _VERIFY,
        "logMissing": _VERIFY,
        "digest": _VERIFY,
        "notIndexed": _REGENERATE,
        "logDamaged": Next("bkctl entrylog verify", "it names the damaged log and what is behind the damage"),
        "noLedger": _NOTHING_LOST,
        "noMasterKey": Next("bkctl ledger show {ledger}", "the next writer's key is accepted, whoever writes"),
        "twice": _REGENERATE,
        "badItem": _REBUILD,
        "wrongDirectory": _REBUILD,
        "strayTable": _REBUILD,
        "unindexed": _REGENERATE,
        "relocation": Next("bkctl bookie files", "it shows the file that is left over; the next start removes it"),
        "needsIntegrityCheck": _RECHECK,
    },
    "entrylog verify": {
        "torn": _RECHECK,
        "damaged": _EXTRACT,
        "unreadable": _EXTRACT,
        "missing": _RECHECK,
        "mismatch": _RECHECK,
    },
    "journal verify": {
        "torn": Next("bkctl journal read {file}", "the bookie drops the unacknowledged end when it starts"),
        "damaged": Next("bkctl journal read {file}", "it shows the records up to the damage"),
        "unreadable": Next("bkctl journal list", "it shows the journals beside it, and their versions"),
        "missing": Next("bkctl journal lastmark", "it shows from which journal a start replays"),
        "mismatch": Next("bkctl journal read {file}", "it shows the entries that do not match their digests"),
    },
    "metadata check": {
        "unparsable": Next("bkctl metadata get {path}", "it shows the bytes; an export or an undo file has sound ones"),
        "refused": Next("bkctl metadata get {path}", "this user may not read it; --metadata-user names another"),
        "impossible": Next("bkctl metadata get {path}", "it shows the fields that contradict each other"),
        "dangling": Next("bkctl why ledger {ledger}", "it shows whether other bookies have its entries"),
        "misplaced": Next("bkctl ledger locate {ledger}", "it shows the bookies and racks of each fragment"),
        "stuck-in-recovery": Next("bkctl ledger recover {ledger}", "it decides the end of the ledger, and closes it"),
        "foreign-scopes": Next("bkctl metadata orphans", "it shows what the formatted cluster left"),
        "other-layout": Next("bkctl metadata layout", "it shows the layout in use, which is not that of this ledger"),
        "invalid-name": Next("bkctl metadata tree", "it shows the node; the store's own client removes it"),
        "unparsable-cookie": Next("bkctl cookie list", "it names the bookie; 'bkctl cookie update' writes a new one"),
        "cookie-of-another-cluster": Next("bkctl cookie list", "it names the bookie, which will not start again"),
        "unparsable-mark": Next("bkctl autorecovery unmark {ledger}", "no worker can use it; an audit marks again"),
        "orphaned-mark": Next("bkctl autorecovery unmark {ledger}", "its ledger is gone: nothing is to be replicated"),
    },
    "cookie verify": {
        "cookie": _LIST_COOKIE,
        "bookieId": Next("bkctl cookie rename OLD NEW", "the id changed: 'metadata replace-bookie' follows"),
        "journalDirs": _LIST_COOKIE,
        "ledgerDirs": Next("bkctl cookie expand --conf bk_server.conf", "directories that are added need a cookie"),
        "indexDirs": _LIST_COOKIE,
        "instanceId": Next("bkctl cluster id", "the directories or the configuration are of another cluster"),
    },
}


def name_connection(given: GlobalOptions) -> None:
    """Add the connection options of this command line to the commands that it prints."""
    uri = given.metadata_uri and shown_uri(given.metadata_uri)
    named = {"--metadata-uri": uri, "--context": given.context, "--conf": given.conf}
    _CONNECTION.set("".join(f" {name} {shlex.quote(str(value))}" for name, value in named.items() if value))


def pasted(command: str) -> str:
    """Return a command of ours with the connection options, so that it can be pasted."""
    is_whole = not command.startswith("bkctl ") or command.startswith("bkctl local ") or " --conf " in command
    return command if is_whole else command + _CONNECTION.get()


def undoing(file: Path | str, uri: str | None = None) -> str:
    """Return the command that undoes the changes in a file, to be pasted; `uri` names another cluster."""
    words = ["bkctl", "metadata", "undo", str(file)]
    return pasted(shlex.join(words)) if uri is None else shlex.join([*words, "-u", uri])


def next_step(check: str, kind: str, *, databases: bool = False, **fields: object) -> str | None:
    """Return the command for a finding of `kind`; None for another kind. Fields that are None stay words.

    `databases`: the indexes are databases, which are rebuilt as a whole.
    """
    step = STEPS[check].get(kind)
    step = _REBUILD if databases and step is _REGENERATE else step
    if step is None:
        return None
    words = {name: name.upper() if value is None else shlex.quote(str(value)) for name, value in fields.items()}
    return pasted(step.command.format_map(words))


def next_column(
    check: str, kind_of: Callable[[Any], str], *, databases: bool = False, **fields: Callable[[Any], object]
) -> Column:
    """Return the column with the next command of a row of `check`; `fields` are functions row → value."""

    def step(row: Any) -> str | None:
        return next_step(check, kind_of(row), databases=databases, **{name: read(row) for name, read in fields.items()})

    return Column(None, "nextCommand", step)
