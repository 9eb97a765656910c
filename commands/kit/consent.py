"""Questions before a run destroys something, its audit log, its undo files."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bkctl.errors import BkctlError, Conflict, UsageError

from .access import Access
from .audit import Audit, audit_file, shown_uri, state_directory, without_secrets
from .next_steps import undoing
from .printer import Printer
from .settings import Session
from .texts import plain, plain_lines

if TYPE_CHECKING:
    from bkctl.metadata.admin.undo import UndoFile
    from bkctl.metadata.cluster import Cluster

#: The value of `--undo` for no file at all.
NO_FILE: Final = "none"


class Declined(BkctlError):
    """The user declined."""


class Consent:
    """Asks before a run destroys something, and records what it changes."""

    def __init__(self, session: Session, out: Printer, access: Access, *, yes: bool) -> None:
        self._session, self._out, self._access = session, out, access
        self.yes = yes

    def start_audit(self, *, begun: bool) -> None:
        """Start the audit of a run that changes something: at once (`begun`), or once a cluster is open.

        A later call, with `begun`, continues the same audit. Raises Unsupported for a bundle in the cluster's place.
        """
        if not begun:
            self._access.refuse_bundle("Nothing can be changed")
        self._out.changes = True
        self._out.outlive_stdout()
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
        self._session.note(acceptedLoss=loss)

    def confirm_name(self, loss: str, name: str, given: str | None) -> None:
        """Print a loss that cannot be undone, and let the user type `name` on a terminal; `--yes` is not enough.

        `given` is the value of --yes-really, which skips the question. Raises as `confirm`, and Conflict for another
        name.
        """
        if given is None:
            self._ask(loss, f"--yes-really {name}", name)
        elif given != name:
            raise Conflict(f"--yes-really {given}: {loss}", hint=f"add --yes-really {name} if that is meant")
        self._session.note(acceptedLoss=loss)

    def _ask(self, loss: str, option: str, typed: str | None) -> None:
        if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
            raise UsageError(
                f"{loss}: not asked, since stdin or stderr is not a terminal", hint=f"add {option} to go ahead"
            )
        question = "Go ahead? [y/N]" if typed is None else f"Type {typed} to go ahead:"
        if (connection := self._access.opened) is not None:
            print(f"On {shown_uri(connection.uri)} ({connection.source}):", file=sys.stderr)
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
                self._session.note(undoFile=str(path))
                command = undoing(path, cluster.uri if elsewhere else None)
                self._out.note(f"Undo it with: {command}")

    @property
    def undo_directory(self) -> Path:
        """The directory of undo files that no --undo names."""
        return state_directory(os.environ) / "undo"

    def _new_undo_file(self) -> Path:
        name = "-".join(self._session.command.split()[1:3])
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return self.undo_directory / f"{moment}-{name}-{os.urandom(3).hex()}.ndjson"
