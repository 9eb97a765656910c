"""Auto-recovery in a process of its own, and its HTTP server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.own_recovery import OwnAutoRecovery
from support.servers import free_port
from support.waiting import LIMIT_S, eventually


@pytest.fixture
def metadata_uri(tmp_path: Path) -> str:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    assert CommandLine(None)("cluster", "init", "-u", uri, "--yes").code == 0
    return uri


@pytest.fixture
def served_port(metadata_uri: str, tmp_path: Path) -> Iterator[int]:
    """The HTTP port of an auto-recovery."""
    port = free_port()
    recovery = OwnAutoRecovery(metadata_uri, tmp_path, settings={"httpServerEnabled": "true", "httpServerPort": port})
    recovery.start()
    try:
        yield port
    finally:
        recovery.stop()


def ask(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_auto_recovery_serves_its_metrics_and_nothing_of_a_bookie(served_port: int) -> None:
    assert ask(served_port, "/heartbeat") == (200, "OK\n")
    eventually(lambda: "replication_worker_NUM_BYTES_READ" in ask(served_port, "/metrics")[1])
    text = ask(served_port, "/metrics")[1]
    assert "# TYPE auditor_NUM_UNDER_REPLICATED_LEDGERS summary\n" in text
    assert "process_start_time_seconds" in text
    assert "bookie_SERVER_STATUS" not in text
    assert ask(served_port, "/api/v1/bookie/state")[0] in (401, 404)


def test_auto_recovery_works_where_another_server_has_its_port(metadata_uri: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = {"httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "httpServerPort": port}
        recovery = OwnAutoRecovery(metadata_uri, tmp_path, settings=settings)
        recovery.start()
        try:
            shell = CommandLine(None)
            eventually(lambda: shell("autorecovery", "auditor", "-u", metadata_uri).code == 0)
            (status,) = [json.loads(shell("autorecovery", "status", "-u", metadata_uri, "-o", "json").out)]
            assert status["auditorId"] == recovery.voter
            assert "auto-recovery works without /metrics" in recovery.log_tail()
        finally:
            recovery.stop()
