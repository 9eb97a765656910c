"""Auto-recovery beside a bookie: it restarts after every error, and a stop ends in bounded time."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replication.recovering import CONFIG
from support.waiting import LIMIT_S

from bkctl.metadata.cluster import open_cluster
from bkctl.replication import daemon
from bkctl.replication.daemon import AutoRecoveryThread
from bkctl.replication.worker import ReplicationWorker
from bkctl.tasks import run_to_end


@pytest.fixture
def auto_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AutoRecoveryThread]:
    monkeypatch.setattr(daemon, "_RESTART_PAUSE_S", 0.01)
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    thread = AutoRecoveryThread(CONFIG.with_changes(metadata_service_uri=uri), "bookie:1")
    yield thread
    stop(thread)


def stop(thread: AutoRecoveryThread) -> None:
    """Stop the thread; fail if that does not return."""
    stopping = threading.Thread(target=thread.stop, daemon=True)
    stopping.start()
    stopping.join(LIMIT_S)
    assert not stopping.is_alive()


def test_restarts_after_unexpected_error(
    auto_recovery: AutoRecoveryThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_failed, works_again = threading.Event(), threading.Event()

    async def work_once(_: ReplicationWorker) -> float:
        if has_failed.is_set():
            works_again.set()
            return 1.0
        has_failed.set()
        raise KeyError("odd")

    monkeypatch.setattr(ReplicationWorker, "work_once", work_once)
    auto_recovery.start()
    assert works_again.wait(LIMIT_S)
    assert "Auto-recovery is interrupted, and restarts in 0.01 s: 'odd'" in caplog.text
    assert "Traceback" in caplog.text


def test_restarts_when_no_loop_could_be_made(
    auto_recovery: AutoRecoveryThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, has_failed, new_event_loop = threading.Event(), threading.Event(), asyncio.new_event_loop

    async def work_once(_: ReplicationWorker) -> float:
        works.set()
        return 1.0

    def refuse_once() -> Any:
        if has_failed.is_set():
            return new_event_loop()
        has_failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ReplicationWorker, "work_once", work_once)
    monkeypatch.setattr("asyncio.events.new_event_loop", refuse_once)
    auto_recovery.start()
    assert works.wait(LIMIT_S)


def test_stop_returns_while_nothing_of_it_can_be_made(
    auto_recovery: AutoRecoveryThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed = threading.Event()

    def refuse() -> Any:
        has_failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("asyncio.events.new_event_loop", refuse)
    auto_recovery.start()
    assert has_failed.wait(LIMIT_S)
    stop(auto_recovery)


def test_stop_does_not_wait_for_ever(
    auto_recovery: AutoRecoveryThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_busy, may_end = threading.Event(), threading.Event()

    async def work_once(_: ReplicationWorker) -> float:
        is_busy.set()
        await run_to_end(asyncio.to_thread(may_end.wait, LIMIT_S))
        return 1.0

    monkeypatch.setattr(ReplicationWorker, "work_once", work_once)
    auto_recovery.start()
    assert is_busy.wait(LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "STOP_TIMEOUT_S", 0.01, raising=False)
        try:
            stop(auto_recovery)
        finally:
            may_end.set()
    assert "Auto-recovery does not stop" in caplog.text
