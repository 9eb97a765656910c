"""Commands: `@command` declares one; `Run` gives it settings, output and the cluster.

    @command(app, "list", connects=True)
    def list_ledgers(run: Run, scope_id: ScopeToList) -> None:
        with run.cluster() as cluster:
            run.render(cluster.ledgers.ledgers(scope_id), COLUMNS)

A command is three steps: the signature parses, one call into the domain, `run` renders.
"""

from __future__ import annotations

import errno
import gc
import inspect
import os
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import typer

from bkctl.columns import Columns, applied_column
from bkctl.errors import BkctlError, Conflict, FindingsError, UsageError, is_interrupt

from . import interrupts
from .activity import Activity
from .audit import Audit, audit_file, shown_uri, state_directory, without_secrets
from .columns import ALL, Output, RowOrder, RowSelection
from .connection import (
    CONNECT_TIMEOUT_S_DEFAULT,
    NO_LOGIN,
    TIMEOUT_S_DEFAULT,
    Connection,
    Login,
    NoClusterNamed,
    connect_to,
    other_connection,
    parse_bookie_addresses,
    store_security,
)
from .documents import Document, document_schema, forms
from .options import Composite
from .output import RowWriter, open_writer, show
from .parser import Command, Group
from .session import Session
from .settings import GlobalOptions, global_parameters, read_environment, read_options
from .terminal import continue_without_stdout, emit, emit_bytes, say, wants_color
from .texts import counted, plain, plain_lines
from .values import parse_number, parse_switch

if TYPE_CHECKING:
    import logging
    import ssl

    from bkctl.checks.digests import DigestChecker
    from bkctl.client.ledger import BookKeeper
    from bkctl.client.placement import RackRules
    from bkctl.config import BookieConfig
    from bkctl.files.directories import BookieDirectories
    from bkctl.formats.entry import DigestType
    from bkctl.http.client import ApiClient
    from bkctl.metadata.admin.undo import UndoFile
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.store import StoreSecurity
    from bkctl.pace import Pace
    from bkctl.protocol.messages import Protocol

    from .drawing import TreeWriter

#: Python looks for reference cycles this seldom while asynchronous work runs, which takes a tenth less time.
_GC_THRESHOLDS: Final = (20_000, 20, 100)

F = TypeVar("F", bound=Callable[..., None])
T = TypeVar("T")
#: A run that ends sooner is not listed by `bkctl progress`.
LISTED_S: Final = 2.0
#: The end of the help of commands that ask, unless --yes is not enough for them.
ASKS: Final = "Asks before it destroys something; without a terminal --yes is required."
#: The value of `--undo` that means no file.
NO_FILE: Final = "none"


class Declined(BkctlError):
    """The user declined."""


class Run:
    """One run of a command: its settings, its output, its way to the cluster."""

    def __init__(self, session: Session, after: GlobalOptions) -> None:
        environment = read_environment(os.environ)
        #: Nearest first, each with the words that name it in messages; None for the environment.
        self._levels: list[tuple[str | None, GlobalOptions]] = [
            ("after the command", after),
            ("before the group", session.globals),
            (None, environment),
        ]
        merged = self._options = after.over(session.globals).over(environment)
        self.output = session.output = merged.output or Output.TABLE
        self.selection = RowSelection(merged.columns, merged.sort)
        self.timeout_s = merged.timeout_s if merged.timeout_s is not None else TIMEOUT_S_DEFAULT
        connect_s = merged.connect_timeout_s
        self.connect_timeout_s = min(CONNECT_TIMEOUT_S_DEFAULT, self.timeout_s) if connect_s is None else connect_s
        self.yes = merged.yes
        self.conf: Path | None = merged.conf
        parse_bookie_addresses(merged.bookie_addresses)
        self._session = session
        self._connection: Connection | None = None
        self.verbose, self.quiet = session.verbose, session.quiet
        self._no_color = session.no_color
        self._activity: Activity | None = None
        #: The value of --dry-run, None for commands without it: rows say whether the run was applied.
        self.dry_run: bool | None = None
        self._has_noted_dry_run = False
        #: True once the run may change something.
        self._changes = False

    # --- where --------------------------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """Return the metadata URI in effect, and its source. Raises UsageError if no cluster is named."""
        if self._connection is None:
            self._connection = connect_to(self._levels, os.environ)
        return self._connection

    def standing_connection(self) -> Connection:
        """Return the connection of commands without connection options. Raises as `connection`."""
        return connect_to(self._levels[2:], os.environ)

    def given_options(self) -> GlobalOptions:
        """Return the options before the group and after the command, merged; nothing of the environment."""
        (_, after), (_, before), _ = self._levels
        return after.over(before)

    @property
    def given_output(self) -> Output:
        """The form of output that an option names, for commands that print no rows; nothing of the environment."""
        return self.given_options().output or Output.TABLE

    def given_connection(self) -> Connection:
        """Return the metadata URI that options name, a context's not. Raises UsageError when they name none."""
        given: list[tuple[str | None, GlobalOptions]] = [
            (source, replace(options, context=None)) for source, options in self._levels[:2]
        ]
        if all(options.metadata_uri is None and options.conf is None for _, options in given):
            raise UsageError("No cluster is named", hint="add --metadata-uri URI or --conf FILE")
        return connect_to(given, {})

    def connection_settings(self) -> GlobalOptions:
        """Return the merged options, including the settings of a context. Raises as `connection`."""
        return self._options.over(self.connection().settings)

    @property
    def names_metadata(self) -> bool:
        """True if a metadata URI or a context counts; for commands that can do without."""
        if all(options.metadata_uri is None and options.context is None for _, options in self._levels):
            return False
        try:
            self.connection()
        except NoClusterNamed:  # The --conf of a bookie without a cluster hides the environment's.
            return False
        return True

    def cluster(self, *, create_store: bool = False) -> Cluster:
        """Return the cluster that the options name, a context manager; `create_store` creates its SQLite file."""
        connection = self.connection()
        self.detail(f"cluster {shown_uri(connection.uri)} ({connection.source})")
        cluster = self._open(connection.uri, self.security(connection), create_store=create_store)
        if self._session.audit is not None:
            self._session.audit.connected(connection.uri, connection.source)
            self._session.audit.begin()
        return cluster

    def security(self, connection: Connection) -> StoreSecurity:
        """Return TLS and login of the metadata store of `connection`."""
        return store_security(self._options.over(connection.settings), os.environ)

    def open_other_cluster(self, text: str, *, login: Login = NO_LOGIN, create_store: bool = False) -> Cluster:
        """Return a second cluster, named by URI or `context:NAME`, with the timeout of the first. The caller closes it.

        It is logged in to as `login` says, else as its URI or its context does; the connection's own login goes to the
        servers of the connection only. With `create_store` a SQLite file is made where there is none; a cluster in it
        is not.
        """
        from bkctl.metadata.uri import parse_uri

        connection = other_connection(text, os.environ)
        named = parse_uri(connection.uri).security
        options, environment, shared = connection.settings, {}, None
        try:
            own = self.connection()
        except UsageError:
            own = None
        if own is not None and _same_servers(own.uri, connection.uri):
            environment = dict(os.environ) if login == NO_LOGIN else {}
            if connection.context is None:
                options, shared = self._options.over(own.settings), parse_uri(own.uri).security
        security = store_security(login.over(options), environment)
        if named is not None and login == NO_LOGIN:
            security = named.over(security)
        return self._open(connection.uri, security.over(shared), create_store=create_store)

    def _open(self, uri: str, security: StoreSecurity, *, create_store: bool) -> Cluster:
        from bkctl.metadata.cluster import open_cluster

        self._quiet_libraries()
        with self.working(f"Connecting to {shown_uri(uri)}", listed=False):
            return open_cluster(
                uri, timeout_s=self.timeout_s, connect_timeout_s=self.connect_timeout_s,
                create_store=create_store, security=security,
            )  # fmt: skip

    def bookkeeper(
        self, cluster: Cluster, protocol: Protocol | None = None, *, only: Collection[str] | None = None
    ) -> BookKeeper:
        """Return a client of `cluster` with the options' timeout, TLS and bookie addresses; an async context manager.

        `only` these bookies get new ledgers.
        """
        from bkctl.client.ledger import BookKeeper
        from bkctl.protocol.messages import Protocol

        return BookKeeper(
            cluster,
            protocol=protocol or Protocol.V3,
            tls=self.bookie_tls(),
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            addresses=self.bookie_addresses(),
            only=only,
            rack_rules=self.rack_rules(),
        )

    def rack_rules(self) -> RackRules:
        """Return the settings of placement in --conf, under Java's names, or their defaults."""
        from bkctl.client.placement import RackRules
        from bkctl.config import read_properties

        if self.conf is None:
            return RackRules()
        found = read_properties(self.conf)
        count, enforced = "minNumRacksPerWriteQuorum", "enforceMinNumRacksPerWriteQuorum"
        rules = RackRules(script=found.get("networkTopologyScriptFileName") or None)
        if count in found:
            rules = rules._replace(count_min=max(parse_number(found[count], count), 1))
        if enforced in found:
            rules = rules._replace(is_enforced=parse_switch(found[enforced], enforced))
        return rules

    def bookie_tls(self, refresh_s: float = 0) -> ssl.SSLContext | None:
        """Return the TLS settings for connections to bookies, None without --tls-ca; `refresh_s` as `client_tls`."""
        from bkctl.metadata.store import client_tls

        ca, certificate, key = self.connection_settings().tls_files()
        if ca is None and (certificate or key):
            raise UsageError("--tls-cert and --tls-key require --tls-ca", hint="add the authorities' PEM file")
        return None if ca is None else client_tls(ca, certificate, key, refresh_s=refresh_s)

    def bookie_addresses(self) -> dict[str, tuple[str, int]]:
        """Return the addresses in --bookie-address: bookie id → host and port."""
        return parse_bookie_addresses(self.connection_settings().bookie_addresses)

    def bookie_host(self, bookie_id: str) -> str | None:
        """Return the host of a bookie in --bookie-address, None without one."""
        return self.bookie_addresses().get(bookie_id, (None, 0))[0]

    def http_client(self, url: str, *, is_registered: bool = False) -> ApiClient:
        """Return a client of the HTTP server at `url`, with timeout and TLS of the options and BKCTL_API_TOKEN.

        `is_registered`: the metadata store names `url`, so that the token goes there only as `token_for_registered`
        says.
        """
        from bkctl.http.client import ApiClient
        from bkctl.http.server_url import token_for_registered
        from bkctl.metadata.store import client_tls

        options = self._options
        with suppress(UsageError):  # Nothing names a cluster, and nothing has to.
            options = options.over(self.connection().settings)
        self.detail(f"HTTP server {url}")
        ca, certificate, key = options.tls_files()
        tls = client_tls(ca, certificate, key) if url.lower().startswith("https:") else None
        given = token = os.environ.get("BKCTL_API_TOKEN") or None
        if is_registered:
            token = token_for_registered(url, token, has_authorities=ca is not None)
            if token != given:
                self.warn(
                    f"the token does not go to {url}, which the metadata store names: "
                    "use https with --tls-ca, or give the server as --bookie-url"
                )
        client = ApiClient(
            url, token=token, timeout_s=self.timeout_s, connect_timeout_s=self.connect_timeout_s, tls=tls
        )
        if token is not None and not client.server.is_private:
            self.warn(f"the token goes to {url} unencrypted; use https where the server has it")
        return client

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run asynchronous work to its end. A signal cancels it once, and is raised as KeyboardInterrupt at its end."""
        from asyncio import CancelledError

        from bkctl.protocol.connection import run

        # Ledgers and entries allocate much, and hardly anything of it in reference cycles.
        thresholds = gc.get_threshold()
        gc.set_threshold(*_GC_THRESHOLDS)
        try:
            return run(interrupts.cancelled(work))
        except CancelledError:
            if interrupts.has_come():
                raise KeyboardInterrupt from None
            raise
        finally:
            gc.set_threshold(*thresholds)

    def config(self) -> BookieConfig:
        """Return the bookie's settings in `--conf`. Raises UsageError without one."""
        from bkctl.config import BookieConfig

        if self.conf is None:
            raise UsageError("No bookie configuration is given", hint="add --conf bk_server.conf")
        return BookieConfig.load(self.conf)

    def directories(self, given: Iterable[Path] | None, *, needed: bool = True) -> BookieDirectories:
        """Return the directories to read: the given ones, else the directories in `--conf`.

        Raises UsageError if `needed` directories are missing, NotFound if they hold no file of a bookie.
        """
        from bkctl.files.directories import BookieDirectories

        places = list(given or ())
        if places:
            return BookieDirectories.at(*places).of_a_bookie()
        if self.conf is not None:
            config = self.config()
            found = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)
            # A missing directory concerns only the commands that read it.
            exist = all(place.is_dir() for place in (*found.journal_dirs, *found.ledger_dirs, *found.index_dirs))
            return found.of_a_bookie() if exist else found
        if needed:
            raise UsageError(
                "No directory is given", hint="name the bookie's directories, or add --conf bk_server.conf"
            )
        return BookieDirectories()

    @contextmanager
    def digest_checker(
        self, digest_type: DigestType | None, password: bytes, files: Iterable[Path]
    ) -> Iterator[DigestChecker]:
        """Checks the entries in `files` against their digests; what is not given comes from a metadata store, if the
        command names one."""
        from bkctl.checks.digests import DigestChecker

        if digest_type is not None or not self.names_metadata:
            yield DigestChecker(digest_type, password=password or None)
            return
        from bkctl.metadata.stored_ledgers import StoredDigests

        with self.cluster() as cluster:
            stored = StoredDigests(cluster, files)
            yield DigestChecker(
                digest_of=stored.digest_of, password=password or None,
                password_of=None if password else stored.password_of,
            )  # fmt: skip

    def log(self) -> None:
        """Log to stderr, with times, and outlive stdout; for commands that serve in the foreground."""
        import logging

        from bkctl.bookie.log_limit import RepeatLimit

        self.outlive_stdout()
        level = logging.WARNING if self.quiet else logging.INFO
        _log_to_stderr(level, "%(asctime)s %(levelname)s %(message)s", RepeatLimit())
        logging.getLogger("kazoo").setLevel(logging.INFO if self.verbose else logging.CRITICAL)

    def _quiet_libraries(self) -> None:
        """Let libraries log to stderr only with --verbose; failures are reported as one error."""
        import logging

        _log_to_stderr(logging.INFO if self.verbose else logging.CRITICAL, "%(name)s: %(message)s")

    # --- output -------------------------------------------------------------------------------------------------

    def render(self, rows: Iterable[Any], columns: Columns, *, findings: bool = False) -> int:
        """Print `rows` as they come, and return their number. What came before an error is printed, then it is raised.

        `findings`: as for `rows`.
        """
        with self.rows(columns, findings=findings) as writer:
            writer.rows(rows)
        return writer.count

    def watch(
        self,
        seconds: float | None,
        look: Callable[[], Iterable[Any]],
        columns: Columns,
        *,
        subscribe: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
        single: bool = False,
        key: Callable[[Any], Any] | None = None,
    ) -> None:
        """Print the rows of `look`; with `seconds`, again after each change, until the user ends it.

        `subscribe(callback)` makes the store call at each change, and returns the cancel: then changes are seen at
        once, else when the next `seconds` are over. On a terminal a table is drawn anew, elsewhere printed again; the
        other forms give the rows that are new or changed, ndjson also those that went, with `"removed":true`. `single`:
        one row, shown as an object. `key` tells rows apart, by default by their ids.
        """
        if seconds is None:
            rows = look()
            if single:
                self.show(next(iter(rows)), columns)
            else:
                self.render(rows, columns)
            return
        from .watch import watch

        self._clear_activity()
        watch(
            look, columns, self.output, seconds=seconds, subscribe=subscribe, single=single, color=self.color,
            selection=self.selection, key=key,
        )  # fmt: skip

    def rows(self, columns: Columns, *, live: bool = False, findings: bool = False) -> RowWriter:
        """Return a writer to give rows to one by one, a context manager.

        `live` prints each row at once, so that --sort does not apply. A table of `findings` has no header without rows:
        the command says in a sentence that all is well.
        """
        if live and self.selection.order is not None:
            raise UsageError("--sort does not apply to rows that are printed as they come")
        return open_writer(
            self._with_applied(columns),
            self.output,
            self.selection,
            color=self.color,
            live=live,
            before_write=self._clear_activity,
            findings=findings,
            note=self.note,
        )

    def _with_applied(self, columns: Columns) -> Columns:
        """Return the columns, with `applied` where the command has --dry-run and does more than to read."""
        if self.dry_run is None or not (self.dry_run or self._changes):
            return columns
        return columns.and_also(applied_column(is_applied=not self.dry_run))

    @property
    def draws(self) -> bool:
        """True if trees and panels replace the table: on a terminal, unless options choose a form or columns."""
        is_chosen = self.output is Output.TABLE and self.selection == ALL
        return is_chosen and sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower()

    def tree(self, columns: Columns, levels: Sequence[Sequence[str]]) -> RowWriter | TreeWriter:
        """Return a writer to give rows to, as `rows`; on a terminal it prints them as trees.

        `levels` are the JSON names of the columns of each level, the root first.
        """
        if not self.draws:
            return self.rows(columns)
        from .drawing import TreeWriter

        return TreeWriter(columns, levels, color=self.color, before_write=self._clear_activity)

    def panel(self, title: str, paragraphs: Iterable[str], style: str) -> None:
        """Print paragraphs in a frame in the color `style`, such as `red`."""
        from .drawing import panel_text

        self.text(panel_text(title, paragraphs, style=style, color=self.color))

    def sort_by(self, column: str) -> None:
        """Sort rows by `column`, as --sort does."""
        self.selection = self.selection._replace(order=RowOrder.parse(column))

    def limit_sorted(self, limit: int | None) -> int | None:
        """With --sort, apply `limit` to the sorted rows and return None; else return it, for the command to apply."""
        if self.selection.order is None:
            return limit
        self.selection = self.selection._replace(limit=limit)
        return None

    def table_columns(self, short: Columns, full: Columns) -> Columns:
        """Return `short` for a table, where `full` has the columns to choose from; `full` for other forms."""
        return short.with_hidden(full) if self.output is Output.TABLE else full

    def show(self, value: Any, columns: Columns) -> None:
        """Print one object."""
        self._clear_activity()
        show(value, self._with_applied(columns), self.output, color=self.color, selection=self.selection)

    def text(self, text: str) -> None:
        """Print `text` on stdout as it is (no form of output applies)."""
        self._clear_activity()
        emit(text)

    def raw(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes to stdout as they are."""
        self._clear_activity()
        emit_bytes(data)

    def note(self, text: str) -> None:
        """Say something on stderr, unless --quiet."""
        if not self.quiet:
            self._say(text)

    def note_dry_run(self, plan: str = "nothing was changed") -> None:
        """Say on stderr what a dry run would do; only the first call counts."""
        if not self._has_noted_dry_run:
            self._has_noted_dry_run = True
            self.note(f"Dry run: {plan}")

    def _end_dry_run(self) -> None:
        """Say that nothing was changed where rows do not: other forms than tables have `applied`."""
        if self.dry_run and self.output in (Output.TABLE, Output.WIDE):
            self.note_dry_run()

    def warn(self, text: str) -> None:
        """Say on stderr what the user should know before it is too late, unless --quiet."""
        if not self.quiet:
            self.error(f"Warning: {text}")

    def error(self, problem: object) -> None:
        """Report an error on stderr that does not end the run: as the errors that do, it begins with `bkctl:`."""
        self._say(f"bkctl: {problem}")

    def _say(self, text: str) -> None:
        self._clear_activity()
        say(plain_lines(text))

    def detail(self, text: str) -> None:
        """Say something on stderr with --verbose."""
        if self.verbose:
            self._say(text)

    @property
    def color(self) -> bool:
        """True if stdout gets colours."""
        return wants_color(sys.stdout, no_color=self._no_color)

    @contextmanager
    def working(
        self,
        label: str,
        *,
        total: int | None = None,
        unit: str = "",
        enabled: bool = True,
        left: str | None = None,
        pace: Pace | None = None,
        listed: bool = True,
    ) -> Iterator[Activity]:
        """Show the progress of a stage of work: on a terminal's stderr, while nothing else is printed, and elsewhere.

        `bkctl progress` lists it from another terminal (`listed`), and with a `pace` pauses it and changes its rate. An
        interrupt of the work is reported with the progress and with `left`: the state that the work leaves, and how
        to continue or to go back.
        """
        outer = self._activity
        if outer is not None:
            outer.is_covered = True
            outer.clear()
        color = wants_color(sys.stderr, no_color=self._no_color)
        session = self._session
        with Activity(
            label, total=total, unit=unit, enabled=enabled and not self.quiet, color=color, pace=pace,
            work=session.work_of_run if enabled and listed else None, due_at=session.began_at + LISTED_S,
        ) as activity:  # fmt: skip
            self._activity = activity
            try:
                yield activity
            except BaseException as error:
                if self._session.interrupted is None and is_interrupt(error):
                    amount = activity.amount()
                    stage = f"{label}, {amount}" if amount else label
                    self._session.interrupted = "; ".join(filter(None, [stage, left]))
                raise
            finally:
                self._activity = outer
                if outer is not None:
                    outer.is_covered = False

    def _clear_activity(self) -> None:
        if self._activity is not None:
            self._activity.clear()

    # --- asking -------------------------------------------------------------------------------------------------

    def outlive_stdout(self) -> None:
        """Continue, with a note, once stdout is closed: what the run does beside printing is to be complete."""
        continue_without_stdout(lambda: self.note("stdout was closed; the command continues"))

    def start_audit(self, *, begun: bool) -> None:
        """Start the audit of a run that changes something: at once (`begun`), or once a cluster is open.

        A later call, with `begun`, continues the same audit.
        """
        self._changes = True
        self.outlive_stdout()
        path = audit_file(os.environ)
        if path is None:
            return
        if self._session.audit is None:
            self._session.audit = Audit(path, ["bkctl", *self._session.words])
        if begun:
            self._session.audit.begin()

    def confirm(self, loss: str) -> None:
        """Print the loss and ask on a terminal; `--yes` skips the question.

        Raises Declined (exit 1) when the answer is no, UsageError without a terminal and without `--yes`.
        """
        if not self.yes:
            self._ask(loss, "--yes", None)
        self._accept(loss)

    def confirm_name(self, loss: str, name: str, given: str | None) -> None:
        """Print a loss that cannot be undone, and let the user type `name` on a terminal; `--yes` is not enough.

        `given` is the value of --yes-really, which skips the question. Raises as `confirm`, and Conflict for another
        name.
        """
        if given is None:
            self._ask(loss, f"--yes-really {name}", name)
        elif given != name:
            raise Conflict(f"--yes-really {given}: {loss}", hint=f"add --yes-really {name} if that is meant")
        self._accept(loss)

    def _accept(self, loss: str) -> None:
        if self._session.audit is not None:
            self._session.audit.accepted(loss)

    def _ask(self, loss: str, option: str, typed: str | None) -> None:
        if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
            raise UsageError(
                f"{loss}: not asked, since stdin or stderr is not a terminal", hint=f"add {option} to go ahead"
            )
        question = "Go ahead? [y/N]" if typed is None else f"Type {typed} to go ahead:"
        if self._connection is not None:
            print(f"On {shown_uri(self._connection.uri)} ({self._connection.source}):", file=sys.stderr)
        print(f"{plain_lines(loss)}. {plain(question)} ", file=sys.stderr, end="", flush=True)
        answer = sys.stdin.readline().strip()
        if answer != typed if typed is not None else answer.lower() not in ("y", "yes"):
            raise Declined("Declined; nothing was changed")

    @contextmanager
    def undo(self, cluster: Cluster, file: Path | None, *, elsewhere: bool = False) -> Iterator[UndoFile]:
        """Yield the undo file of a command that changes metadata: each change is recorded there before it is made.

        `file` is what `--undo` names ("none": nothing is kept), else it is a new file in the user's state directory.
        The command that applies it is printed at the end, after an error, too. `elsewhere`: `cluster` is not the
        connection's.
        """
        from bkctl.metadata.admin.undo import UndoFile

        path = None if file is not None and str(file) == NO_FILE else file or self._new_undo_file()
        if path is not None and path.exists():
            raise UsageError(f"{path} exists", hint="choose another file for --undo")
        if path is not None and path == file and not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        undo = UndoFile(path, cluster, without_secrets(["bkctl", *self._session.words]))
        try:
            with undo:
                yield undo
        finally:
            if undo.count and path is not None:
                if self._session.audit is not None:
                    self._session.audit.undo_file(path)
                there = f" -u '{cluster.uri}'" if elsewhere else ""
                self.note(f"Undo it with: bkctl metadata undo {path}{there}")

    @contextmanager
    def recorded(self, cluster: Cluster, file: Path | None, *, elsewhere: bool = False) -> Iterator[Cluster]:
        """Yield `cluster` for work whose changes of nodes all go to the undo file; see `undo`."""
        with self.undo(cluster, file, elsewhere=elsewhere) as undo:
            yield undo.recorded()

    @property
    def undo_directory(self) -> Path:
        """The directory of undo files that no --undo names."""
        return state_directory(os.environ) / "undo"

    def _new_undo_file(self) -> Path:
        name = "-".join(word for word in self._session.words[:2] if word.isalpha())
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return self.undo_directory / f"{moment}-{name or 'bkctl'}-{os.urandom(3).hex()}.ndjson"

    def finish_with(self, count: int, one: str, many: str) -> None:
        """Raise FindingsError (exit code 3) for `count` findings, if any; `one` and `many` as in `counted`."""
        if count:
            raise FindingsError(counted(count, one, many))


def _log_to_stderr(level: int, form: str, *filters: logging.Filter) -> None:
    import logging

    logging.basicConfig(level=level, format=form, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            for each in filters:
                handler.addFilter(each)
            handler.addFilter(_make_plain)


def _make_plain(record: logging.LogRecord) -> bool:
    """Let a record be one line without control characters: messages name what the network sent."""
    with suppress(Exception):  # logging reports a message that cannot be made
        record.msg, record.args = plain(record.getMessage()), ()
    return True


def _same_servers(uri: str, other: str) -> bool:
    """Return True if both URIs name the same servers, so that a login may be sent to both."""
    from bkctl.metadata.uri import parse_uri

    one, two = parse_uri(uri), parse_uri(other)
    return (one.driver, set(one.hosts)) == (two.driver, set(two.hosts))


def group(
    help: str | None = None,
    *,
    parts: Iterable[typer.Typer] = (),
    default: str | None = None,
    takes_words: bool = False,
) -> typer.Typer:
    """Return an app with the commands and sub-groups of `parts`, in order.

    `help` is for sub-groups: the root command knows the help of the groups. `default` is the command that runs where
    the words name none, and with `takes_words` also where they begin with a word that is not a command.
    """
    settings = {"default": default, "takes_words": takes_words}
    kind = Group if default is None else type("GroupWithDefault", (Group,), settings)
    app = typer.Typer(cls=kind, add_completion=False, rich_markup_mode=None, help=help)
    for part in parts:
        app.registered_commands += part.registered_commands
        app.registered_groups += part.registered_groups
    return app


class Declaration(NamedTuple):
    """The facts about a command that its help, schema, audit and `--columns` share."""

    function: Callable[..., None]
    prints: tuple[Document, ...]
    #: True if the audit log records some of its runs.
    changes: bool
    has_dry_run: bool

    def forms(self, output: Output) -> list[Columns]:
        """Return the columns of each form of the rows that the command may print as `output`."""
        return forms(self.prints, output, has_dry_run=self.has_dry_run)

    def schema(self, name: str) -> dict[str, Any]:
        """Return the schema of what the command `name` prints with `-o json`."""
        return document_schema(name, self.prints, has_dry_run=self.has_dry_run)


def declaration_of(command: Any) -> Declaration | None:
    """Return the declaration of one of Typer's commands; None for one that `@command` did not declare."""
    found: Declaration | None = getattr(command.callback, "declaration", None)
    return found


def command(
    app: typer.Typer,
    name: str,
    *,
    connects: bool = False,
    opens: bool = True,
    asks: bool = False,
    changes: bool | str | tuple[str, ...] | None = False,
    unless: str | None = None,
    hidden: bool = False,
    prints: tuple[Document, ...] = (),
    examples: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Register a function as the command `name` of `app`.

    The command fills in the parameter `run: Run` and parameters of composite types (see kit/options.py); Typer parses
    the others. `connects`: the command uses a cluster, so its help shows the connection options; not `opens`: it only
    saves them. `asks`: its help shows `--yes` and ends with ASKS. `changes`: the audit log records the command
    unless its parameter `dry_run` is set; a string, or several, name the parameters that make the command change
    something, and `unless` one that makes it read only; None: the command starts the audit itself. `prints` are the
    forms of what it prints, for --columns, --sort and the schema. `examples` are whole command lines for its help.
    """

    def register(function: F) -> F:
        own: list[inspect.Parameter] = []
        composites: dict[str, Composite] = {}
        for param in inspect.signature(function, eval_str=True).parameters.values():
            if param.annotation is Run:
                continue
            metadata = getattr(param.annotation, "__metadata__", ())
            composite = next((item for item in metadata if isinstance(item, Composite)), None)
            if composite is None:
                own.append(param.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            else:
                composites[param.name] = composite
                own.extend(composite.parameters)
        taken = {param.name for composite in composites.values() for param in composite.parameters}
        declaration = Declaration(function, prints, changes is not False, "dry_run" in {param.name for param in own})
        global_options = global_parameters(connects=connects, asks=asks, besides=own)

        def invoke(**values: Any) -> None:
            context: typer.Context = values.pop("typer_context")
            session: Session = context.find_root().obj
            global_values = {param.name: values.pop(param.name) for param in global_options}
            run = Run(session, read_options(global_values))
            if run.selection != ALL or run.output is Output.ID:
                # Before anything is read or changed.
                run.selection.check(declaration.forms(run.output), run.output)
            arguments = {name: composite.resolve(values) for name, composite in composites.items()}
            arguments.update({key: value for key, value in values.items() if key not in taken})
            causes = (changes,) if isinstance(changes, str) else changes
            is_change = any(arguments[name] for name in causes) if isinstance(causes, tuple) else bool(causes)
            if unless is not None:
                is_change = is_change and not arguments[unless]
            run.dry_run = arguments.get("dry_run")
            if is_change and not run.dry_run:
                run.start_audit(begun=not (connects and opens))
            interrupts.begin_work()
            try:
                function(run, **arguments)
                run._end_dry_run()
            except FindingsError:
                run._end_dry_run()
                raise
            except BrokenPipeError as error:
                # Typer would end the process without a word, and without the end in the audit log.
                where = error.filename or "a pipe or connection"
                raise BkctlError(f"Cannot write to {where}: its reader is gone") from error

        context_parameter = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        invoke.__signature__ = inspect.Signature([context_parameter, *own, *global_options])  # type: ignore[attr-defined]
        text = inspect.cleandoc(function.__doc__ or "")
        if asks and "--yes-really" not in text:
            text += (" " if "\n\n" in text else "\n\n") + ASKS
        invoke.__doc__ = text
        invoke.__name__ = function.__name__
        invoke.__annotations__ = {}
        invoke.declaration = declaration  # type: ignore[attr-defined]
        app.command(name, cls=Command, hidden=hidden, epilog="\n".join(examples))(invoke)
        return function

    return register
