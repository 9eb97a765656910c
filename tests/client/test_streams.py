"""Streams of bytes into a ledger."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.client.ledger import BookKeeper
from bkctl.client.streams import LineSplitter, write_ledger, write_stream
from bkctl.errors import LedgerNotFound


class Writer:
    """Stands for a ledger whose bookies acknowledge once `may_add` is set."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.is_adding, self.may_add, self.is_flushed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def add_all(self, payloads: list[bytes]) -> None:
        self.is_adding.set()
        await self.may_add.wait()
        self.entries += payloads

    async def flush(self) -> None:
        pass

    async def write_lac(self) -> None:
        self.is_flushed.set()


async def test_input_that_waits_for_bookies_wakes_no_one() -> None:
    writer: Any = Writer()
    source, sink = os.pipe()
    try:
        writing = asyncio.ensure_future(write_stream(writer, source, LineSplitter()))
        await asyncio.sleep(0)  # it waits for the first line
        os.write(sink, b"one\n")
        await asyncio.wait_for(writer.is_adding.wait(), LIMIT_S)
        os.write(sink, b"two\n")
        assert not asyncio.get_running_loop().remove_reader(source), "the loop would turn without a pause"
        writer.may_add.set()
        await asyncio.wait_for(writer.is_flushed.wait(), LIMIT_S)
        os.write(sink, b"three")
        os.close(sink)
        await asyncio.wait_for(writing, LIMIT_S)
        assert writer.entries == [b"one", b"two", b"three"]
    finally:
        os.close(source)


@pytest.mark.parametrize("content", [b"", b"one\ntwo", None], ids=["empty file", "file", "/dev/null"])
async def test_files_that_epoll_cannot_watch_are_read(tmp_path: Path, content: bytes | None) -> None:
    path = Path("/dev/null") if content is None else tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    writer: Any = Writer()
    writer.may_add.set()
    with path.open("rb") as file:
        await asyncio.wait_for(write_stream(writer, file.fileno(), LineSplitter()), LIMIT_S)
    assert writer.entries == (content or b"").split()


async def test_a_process_with_many_open_files_reads_a_pipe() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("more than 1,024 open files are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    source, sink = os.pipe()
    try:
        high = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, 1024)
        try:
            writer: Any = Writer()
            writer.may_add.set()
            os.write(sink, b"one\n")
            os.close(sink)
            await asyncio.wait_for(write_stream(writer, high, LineSplitter()), LIMIT_S)
            assert writer.entries == [b"one"]
        finally:
            os.close(high)
    finally:
        os.close(source)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_writer_of_a_deleted_ledger_does_not_advise_to_recover_it(
    fake_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "lines").write_bytes(b"a\nb\n")
    reports: list[str] = []
    async with fake_cluster(3) as cluster, cluster.client() as client:

        def delete(_: int) -> None:
            cluster.cluster.ledgers.remove(next(cluster.cluster.ledgers.ledgers()))

        with pytest.raises(LedgerNotFound):
            await write_ledger(
                client, BookKeeper.create_ledger, [str(tmp_path / "lines")], LineSplitter,
                progress=delete, report=reports.append,
            )  # fmt: skip
    assert reports == []
