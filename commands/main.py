"""The root of the command line: groups, plugins, the options before them, and how errors become codes and messages."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from io import TextIOWrapper
from typing import Annotated, Any, Final, NamedTuple

import typer

from bkctl import __version__
from bkctl.errors import BkctlError, is_interrupt

from .kit import interrupts
from .kit.audit import run_result
from .kit.columns import Output
from .kit.options import flag, parameter
from .kit.parser import CONNECTION_LINE, HELP_FLAGS, Command, Group
from .kit.settings import SESSION_FLAGS, SETTINGS, Session, global_parameters, read_options
from .kit.terminal import ClosedOutput, continue_without_stdout, discard, flush, say
from .kit.texts import plain
from .kit.values import parse_switch

#: Group → its help; the module of the same name (with `app`) is imported when the group is used.
GROUPS: Final[dict[str, str]] = {
    "ledger": "Write, list, read, recover and verify ledgers.",
    "bookie": "Run a bookie, ask a running one, and read its files.",
    "bookies": "List, recover, drain and decommission bookies.",
    "journal": "Read and check journal files and last marks.",
    "entrylog": "Read and check entry logs, and extract ledgers.",
    "metadata": "Read, check, export and migrate the metadata store.",
    "cookie": "Show, create, change and verify the bookies' cookies.",
    "autorecovery": "Run and control the replication of lost ledgers.",
    "cluster": "Show, create and check whole clusters.",
    "local": "Run clusters of our own bookies on this machine.",
    "pulsar": "Check Pulsar's topics against the cluster's ledgers.",
    "pipeline": "Run jobs over all files, metadata and ledgers.",
    "api": "Call the REST API of bookies, or serve it.",
    "bench": "Measure adds and reads of a cluster.",
    "progress": "Show long work, pause it and change its rate.",
    "audit": "Show which commands changed what, when, and by whom.",
    "why": "Explain ledgers, bookies, creations and full disks.",
    "diagnose": "Collect what support asks for.",
    "context": "Manage named connections in the configuration file.",
}

#: Commands without a group → their help; the module `program` has all of them.
PROGRAM: Final[dict[str, str]] = {
    "top": "Show the load of the whole cluster, live.",
    "console": "Show the cluster in a browser.",
    "help": "Show the help of a command, or of the connection options.",
    "version": "Print the version.",
    "completion": "Print the completion script of a shell.",
}

#: Operating system errors with an exit code of their own.
OS_ERROR_EXIT_CODES: Final[dict[int, int]] = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), 4),
    errno.EISDIR: 2,
    errno.EEXIST: 5,
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT), 6),
    **dict.fromkeys((errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH), 6),
}

# typer.BadParameter → … → ClickException: the base of every usage error of the parser.
_ParserError: Final[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


#: A program of this prefix on the PATH is a command.
PLUGIN_PREFIX: Final = "bkctl-"
_PLUGIN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*")


def find_plugins(environment: Mapping[str, str], wanted: str | None = None) -> dict[str, str]:
    """Return name → path of the plugins on the PATH, sorted by name; only `wanted` if that is given.

    Of two programs with one name, the first on the PATH counts. Relative directories of the PATH are skipped.
    """
    found: dict[str, str] = {}
    for directory in dict.fromkeys(filter(os.path.isabs, environment.get("PATH", "").split(os.pathsep))):
        with suppress(OSError):
            files = os.listdir(directory) if wanted is None else [PLUGIN_PREFIX + wanted]
            for file in [file for file in files if file.startswith(PLUGIN_PREFIX)]:
                name = file.removeprefix(PLUGIN_PREFIX)
                path = os.path.join(directory, file)
                if _PLUGIN_NAME.fullmatch(name) and os.path.isfile(path) and os.access(path, os.X_OK):
                    found.setdefault(name, path)
    return dict(sorted(found.items()))


class Plugin(Command):
    """A command that is a program of its own: it gets the words behind its name, as they are.

    Options before the name reach it as BKCTL_ variables, so that bkctl within it uses the same cluster.
    """

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name=name, callback=None, add_help_option=False, rich_markup_mode=None)
        self._path = path

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Keep all words."""
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: Any) -> Any:
        """Replace this process with the program. Raises OSError."""
        session: Session = ctx.find_root().obj
        given = {f"BKCTL_{field.upper()}": "1" for field in SESSION_FLAGS.values() if getattr(session, field)}
        for setting in SETTINGS:
            value = getattr(session.globals, setting.field)
            if setting.variable is not None and value:
                given[setting.variable] = setting.type.write(value)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self._path, [self._path, *ctx.args], os.environ | given)


class RootGroup(Group):
    """The groups by name; a group's module is imported once a command of it is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, text in GROUPS.items():
            self.commands[name] = Group(name=name, help=text, rich_markup_mode=None)
        for name, text in PROGRAM.items():
            self.commands[name] = Command(name=name, help=text, callback=None, rich_markup_mode=None)
        self._loaded: set[str] = set()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the group or command of this name, loaded, else the plugin of this name; None without either."""
        name = cmd_name
        if name in self.commands and name not in self._loaded:
            module = "program" if name in PROGRAM else name.replace("-", "_")
            app: typer.Typer = import_module(f".{module}", __package__).app
            app.info.name, app.info.help = name, GROUPS.get(name)
            loaded = typer.main.get_group(app)
            self.commands.update(loaded.commands if name in PROGRAM else {name: loaded})
            self._loaded |= PROGRAM.keys() if name in PROGRAM else {name}
        elif name not in self.commands and (path := find_plugins(os.environ, name).get(name)):
            return Plugin(name, path)
        return self.commands.get(name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups and commands, then the plugins."""
        super().format_commands(ctx, formatter)
        found = {name: path for name, path in find_plugins(os.environ).items() if name not in self.commands}
        if found:
            width = max(map(len, found))
            with formatter.section("Plugins"):
                for name, path in found.items():  # Paths are not broken into lines.
                    formatter.write(f"  {name.ljust(width)}  {path}\n")


def _version(value: bool) -> None:
    if value:
        print(f"bkctl {__version__}")
        raise typer.Exit


def _root(context: typer.Context, **values: Any) -> None:
    session: Session = context.obj
    session.globals = read_options(values)
    for name in dict.fromkeys(SESSION_FLAGS.values()):
        variable = f"BKCTL_{name.upper()}"
        text = os.environ.get(variable)
        setattr(session, name, getattr(session, name) or values[name] or bool(text and parse_switch(text, variable)))


def _flag(text: str, help: str, **settings: Any) -> Parameter:
    name = text.split()[0].removeprefix("--").replace("-", "_")
    return parameter(name, Annotated[bool, flag(text, help, **settings)], False)


_root.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
        _flag("--verbose -v", "Print more on stderr: connections and steps. [BKCTL_VERBOSE=1]"),
        _flag("--quiet -q", "Print only errors on stderr. [BKCTL_QUIET=1]"),
        _flag("--no-color", "No colours. [BKCTL_NO_COLOR=1, NO_COLOR]"),
        _flag("--debug", "Show the traceback of an error. [BKCTL_DEBUG=1]"),
        _flag("--version", "Print the version.", is_eager=True, callback=_version),
        *global_parameters(connects=True, asks=True, program=True),
    ]
)
_root.__annotations__ = {}

app = typer.Typer(name="bkctl", cls=RootGroup, add_completion=False, rich_markup_mode=None)
app.callback(
    help="Administer Apache BookKeeper with 128-bit ledger ids.",
    epilog=f"{CONNECTION_LINE} Exit codes: 'bkctl help exit-codes'.",
)(_root)


@cache
def root() -> RootGroup:
    """Return the root command, made once: it keeps nothing of the lines that it runs."""
    group = typer.main.get_group(app)
    assert isinstance(group, RootGroup)
    group.name = "bkctl"
    group.context_settings = {"max_content_width": 100, "help_option_names": list(HELP_FLAGS)}
    return group


class ErrorReport(NamedTuple):
    """An error for people and programs: its kind, exit code, message, and what to do."""

    code: str
    exit_code: int
    message: str
    hint: str | None = None

    @property
    def line(self) -> str:
        """The line for stderr, without the program's name."""
        return one_line(f"{self.message}; {self.hint}" if self.hint else self.message)

    def json(self) -> str:
        """Return the object that `docs/schemas/error.json` describes, in one line."""
        import json

        hint = None if self.hint is None else one_line(self.hint)
        fields = {"code": self.code, "exitCode": self.exit_code, "message": one_line(self.message), "hint": hint}
        return json.dumps({"error": fields})


def error_report(error: BaseException) -> ErrorReport:
    """Return the report of `error`."""
    if isinstance(error, BkctlError):
        name = type(error).__name__.removesuffix("Error")
        return ErrorReport(name[:1].lower() + name[1:], error.exit_code, error.message, error.hint)
    if isinstance(error, _ParserError):
        return ErrorReport("usage", error.exit_code, *_parser_error(error))
    if isinstance(error, MemoryError):
        return ErrorReport("ENOMEM", 1, "Not enough memory", "raise the limit of this process ('ulimit -v')")
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        where = ": ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        name = errno.errorcode.get(error.errno or 0, "os")
        code = 6 if isinstance(error, TimeoutError) else OS_ERROR_EXIT_CODES.get(error.errno or 0, 1)
        return ErrorReport(name, code, f"{where}: {text}" if where else text)
    message = f"Internal error: {type(error).__name__}: {error}"
    return ErrorReport("internal", 1, message, "run it again with --debug and report what it prints")


def _parser_error(error: Any) -> tuple[str, str]:
    """Return message and hint of an error of the parser."""
    context = getattr(error, "ctx", None)
    message = "Missing command" if type(error).__name__ == "NoArgsIsHelpError" else error.format_message()
    path = context.command_path if context is not None else "bkctl"
    unknown = re.match(r"No such command '([^']+)'", message)
    if unknown and (other := _other_command(path.split()[1:], unknown[1], context)):
        return f"No such command '{unknown[1]}'", other
    choice = re.match(r"(.*: '([^']+)' is not one of )(.+)", message)
    if choice:
        known = choice[3].split(", ")
        if near := get_close_matches(choice[2], known, 1):
            return choice[1] + (choice[3] if len(known) < 10 else f"{len(known)} values"), f"did you mean '{near[0]}'?"
    message, _, guess = message.partition(". Did you mean ")
    is_negative = type(error).__name__ == "NoSuchOption" and error.option_name[1:2].isdigit()
    other = "put a negative id after -- or in --ledger-id" if is_negative else f"try '{path} --help'"
    return message.strip().rstrip("."), f"did you mean {guess}" if guess else other


def _other_command(path: list[str], name: str, context: Any) -> str | None:
    """Return our command for `name` in the group `path`: a guess, of a name of Apache's tools, or of another group."""
    from .translations import find_elsewhere, guess, translate

    known = list(_command_names(root(), ()))
    words = context.find_root().obj.words
    behind = words[words.index(name) + 1 :] if name in words else []
    ours = guess([*path, name, *behind], known) or translate([*path, name])
    if ours is not None:
        return f"it is 'bkctl {ours}' here"
    found = find_elsewhere(path, name, known)
    names = " or ".join(f"'bkctl {each}'" for each in found)
    return f"did you mean {names}?" if found else None


def _command_names(group: Any, path: tuple[str, ...]) -> Iterator[str]:
    for name in [*group.commands]:
        each = group.get_command(None, name)
        if isinstance(each, Group):
            yield from _command_names(each, (*path, name))
        elif not each.hidden:
            yield " ".join((*path, name))


def one_line(text: str) -> str:
    """Return `text` without line breaks and control characters."""
    return plain(" ".join(text.split()))


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Prints the error, if there is one, as one line on stderr."""
    session = Session(words=arguments)
    error: BaseException | None = None
    code: object = 0
    try:
        try:
            # The exit code is that of the whole command, not that of the rows which `head` took.
            continue_without_stdout(lambda: None)
            code = root().main(arguments, prog_name="bkctl", standalone_mode=False, obj=session)
        finally:
            continue_without_stdout(None)
        flush()
    except (ClosedOutput, SystemExit):  # Typer ends the process where the reader of a help is gone.
        discard(sys.stdout)  # The interpreter's own flush at exit must not complain.
    except (typer.Abort, EOFError, KeyboardInterrupt):
        code = interrupts.EXIT_CODE
    except Exception as problem:
        if is_interrupt(problem):
            code = interrupts.EXIT_CODE
        elif isinstance(problem, (BkctlError, OSError, _ParserError)):
            error, code = problem, error_report(problem).exit_code
        else:
            _end_run(session, 1, problem)
            raise
    code = code if isinstance(code, int) else 0
    is_interrupted = code == interrupts.EXIT_CODE
    if is_interrupted:
        code = interrupts.exit_code()
        interrupts.note_interrupt()
    # Before anything else is printed, since a reader may hold that up, and a signal then ends the process.
    _end_run(session, code, error)
    if is_interrupted:
        say("bkctl: Interrupted" + (f": {one_line(session.interrupted)}" if session.interrupted else ""))
    elif error is not None:
        _report(error, session)
    return code


def _end_run(session: Session, code: int, error: BaseException | None) -> None:
    """Write the end of the run to the state that `bkctl progress` shows, and to the audit log."""
    audit = session.audit
    with interrupts.ignored():
        if session.work is not None:
            session.work.end(run_result(code))
        if audit is not None:
            audit.end(code, None if error is None else error_report(error).line)
    if audit is not None and audit.problem is not None and not session.quiet:
        reason = audit.problem.strerror or str(audit.problem)
        say(
            f"bkctl: Warning: the audit log {audit.path} cannot be written: {reason}; "
            "BKCTL_AUDIT_LOG names another file, or none"
        )


def _report(error: BaseException, session: Session) -> None:
    report = error_report(error)
    try:
        sys.stdout.flush()
    except OSError:  # Of stdout itself.
        discard(sys.stdout)
    if session.debug or "--debug" in session.words:
        traceback.print_exception(error)
    as_json = (session.output or _given_output(session.words)) is Output.JSON
    say(report.json() if as_json else f"bkctl: {report.line}")


def _given_output(words: list[str]) -> Output | None:
    """Return the form of output that a line names which the parser refused, else that of the environment."""
    text = os.environ.get("BKCTL_OUTPUT", "")
    for at, word in enumerate(words):
        if word in ("-o", "--output"):
            text = next(iter(words[at + 1 :]), text)
        elif word.startswith(("-o", "--output=")):
            text = word.partition("=")[2] if word.startswith("--") else word[2:]
    return Output(text) if text in set(Output) else None


def _unexpected(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    print(f"bkctl: {error_report(error).line}", file=sys.stderr)


def _open_closed_streams() -> None:
    """Open /dev/null for closed stdin, stdout or stderr (`>&-`), so that no socket takes its descriptor.

    sys.stdin stays None then, so that a command that reads stdin notices.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            if descriptor:
                setattr(sys, name, os.fdopen(descriptor, "w"))


def main() -> None:
    """Run the command line of this process and exit; `bkctl.__main__` is the entry point."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # File names may hold bytes that no encoding has; a listing must not fail on them.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "--debug" not in sys.argv and not os.environ.get("BKCTL_DEBUG"):
        sys.excepthook = _unexpected
    sys.exit(run(sys.argv[1:]))
