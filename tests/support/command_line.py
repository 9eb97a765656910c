"""The command line under test: in this process where only its answer matters, else as a process of its own."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, NamedTuple
from unittest import mock

from support.waiting import LIMIT_S

from bkctl.commands.main import run

#: Variables that would change what a command does.
_OURS = (
    "METADATA_URI", "CONF", "CONTEXT", "CONFIG", "OUTPUT", "CONNECT_TIMEOUT", "BOOKIE_ADDRESS", "LEDGER_PASSWORD",
)  # fmt: skip


def script_of(command: str) -> str:
    """A script of bash with our `bkctl`, for which no disk is too full: the machine's may nearly be."""
    command = re.sub(r"bkctl cluster (health|status)", r"\g<0> --threshold 100", command)
    return f'bkctl() {{ "{sys.executable}" -m bkctl "$@"; }}\n{command}'


class Answer(NamedTuple):
    """The output of one command line, and its exit code."""

    code: int
    out: bytes
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The objects of an ndjson output; the command must have gone well."""
        assert self.code == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def ids(self) -> list[str]:
        """The lines of an id output; the command must have gone well."""
        assert self.code == 0, self.err
        return self.out.decode().splitlines()

    @property
    def problem(self) -> str:
        """The one line that stderr says; anything else fails."""
        assert self.code != 0, self.out
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        if lines[0].startswith("{"):
            error = json.loads(lines[0])["error"]
            return "; ".join(filter(None, (error["message"], error["hint"])))
        assert lines[0].startswith("bkctl: "), lines[0]
        return lines[0].removeprefix("bkctl: ")


def environment(**settings: str) -> dict[str, str]:
    """This process's environment without bkctl's variables and COLUMNS, and with `settings` as BKCTL_…"""
    hidden = {"COLUMNS", *(f"BKCTL_{one}" for one in _OURS)}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"NO_COLOR": ""} | {f"BKCTL_{name}": value for name, value in settings.items()}


@contextlib.contextmanager
def _streams() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    out, err = io.BytesIO(), io.BytesIO()
    with (
        mock.patch.object(sys, "stdin", io.StringIO()),
        mock.patch.object(sys, "stdout", io.TextIOWrapper(out, "utf-8", write_through=True)),
        mock.patch.object(sys, "stderr", io.TextIOWrapper(err, "utf-8", write_through=True)),
    ):
        yield out, err


def _patience(arguments: Iterable[object]) -> dict[str, str]:
    """Let a command that names no time-out wait for connections, too, as long as a busy machine takes."""
    return {} if "--timeout" in arguments else {"CONNECT_TIMEOUT": f"{LIMIT_S}s"}


class CommandLine:
    """`bkctl` with a metadata URI (none where `uri` is None) and an otherwise empty environment."""

    def __init__(self, uri: str | None) -> None:
        self.settings = {} if uri is None else {"METADATA_URI": uri}

    def __call__(self, *arguments: object, **settings: str) -> Answer:
        """Run a command in this process."""
        with (
            mock.patch.dict(os.environ, environment(**_patience(arguments) | self.settings | settings), clear=True),
            _streams() as (out, err),
        ):
            code = run([str(argument) for argument in arguments])
            return Answer(code, out.getvalue(), err.getvalue().decode())

    def process(self, *arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
        """Start a command as a process with pipes."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            [sys.executable, "-m", "bkctl", *map(str, arguments)],
            env=environment(**_patience(arguments), **self.settings),
            **pipes | settings,
        )

    def run(self, *arguments: object, input: bytes = b"") -> Answer:
        """Run a command as a process, with `input` on stdin."""
        with self.process(*arguments) as process:
            out, err = process.communicate(input, LIMIT_S)
        return Answer(process.returncode, out, err.decode())

    def shell(self, script: str) -> Answer:
        """Run a shell script, in which `$bkctl` is the command."""
        values: Mapping[str, str] = environment(**self.settings) | {"bkctl": f"{sys.executable} -m bkctl"}
        done = subprocess.run(["bash", "-c", script], env=values, capture_output=True, timeout=LIMIT_S, check=False)
        return Answer(done.returncode, done.stdout, done.stderr.decode())

    def terminal(
        self,
        *arguments: object,
        type_in: str = "",
        columns: int = 80,
        asks: str = "[y/N]",
        drawn: list[str] | None = None,
    ) -> tuple[int, str]:
        """Run a command on a terminal that controls it (Ctrl-C is `\\x03`); `type_in` is typed once `asks` is on it.

        Returns its exit code and what stays there; `drawn` gets every line that was drawn, without colours.
        """
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        values = environment(**_patience(arguments), **self.settings) | {"TERM": "xterm"}
        command = [sys.executable, "-m", "bkctl", *map(str, arguments)]
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=values, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        ) as process:  # fmt: skip
            os.close(theirs)
            seen = b""
            while wait([ours], LIMIT_S):
                try:
                    part = os.read(ours, 65536)
                except OSError:  # the last one who wrote is gone
                    break
                seen += part
                if type_in and asks.encode() in seen:
                    os.write(ours, type_in.encode())
                    type_in = ""
            os.close(ours)
        text = seen.decode().replace("\r\n", "\n")
        if drawn is not None:
            drawn += re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\x1b[K", "\n").split("\n")
        lines = text.split("\n")
        return process.returncode, "\n".join(line.rpartition("\r\x1b[K")[2] for line in lines)
