"""`bkctl help`, `bkctl version` and `bkctl completion`: the program itself. Also brings `top` and `console`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bkctl import __version__
from bkctl.columns import Column, Columns, Constant, Kind

from . import api, top
from .kit.columns import ALL, Output
from .kit.command import Run, command, group, object_of
from .kit.options import word
from .kit.parser import Command, connection_help, exit_code_help
from .kit.terminal import emit

app = group(parts=(top.app, api.console_app))


#: The shells that have a completion script.
Shell = StrEnum("Shell", "BASH ZSH FISH")
#: Topics of help that are not commands.
_TOPICS: Final = {"connection": connection_help, "exit-codes": exit_code_help}


@app.command("help", cls=Command, epilog="bkctl help ledger list\nbkctl help connection\nbkctl help exit-codes")
def show_help(
    context: typer.Context,
    words: Annotated[list[str] | None, word("COMMAND", "A group or a command, `connection` or `exit-codes`.")] = None,
) -> None:
    """Show the help of a command, or of the connection options.

    'bkctl help connection' lists the options that every command takes before the group or after the command, 'bkctl
    help exit-codes' the codes with which commands end.
    """
    top = context.find_root()
    topic = _TOPICS.get(" ".join(words or ()))
    if topic is not None:
        emit(topic(top))
        return
    program: Any = top.command
    program.main([*(words or ()), "--help"], prog_name="bkctl", standalone_mode=False, obj=top.obj)


def _modules(*, compiled: bool) -> Callable[[Mapping[str, Any]], list[str]]:
    return lambda used: [name for name, module in used.items() if (module is not None) is compiled]


def _names(modules: list[str]) -> str:
    return ", ".join(modules) or "-"


#: Columns of the modules whose loops are in C or in Python: name → the module in C.
VERSION_COLUMNS = Columns(
    Column("VERSION", "version", Constant(__version__)),
    Column("COMPILED", "compiledModules", _modules(compiled=True), Kind.NESTED, text=_names),
    Column("NOT COMPILED", "uncompiledModules", _modules(compiled=False), Kind.NESTED, text=_names),
    key="version",
)


@command(app, "version", prints=object_of(VERSION_COLUMNS))
def show_version(run: Run) -> None:
    """Print the version, and which inner loops are compiled.

    Without a C compiler and Python's headers at its installation, bkctl does the same in Python: slower, with the same
    results.

    $ bkctl version
    """
    from bkctl.files import scan
    from bkctl.protocol import runs

    used = {"bkctl.protocol._runs": vars(runs)["compiled"], "bkctl.files._scan": vars(scan)["compiled"]}
    slow = _modules(compiled=False)(used)
    if run.out.output is Output.TABLE and run.out.selection == ALL:
        rest = f"; in Python: {', '.join(slow)}" if slow else ""
        run.out.text(f"bkctl {__version__}\ninner loops in C: {len(used) - len(slow)} of {len(used)}{rest}\n")
    else:
        run.out.show(used, VERSION_COLUMNS)


@command(app, "completion")
def print_completion(run: Run, shell: Annotated[Shell, word("SHELL", "bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell.

    Load it in the shell's start-up file: `source <(bkctl completion bash)` in ~/.bashrc, `source <(bkctl completion
    zsh)` in ~/.zshrc, `bkctl completion fish | source` in ~/.config/fish/config.fish.

    $ source <(bkctl completion bash)
    $ bkctl completion fish | source
    """
    from .kit.completion import SCRIPTS

    # Beside the commands, in the repository as in a wheel.
    run.out.text((Path(__file__).parents[1] / "completions" / SCRIPTS[shell.value]).read_text("utf-8"))
