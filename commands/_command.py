"""How a command is declared and run: `@command` and the `Run` that it gets.

    @command(app, "list", connects=True)
    def list_ledgers(run: Run, scope_id: ScopeToList) -> None:
        with run.cluster() as cluster:
            run.render(cluster.ledgers.ledgers(scope_id), COLUMNS)

A command is three steps: the signature parses, one call into the domain, `run` renders.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from bkctl.errors import BkctlError, FindingsError, UsageError

from ._options import (
    TIMEOUT_S_DEFAULT,
    Composite,
    Connection,
    Globals,
    connect_to,
    environment_globals,
    global_parameters,
    parse_bookie_addresses,
    read_globals,
)
from ._output import BOLD, CYAN, RESET, Activity, Columns, Output, RowWriter, emit, emit_bytes, show, wants_color

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.config import BookieConfig
    from bkctl.metadata.cluster import Cluster
    from bkctl.protocol.messages import Protocol
    from bkctl.storage.directories import BookieDirectories

F = TypeVar("F", bound=Callable[..., None])
T = TypeVar("T")


@dataclass
class Session:
    """What stands before the group: the options of the whole invocation. Kept in Typer's context."""

    globals: Globals = field(default_factory=Globals)
    verbose: bool = False
    quiet: bool = False
    no_color: bool = False
    debug: bool = False


class Declined(BkctlError):
    """The user was asked, and said no."""


class Run:
    """One run of a command: its settings, its output, its way to the cluster."""

    def __init__(self, session: Session, after: Globals) -> None:
        environment = environment_globals(os.environ)
        #: Nearest first, each with the words that name it in messages.
        self._levels = [
            ("after the command", after),
            ("before the group", session.globals),
            ("in the environment", environment),
        ]
        merged = after.over(session.globals).over(environment)
        self.output = merged.output or Output.TABLE
        self.timeout_s = merged.timeout_s if merged.timeout_s is not None else TIMEOUT_S_DEFAULT
        self.yes = merged.yes
        self.conf: Path | None = merged.conf
        self.bookie_addresses = parse_bookie_addresses(merged.bookie_addresses)
        self._tls = merged.tls_ca, merged.tls_certificate, merged.tls_key
        self.verbose, self.quiet = session.verbose, session.quiet
        self._no_color = session.no_color
        self._activity: Activity | None = None

    # --- where --------------------------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """The metadata URI that counts, and what named it. Raises UsageError when nothing names a cluster."""
        return connect_to(self._levels, os.environ)

    @contextmanager
    def cluster(self) -> Iterator[Cluster]:
        """The cluster that the options name, open until the end of the block."""
        from bkctl.metadata.cluster import open_cluster

        connection = self.connection()
        self.detail(f"cluster {connection.uri} ({connection.source})")
        self._quiet_libraries()
        with self.working(f"Connecting to {connection.uri}"):
            cluster = open_cluster(connection.uri, timeout_s=self.timeout_s)
        with cluster:
            yield cluster

    def bookkeeper(self, cluster: Cluster, protocol: Protocol | None = None) -> BookKeeper:
        """A client of `cluster` with the options' timeout, TLS and bookie addresses; an async context manager."""
        from bkctl.client.ledger import BookKeeper, client_tls
        from bkctl.protocol.messages import Protocol

        ca, certificate, key = (None if path is None else str(path) for path in self._tls)
        if ca is None and (certificate or key):
            raise UsageError("--tls-cert and --tls-key go with --tls-ca", hint="add the authorities' PEM file")
        return BookKeeper(
            cluster,
            protocol=protocol or Protocol.V3,
            tls=None if ca is None else client_tls(ca, certificate, key),
            timeout_s=self.timeout_s,
            addresses=self.bookie_addresses,
        )

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run asynchronous work to its end."""
        from bkctl.protocol.connection import run

        return run(work)

    def config(self) -> BookieConfig:
        """The bookie's settings in `--conf`. Raises UsageError without one."""
        from bkctl.config import BookieConfig

        if self.conf is None:
            raise UsageError("No bookie configuration is given", hint="add --conf bk_server.conf")
        return BookieConfig.load(self.conf)

    def directories(self, given: Iterable[Path] | None, *, needed: bool = True) -> BookieDirectories:
        """The directories to look at: those given, else those of `--conf`.

        Raises UsageError when neither is there and they are `needed`.
        """
        from bkctl.storage.directories import BookieDirectories

        places = list(given or ())
        if places:
            return BookieDirectories.at(*places)
        if self.conf is not None:
            config = self.config()
            return BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)
        if needed:
            raise UsageError(
                "No directory is given", hint="name the bookie's directories, or add --conf bk_server.conf"
            )
        return BookieDirectories()

    def log(self) -> None:
        """Write what happens to stderr, line by line with times: for what runs in the foreground for long."""
        import logging

        level = logging.WARNING if self.quiet else logging.INFO
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("kazoo").setLevel(logging.INFO if self.verbose else logging.CRITICAL)

    def _quiet_libraries(self) -> None:
        """Libraries log to stderr only with --verbose: what goes wrong comes as one error."""
        import logging

        logging.basicConfig(
            level=logging.INFO if self.verbose else logging.CRITICAL, format="%(name)s: %(message)s", stream=sys.stderr
        )

    # --- output -------------------------------------------------------------------------------------------------

    def render(self, rows: Iterable[Any], columns: Columns) -> None:
        """Print `rows` as they come. What came before an error is printed, then the error is raised."""
        with self.rows(columns) as writer:
            writer.rows(rows)

    @contextmanager
    def rows(self, columns: Columns, *, live: bool = False) -> Iterator[RowWriter]:
        """A writer to give rows to one by one; `live` prints each at once."""
        with RowWriter(columns, self.output, color=self.color, live=live, before_write=self._clear_activity) as writer:
            yield writer

    def show(self, value: Any, columns: Columns) -> None:
        """Print one object."""
        self._clear_activity()
        show(value, columns, self.output, color=self.color)

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
            self._clear_activity()
            print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Say something on stderr with --verbose."""
        if self.verbose:
            print(f"bkctl: {text}", file=sys.stderr, flush=True)

    @property
    def color(self) -> bool:
        """Whether stdout gets colours."""
        return wants_color(sys.stdout, no_color=self._no_color)

    @contextmanager
    def working(
        self, label: str, *, total: int | None = None, unit: str = "", enabled: bool = True
    ) -> Iterator[Activity]:
        """Show on a terminal's stderr that work goes on, wherever nothing else is printed for a while."""
        outer = self._activity
        self._clear_activity()
        with Activity(label, total=total, unit=unit, enabled=enabled and not self.quiet) as activity:
            self._activity = activity
            try:
                yield activity
            finally:
                self._activity = outer

    def _clear_activity(self) -> None:
        if self._activity is not None:
            self._activity.clear()

    # --- asking -------------------------------------------------------------------------------------------------

    def confirm(self, loss: str) -> None:
        """Say what would be lost and ask on a terminal; `--yes` goes ahead.

        Raises Declined (exit 1) when the answer is no, UsageError without a terminal and without `--yes`.
        """
        if self.yes:
            return
        if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
            raise UsageError(f"{loss}: not asked, since this is no terminal", hint="add --yes to go ahead")
        print(f"{loss}. Go ahead? [y/N] ", file=sys.stderr, end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Declined("Declined, nothing was changed")

    def finish_with(self, findings: int, what: str) -> None:
        """End with exit code 3 when there are findings."""
        if findings:
            raise FindingsError(f"{findings:,} {what}")


# --- declaring ------------------------------------------------------------------------------------------------------

_PLAIN: Final = (str, int, float, bool, Path)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII).fullmatch


class _PlainValue:
    """Turns an option's text into str, int, float, Path or an Enum.

    Stands in for Typer's own conversion, which imports pydantic: 60 ms that no start-up should pay.
    """

    def __init__(self, kind: type, *, many: bool) -> None:
        self._kind, self._many = kind, many

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The converted value. Raises typer.BadParameter."""
        if value is None:
            return () if self._many else None
        if self._many:
            return [self._one(item, param, ctx) for item in value]
        return self._one(value, param, ctx)

    def _one(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, self._kind):
            return value
        try:
            if self._kind is int and not _INTEGER(value):
                raise ValueError(value)
            return self._kind(value)
        except ValueError:
            if issubclass(self._kind, Enum):
                expected = "one of " + ", ".join(str(member.value) for member in self._kind)
            else:
                expected = f"a valid {self._kind.__name__}"
            raise typer.BadParameter(f"{value!r} is not {expected}", ctx=ctx, param=param) from None


def use_plain_values(params: Iterable[Any]) -> None:
    """Give each parameter of a plain type its own conversion; others, and other Typer versions, keep Typer's."""
    for param in params:
        descriptor = getattr(param, "type_descriptor", None)
        if descriptor is None or not hasattr(param, "_runtime_param"):
            continue
        kind, many = descriptor.annotation, False
        if get_origin(kind) is list:
            (kind,), many = get_args(kind), True
        if param._runtime_param is None and isinstance(kind, type) and (kind in _PLAIN or issubclass(kind, Enum)):
            param._runtime_param = _PlainValue(kind, many=many)


class _Helpful:
    """Help without rich, whose import costs more than all else: sections by panel, colours on a terminal."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters and `--help`."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        use_plain_values(params)
        return params

    def get_help(self, ctx: Any) -> str:
        """The help text, with colours where stdout takes them."""
        text: str = super().get_help(ctx)  # type: ignore[misc]
        session = ctx.find_root().obj
        no_color = session.no_color if isinstance(session, Session) else "--no-color" in sys.argv
        if not wants_color(sys.stdout, no_color=no_color):
            return text
        text = re.sub(r"(?m)^(\w[\w ]*:)", f"{BOLD}\\1{RESET}", text)
        return re.sub(r"(?m)^  ((?:--?)?[a-z][\w-]*(?:, --[\w-]+)*)", f"  {CYAN}\\1{RESET}", text)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The parts of the usage line."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options panel by panel, then a group's commands."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panel = getattr(param, "rich_help_panel", None)
                default = "Options"
                if param.param_type_name == "argument":
                    default, record = "Arguments", (record[0].partition(" <")[0], record[1])
                sections.setdefault(panel or default, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class Command(_Helpful, TyperCommand):
    """A leaf command."""


class Group(_Helpful, TyperGroup):
    """A group of commands."""


def group(help: str | None = None) -> typer.Typer:
    """The app of a group's module; `help` is for sub-groups, the root knows that of the groups."""
    return typer.Typer(cls=Group, add_completion=False, rich_markup_mode=None, help=help)


def command(
    app: typer.Typer,
    name: str,
    *,
    connects: bool = False,
    asks: bool = False,
    hidden: bool = False,
) -> Callable[[F], F]:
    """Register a function as the command `name` of `app`.

    Its parameter `run: Run` and those of composite types (see _options) are filled in; the others are Typer's.
    `connects`: it uses a cluster, so its help shows the connection options. `asks`: its help shows `--yes`.
    """

    def register(function: F) -> F:
        own: list[inspect.Parameter] = []
        composites: dict[str, Composite] = {}
        for param in inspect.signature(function, eval_str=True).parameters.values():
            if param.annotation is Run:
                continue
            composite = _composite(param.annotation)
            if composite is None:
                own.append(param.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            else:
                composites[param.name] = composite
                own.extend(composite.parameters)
        global_options = global_parameters(connects=connects, asks=asks)

        def invoke(**values: Any) -> None:
            context: typer.Context = values.pop("typer_context")
            session = context.find_root().obj
            global_values = {param.name: values.pop(param.name) for param in global_options}
            run = Run(session if isinstance(session, Session) else Session(), read_globals(global_values))
            arguments: dict[str, Any] = {}
            for composite_name, composite in composites.items():
                arguments[composite_name] = composite.resolve(values)
            taken = {param.name for composite in composites.values() for param in composite.parameters}
            arguments.update({key: value for key, value in values.items() if key not in taken})
            function(run, **arguments)

        context_parameter = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        invoke.__signature__ = inspect.Signature([context_parameter, *own, *global_options])  # type: ignore[attr-defined]
        invoke.__doc__ = function.__doc__
        invoke.__name__ = function.__name__
        invoke.__annotations__ = {}
        app.command(name, cls=Command, hidden=hidden)(invoke)
        return function

    return register


def _composite(annotation: Any) -> Composite | None:
    for item in getattr(annotation, "__metadata__", ()):
        if isinstance(item, Composite):
            return item
    return None
