"""Commands and groups for Typer: plain values without pydantic, help without rich."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from bkctl.errors import EXIT_CODES

from .options import ANY_DIGEST, DIGEST_NAMES, WATCH_S_DEFAULT, Compactions, OldName
from .settings import GLOBAL_PANEL, SESSION_FLAGS, Session
from .terminal import wants_color
from .texts import BOLD, CYAN, RESET
from .values import is_duration

HELP_FLAGS: Final = ("-h", "--help")
CONNECTION_LINE: Final = "Options for cluster, TLS, login and timeout: 'bkctl help connection'."
_PLAIN: Final = (str, int, float, bool, Path)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII).fullmatch


def _coerce(kind: type, many: bool, value: Any, param: Any, ctx: Any) -> Any:
    """Return an option's text as str, int, float, Path or an Enum. Raises typer.BadParameter.

    Stands in for Typer's own conversion, which imports pydantic: 60 ms that no start-up should pay.
    """
    if value is None:
        return () if many else None
    if many:
        return [_coerce(kind, False, item, param, ctx) for item in value]
    if isinstance(value, kind):
        return value
    try:
        if kind is int and not _INTEGER(value):
            raise ValueError(value)
        return kind(value)
    except ValueError:
        expected = f"a valid {kind.__name__}"
        if issubclass(kind, Enum):
            expected = "one of " + ", ".join(str(member.value) for member in kind)
        raise typer.BadParameter(f"{value!r} is not {expected}", ctx=ctx, param=param) from None


def shown_names(param: Any) -> list[str]:
    """Return the names of a parameter without its former ones."""
    return [name for name in param.opts if not isinstance(name, OldName)]


def help_record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """Return names and help of a parameter, without its former names; None if it is hidden."""
    names = param.opts
    param.opts = shown_names(param)
    try:
        record: tuple[str, str] | None = param.get_help_record(ctx)
    finally:
        param.opts = names
    return record


class Option(NamedTuple):
    """An option as the user sees it, or an argument, which has no names."""

    names: tuple[str, ...]
    metavar: str
    help: str
    choices: tuple[str, ...]
    is_flag: bool
    panel: str | None
    repeatable: bool


def context_of(command: Any, name: str, parent: Any) -> Any:
    """Return the context in which a command runs that was typed as `name` behind `parent`."""
    return command.context_class(command, info_name=name, parent=parent, **command.context_settings)


def read_parameters(command: Any, context: Any) -> list[tuple[Any, Option]]:
    """Return the parameters that the help of a command shows."""
    found: list[tuple[Any, Option]] = []
    for param in command.get_params(context):
        record = help_record(param, context)
        if record is None:
            continue
        is_flag = bool(getattr(param, "is_flag", False))
        choices = tuple(str(choice.value) for choice in param.type_descriptor.choices or ())
        metavar = param.metavar or ("|".join(choices) if choices else param.bare_type().upper())
        if not choices and "|" in metavar and "[" not in metavar:
            choices = tuple(word for word in metavar.split("|") if word.islower())
        option = Option(
            () if param.param_type_name == "argument" else (*sorted(shown_names(param), key=len),),
            "" if is_flag else metavar,
            re.sub(r"\s+", " ", record[1]).strip(),
            choices,
            is_flag,
            getattr(param, "rich_help_panel", None),
            bool(getattr(param, "multiple", False)) or param.nargs == -1,
        )
        found.append((param, option))
    return found


def take_session_flags(ctx: Any, params: Iterable[Any], args: list[str]) -> list[str]:
    """Return `args` without -v, -q, --no-color and --debug, which count for the session wherever they stand."""
    session: Session = ctx.find_root().obj
    end = args.index("--") if "--" in args else len(args)
    if SESSION_FLAGS.keys().isdisjoint(args[:end]):
        return args
    takers = {name for param in params if not getattr(param, "is_flag", False) for name in param.opts}
    left: list[str] = []
    for at, arg in enumerate(args):
        if at < end and arg in SESSION_FLAGS and (at == 0 or args[at - 1] not in takers):
            setattr(session, SESSION_FLAGS[arg], True)
        else:
            left.append(arg)
    return left


def _topic(ctx: Any, text: str, title: str, rows: list[tuple[str, str]]) -> str:
    formatter = ctx.make_formatter()
    formatter.write_text(text)
    with formatter.section(title):
        formatter.write_dl(rows)
    return str(formatter.getvalue())


def connection_help(ctx: Any) -> str:
    """Return the help on the connection and output options, for `ctx` of the program."""
    text = (
        "These options stand before the group or after the command; the later one counts. What they leave open, the "
        "environment decides (the variable in brackets), then the current context ('bkctl context use'), then the "
        "local cluster that is up ('bkctl local up'). Each command uses the options that concern it."
    )
    records = [help_record(param, ctx) for param in ctx.command.get_params(ctx) if _is_global(param)]
    return _topic(ctx, text, GLOBAL_PANEL, [record for record in records if record is not None])


def exit_code_help(ctx: Any) -> str:
    """Return the help on exit codes, for `ctx` of the program."""
    text = (
        "The exit code says how a command ended; the help of a command says when it differs. With -o json, the error "
        "on stderr has it too, as exitCode. A check that found something (3) has printed it all the same."
    )
    return _topic(ctx, text, "Exit codes", [(str(code), meaning) for code, meaning in EXIT_CODES.items()])


def _is_global(param: Any) -> bool:
    return getattr(param, "rich_help_panel", None) == GLOBAL_PANEL


class _PlainHelp:
    """Help without rich, whose import costs more than all else: sections by panel, colours on a terminal."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters and `--help`; each of a plain type with its own conversion, others with Typer's."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if hasattr(param, "get_runtime_param"):
                kind = param.type_descriptor.annotation
                many = get_origin(kind) is list
                kind = get_args(kind)[0] if many else kind
                if isinstance(kind, type) and (kind in _PLAIN or issubclass(kind, Enum)):
                    param.get_runtime_param = partial(SimpleNamespace, coerce=partial(_coerce, kind, many))
        return params

    def get_help(self, ctx: Any) -> str:
        """Return the help text, with colours where stdout takes them."""
        text: str = super().get_help(ctx)  # type: ignore[misc]
        session: Session = ctx.find_root().obj
        if not wants_color(sys.stdout, no_color=session.no_color):
            return text
        text = re.sub(r"(?m)^(\w[\w ]*:)", f"{BOLD}\\1{RESET}", text)
        # Options, and the names of commands before their help; never a word of a paragraph.
        return re.sub(r"(?m)^  (--?[a-z][\w-]*(?:, --[\w-]+)*|[a-z][\w-]*(?=  ))", f"  {CYAN}\\1{RESET}", text)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the command's own options, then a group's commands.

        Of the connection and output options, only those are written that every reader of the page needs.
        """
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        params = self.get_params(ctx)
        default = getattr(self, "default", None)
        if default is not None:
            # The options of the command that runs without a name.
            params = [*self.commands[default].params, *params]  # type: ignore[attr-defined]
        shown = {"--output", "--yes"}
        if all(param.hidden for param in params if "--metadata-uri" in param.opts):
            shown.add("--conf")  # An offline command: the file names its directories.
        declaration = getattr(self.callback, "declaration", None)  # type: ignore[attr-defined]
        if declaration is not None and any(document.is_list for document in declaration.prints):
            shown |= {"--columns", "--sort"}
        for param in params:
            record = help_record(param, ctx)
            if record is not None and (not _is_global(param) or (ctx.parent is not None and shown & set(param.opts))):
                title = "Options"
                if param.param_type_name == "argument":
                    title, record = "Arguments", (record[0].partition(" <")[0], record[1])
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class Command(_PlainHelp, TyperCommand):
    """A leaf command."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse `args`, where `--watch` and some commands' `--digest` may stand without their values."""
        has_arguments = any(param.param_type_name == "argument" for param in self.params)
        optional: Mapping[str | None, tuple[Callable[[str], bool], str]] = {
            "[SECONDS]": (lambda word: not has_arguments and is_duration(word), str(WATCH_S_DEFAULT)),
            "[TYPE]": (lambda word: word.upper() in DIGEST_NAMES, ANY_DIGEST),
            "[major|minor]": (lambda word: word.upper() in Compactions.__members__, Compactions.BOTH),
        }
        for param in self.params:
            if getattr(param, "metavar", None) in optional and param.param_type_name == "option":
                args = _with_value(args, shown_names(param), *optional[param.metavar])
        # Last: until here, a flag behind --watch would count as its value.
        return super().parse_args(ctx, take_session_flags(ctx, self.params, args))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one a line, however long."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write("Examples:\n")
            for example in self.epilog.splitlines():
                formatter.write(f"  {example}\n")
        if any(map(_is_global, self.params)):
            formatter.write_paragraph()
            formatter.write_text(CONNECTION_LINE)


def _with_value(args: list[str], flags: Collection[str], is_value: Callable[[str], bool], absent: str) -> list[str]:
    """Return the words, where a flag without a value behind it has the value `absent`."""
    end = args.index("--") if "--" in args else len(args)
    alone = [at for at in range(end) if args[at] in flags and (at + 1 >= end or not is_value(args[at + 1]))]
    return [f"{arg}={absent}" if at in alone else arg for at, arg in enumerate(args)]


class Group(_PlainHelp, TyperGroup):
    """A group of commands."""

    #: The command that runs where the words name none.
    default: str | None = None
    #: True if a word that is not a command belongs to the default command.
    takes_words = False

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse `args`, which begin with the default command where they name none; without any, ask for help."""
        if ctx.parent is not None:
            # Flags of the session up to the command.
            count = next((at for at, arg in enumerate(args) if arg not in SESSION_FLAGS), len(args))
            args = take_session_flags(ctx, (), args[:count]) + args[count:]
        word = args[0] if args else "-"
        names_none = word not in HELP_FLAGS if word.startswith("-") else self.takes_words and word not in self.commands
        if self.default is not None and names_none:
            args = [self.default, *args]
        return super().parse_args(ctx, args or ["--help"])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, each with the first line of its help, which wraps where it does not fit."""
        shown = ((name, command) for name, command in self.commands.items() if not command.hidden)
        if rows := [(name, (command.help or "").partition("\n")[0]) for name, command in shown]:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
