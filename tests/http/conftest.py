"""Fixtures for tests of the REST API: a bookie of ours with an HTTP server, over SQLite."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client.conftest import fake_cluster
from support.own_bookies import OwnBookie
from support.raw_http import http_port
from support.servers import INTERLEAVED, Server

from bkctl.metadata.cluster import open_cluster

__all__ = ["fake_cluster"]


class HttpBookie(OwnBookie):
    """A bookie of ours with an HTTP server on any port; `http_port` once it is up."""

    @property
    def http_port(self) -> int:
        return http_port(self)


def make_bookie(directory: Path, **settings: Any) -> HttpBookie:
    """A bookie, not started, on a new cluster in SQLite."""
    directory.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite://{directory / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    common = {"httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "httpServerPort": 0}
    return HttpBookie(uri, directory / "bookie", storage=INTERLEAVED, settings=common | settings)


@pytest.fixture(scope="module")
def bookie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpBookie]:
    """A bookie that the tests of a module share."""
    server = make_bookie(tmp_path_factory.mktemp("bookie"), httpServerKeyStorePassword="hush", unknownKey="kept")
    server.start()
    yield server
    server.kill()


class Gateway(Server):
    """`bkctl api serve` on any port, with more arguments; `http_port` once it is up."""

    def __init__(self, metadata_uri: str, directory: Path, *arguments: object) -> None:
        command = [sys.executable, "-m", "bkctl", "api", "serve", "--port", "0", "-u", metadata_uri]
        super().__init__(
            "gateway", directory / "gateway.log", lambda: [*command, *map(str, arguments)],
            lambda: "AUTHENTICATION" in self.log_tail(),
        )  # fmt: skip

    @property
    def http_port(self) -> int:
        return http_port(self)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways: `gateway(metadata_uri, *arguments)`."""
    made: list[Gateway] = []

    def start(metadata_uri: str, *arguments: object) -> Gateway:
        made.append(Gateway(metadata_uri, tmp_path / f"gateway-{len(made)}", *arguments))
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.kill()


@pytest.fixture
def http_bookie(tmp_path: Path) -> Iterator[Callable[..., HttpBookie]]:
    """Makes bookies of the test's own, not started; settings by keyword."""
    made: list[HttpBookie] = []

    def make(**settings: Any) -> HttpBookie:
        made.append(make_bookie(tmp_path / f"bookie-{len(made)}", **settings))
        return made[-1]

    yield make
    for server in made:
        server.kill()
