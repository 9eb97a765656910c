"""`bkctl help`, `bkctl version` and `bkctl completion`: the program itself. Also brings `bkctl top`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from bkctl import __version__

from . import top
from .kit.columns import ALL, Column, Columns, Output
from .kit.command import Run, command, group
from .kit.parser import connection_help, exit_code_help
from .kit.terminal import emit

app = group(parts=(top.app,))


class Shell(StrEnum):
    """The shells that have a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


#: Topics of help that are not commands.
_TOPICS: Final = {"connection": connection_help, "exit-codes": exit_code_help}


@app.command("help", epilog="bkctl help ledger list\nbkctl help connection\nbkctl help exit-codes")
def show_help(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A group or a command, `connection` or `exit-codes`.")
    ] = None,
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


VERSION_COLUMNS = Columns(Column("VERSION", "version", lambda row: row), key="version")


@command(app, "version", examples=("bkctl version",))
def show_version(run: Run) -> None:
    """Print the version."""
    if run.output is Output.TABLE and run.selection == ALL:
        run.text(f"bkctl {__version__}\n")
    else:
        run.show(__version__, VERSION_COLUMNS)


@command(
    app,
    "completion",
    examples=("source <(bkctl completion bash)", "bkctl completion fish | source"),
)
def print_completion(
    run: Run, shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]
) -> None:
    """Print the completion script of a shell.

    Load it in the shell's start-up file: `source <(bkctl completion bash)` in ~/.bashrc, `source <(bkctl completion
    zsh)` in ~/.zshrc after compinit, `bkctl completion fish | source` in ~/.config/fish/config.fish.
    """
    from .generate import completion_script

    run.text(completion_script(shell.value))
