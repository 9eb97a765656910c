"""Commands: `@command` declares one, and gives it its run.

    @command(app, "list", connects=True, prints=rows_of(LEDGER_COLUMNS))
    def list_ledgers(run: Run, scope_id: ScopeToList) -> None:
        run.out.render(run.cluster.ledgers.ledgers(scope_id), LEDGER_COLUMNS)

A command is three steps: the signature parses, one call into the domain, `run.out` renders.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, TypeVar

import typer

from bkctl.errors import BkctlError, FindingsError, NotFound

from . import interrupts
from .access import Access, Levels
from .columns import ALL, Declaration, Document, Output, object_of, rows_of, union
from .consent import Consent
from .job import LongWork
from .next_steps import name_connection
from .options import DRY_RUN, UNDO, composite_of
from .parser import Command, Group
from .printer import Printer
from .settings import GlobalOptions, Session, global_parameters, read_environment, read_options

if TYPE_CHECKING:
    from bkctl.checks.digests import DigestChecker
    from bkctl.formats.entry import DigestType
    from bkctl.http.bundle import RecordedCluster
    from bkctl.metadata.admin.undo import UndoFile
    from bkctl.metadata.cluster import Cluster, RegisteredBookie

#: Names that modules of commands import from here.
__all__ = [
    "Access", "Consent", "Declaration", "LongWork", "Printer", "Run", "command", "declaration_of", "group", "object_of",
    "rows_of", "union",
]  # fmt: skip

F = TypeVar("F", bound=Callable[Concatenate["Run", ...], None])
#: The end of the help of commands that ask, unless --yes is not enough for them.
ASKS: Final = "Asks before it destroys something; without a terminal --yes is required."


class Run:
    """One run of a command, in parts: its output, its access to clusters and files, its consent, its long work."""

    def __init__(self, session: Session, after: GlobalOptions) -> None:
        environment = read_environment(os.environ)
        levels: Levels = [("after the command", after), ("before the group", session.globals), (None, environment)]
        #: The options before the group and after the command, merged; nothing of the environment.
        self.given = after.over(session.globals)
        options = self.given.over(environment)
        name_connection(self.given)
        self.out = Printer(session, options, self.given)
        self.job = LongWork(session, self.out)
        self.access = Access(session, levels, options, self.out, self.job)
        self.consent = Consent(session, self.out, self.access, yes=options.yes)
        #: The file that --undo names.
        self.undo: Path | None = None
        #: Problems that do not stop the command: at its end the first is raised, and the others are printed.
        self.errors: list[BkctlError] = []
        #: Closed when the command ends.
        self.opened = ExitStack()

    @property
    def dry_run(self) -> bool:
        """True with --dry-run."""
        return bool(self.out.dry_run)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster that the options name, opened when it is first used."""
        return self.opened.enter_context(self.access.cluster())

    def bookie(self, bookie_id: str) -> RegisteredBookie:
        """Return a bookie as the cluster knows it. Raises NotFound."""
        bookie = self.cluster.bookies.get(bookie_id)
        if bookie is None:
            where = self.cluster.store.name
            raise NotFound(f"No bookie {bookie_id} in {where}", hint="'bkctl bookies list' shows them")
        return bookie

    @property
    def bundled(self) -> RecordedCluster | None:
        """The bundle in the cluster's place; None for a cluster."""
        _ = self.cluster  # opening it reads the bundle
        return self.access.recorded

    def record(self, cluster: Cluster, *, elsewhere: bool = False) -> UndoFile:
        """Return the undo file of the changes of `cluster`, complete when the command ends; see `Consent.undo`."""
        return self.opened.enter_context(self.consent.undo(cluster, self.undo, elsewhere=elsewhere))

    @cached_property
    def undo_file(self) -> UndoFile:
        """The undo file of the changes of the cluster."""
        return self.record(self.cluster)

    @cached_property
    def recorded(self) -> Cluster:
        """The cluster, for work whose changes of nodes all go to the undo file."""
        return self.undo_file.recorded()

    def digest_checker(self, digest_type: DigestType | None, password: bytes, files: Iterable[Path]) -> DigestChecker:
        """Return a checker of the entries in `files` against their digests.

        What is not given comes from a metadata store, if the command names one.
        """
        from bkctl.checks.digests import DigestChecker

        if digest_type is not None or not self.access.names_metadata:
            return DigestChecker(digest_type, password=password or None)
        from bkctl.metadata.liveness import StoredDigests

        stored = StoredDigests(self.cluster, files)
        find_password = None if password else stored.password_of
        return DigestChecker(digest_of=stored.digest_of, password=password or None, password_of=find_password)

    def hold(self, directories: Iterable[Path]) -> None:
        """Hold a bookie's directories for this process until the command ends. Raises Conflict while a bookie runs."""
        from bkctl.repair.holding import hold

        self.opened.enter_context(hold(directories, note=self.out.note))


def group(
    help: str | None = None, *, parts: Iterable[typer.Typer] = (), default: str | None = None, takes_words: bool = False
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
    undo: bool = False,
    dry_run: bool = False,
    hidden: bool = False,
    prints: tuple[Document, ...] = (),
) -> Callable[[F], F]:
    """Register a function as the command `name` of `app`.

    The first parameter of the function is its run; the command fills in parameters of composite types (see
    kit/options.py), and Typer parses the others. `connects`: the command uses a cluster, so its help shows the
    connection options; not `opens`: it only saves them. `asks`: its help shows `--yes` and ends with ASKS. `changes`:
    the audit log records the command unless it is a dry run; a string, or several, name the parameters that make the
    command change something, and `unless` one that makes it read only; None: the command starts the audit itself.
    `undo`: it changes a cluster, and has `--undo`; `dry_run`: it changes something, and has `--dry-run`. `prints` are
    the forms of what it prints, for --columns, --sort and the schema. The examples of its help are whole command lines,
    each behind `$ ` at the end of the docstring.
    """
    connects = connects or undo
    if changes is False:
        changes = undo or dry_run

    def register(function: F) -> F:
        _, *params = inspect.signature(function, eval_str=True).parameters.values()
        parts = {param.name: composite_of(param) for param in params}
        own = [param for part in parts.values() for param in part.parameters] + [UNDO] * undo + [DRY_RUN] * dry_run
        declaration = Declaration(prints, changes is not False, dry_run)
        global_options = global_parameters(connects=connects, asks=asks, besides=own)

        def invoke(**values: Any) -> None:
            context: typer.Context = values.pop("typer_context")
            session: Session = context.find_root().obj
            session.command = context.command_path
            global_values = {param.name: values.pop(param.name) for param in global_options}
            run = Run(session, read_options(global_values))
            if run.out.selection != ALL or run.out.output is Output.ID:
                # Before anything is read or changed.
                run.out.selection.check(declaration.forms(run.out.output), run.out.output)
            run.out.dry_run = values.pop("dry_run") if dry_run else None
            run.undo = values.pop("undo") if undo else None
            arguments = {name: part.resolve(values) for name, part in parts.items()}
            causes = (changes,) if isinstance(changes, str) else changes
            is_change = any(arguments[name] for name in causes) if isinstance(causes, tuple) else bool(causes)
            if unless is not None:
                is_change = is_change and not arguments[unless]
            if is_change and not run.out.dry_run:
                run.consent.start_audit(begun=not (connects and opens))
            interrupts.begin_work()
            try:
                with run.opened:
                    function(run, **arguments)
                    run.out.raise_first(run.errors)
                run.out.end_dry_run()
            except FindingsError:
                run.out.end_dry_run()
                raise
            except BrokenPipeError as error:
                # Typer would end the process without a word, and without the end in the audit log.
                where = error.filename or "a pipe or connection"
                raise BkctlError(f"Cannot write to {where}: its reader is gone") from error

        context_parameter = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        invoke.__signature__ = inspect.Signature([context_parameter, *own, *global_options])  # type: ignore[attr-defined]
        text, *examples = inspect.cleandoc(function.__doc__ or "").replace("\n\n$ ", "\n$ ").split("\n$ ")
        if asks and "--yes-really" not in text:
            text += (" " if "\n\n" in text else "\n\n") + ASKS
        invoke.__doc__ = text
        invoke.__name__ = function.__name__
        invoke.__annotations__ = {}
        invoke.declaration = declaration  # type: ignore[attr-defined]
        app.command(name, cls=Command, hidden=hidden, epilog="\n".join(examples))(invoke)
        return function

    return register
