"""One invocation of the program, kept in Typer's context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from .audit import Audit
from .columns import Columns, Output
from .settings import GlobalOptions

#: Options of the program that may stand anywhere → the field of Session that they set.
SESSION_FLAGS: Final = {
    "-v": "verbose",
    "--verbose": "verbose",
    "-q": "quiet",
    "--quiet": "quiet",
    "--no-color": "no_color",
    "--debug": "debug",
}


@dataclass
class Session:
    """One invocation: its words, and the options before the group. Kept in Typer's context."""

    words: list[str] = field(default_factory=list)
    globals: GlobalOptions = field(default_factory=GlobalOptions)
    verbose: bool = False
    quiet: bool = False
    no_color: bool = False
    debug: bool = False
    #: What an interrupted command had done, and how to continue.
    interrupted: str | None = None
    #: Set for a command that changes something; `main` writes its end.
    audit: Audit | None = None
    #: Returns the columns that a command may print, None where it prints none.
    columns_of: Callable[[str], Columns | None] = lambda name: None
    #: The form of output, once it is known.
    output: Output | None = None
