"""The engines that run jobs, for tests that hold on both."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from support.command_line import CommandLine

on_both_engines = pytest.mark.parametrize("engine", ["local", "spark"], indirect=True)


class Engine(NamedTuple):
    """An engine: a session for jobs, and the options with which commands run on it."""

    session: Any
    options: tuple[str, ...]

    @property
    def here(self) -> Engine:
        """The engine of this process, for what is the same on both: what a test compares with, and further variants."""
        return Engine(None, ())

    def run(self, uri: str | None, *arguments: object) -> Any:
        """Run a command of `bkctl pipeline`."""
        return CommandLine(uri)("pipeline", *arguments, *self.options, "-o", "ndjson")

    def rows(self, uri: str | None, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
        """Return the rows that a command of `bkctl pipeline` prints."""
        answer = self.run(uri, *arguments)
        assert answer.code == code, answer
        return [json.loads(line) for line in answer.out.splitlines()]
