"""One invocation of the program, kept in Typer's context."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .audit import Audit
from .columns import Output
from .settings import GlobalOptions

if TYPE_CHECKING:
    from .work import WorkFile

#: Options of the program that may stand anywhere → the field of Session that they set.
SESSION_FLAGS: Final = {
    "-v": "verbose", "--verbose": "verbose", "-q": "quiet", "--quiet": "quiet", "--no-color": "no_color",
    "--debug": "debug",
}  # fmt: skip


@dataclass
class Session:
    """One invocation: its words, and the options before the group. Kept in Typer's context."""

    words: list[str] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    globals: GlobalOptions = field(default_factory=GlobalOptions)
    verbose: bool = False
    quiet: bool = False
    no_color: bool = False
    debug: bool = False
    #: The state that an interrupted command leaves, and how to continue.
    interrupted: str | None = None
    #: Set for a command that works for long; `main` writes its end.
    work: WorkFile | None = None
    #: Set for a command that changes something; `main` writes its end.
    audit: Audit | None = None
    #: The form of output, once it is known.
    output: Output | None = None

    def note(self, **fields: str) -> None:
        """Add fields to the audit of this run, where there is one."""
        if self.audit is not None:
            self.audit.note(**fields)

    def work_of_run(self) -> WorkFile:
        """Return the work of this run, whose id begins that of the audit log where the run changes something."""
        if self.work is None:
            from .work import WorkFile, progress_directory

            run_id = os.urandom(3).hex() if self.audit is None else self.audit.id
            began = time.time() - (time.monotonic() - self.began_at)
            self.work = WorkFile(progress_directory(os.environ), run_id[:6], ["bkctl", *self.words], began)
        return self.work
