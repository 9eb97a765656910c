"""Fixtures for tests of our bookies among hostile clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.own_bookies import OwnBookie


@pytest.fixture
def own_bookie(tmp_path: Path) -> Iterator[Callable[..., OwnBookie]]:
    """Makes bookies of our own as child processes, not started: `own_bookie(metadata_uri, storage=…, settings=…)`."""
    made: list[OwnBookie] = []

    def make(metadata_uri: str, **options: Any) -> OwnBookie:
        made.append(OwnBookie(metadata_uri, tmp_path / f"own-{len(made)}", **options))
        return made[-1]

    yield make
    for bookie in made:
        bookie.kill()
