"""Files of a bookie and of a local cluster are closed to other users of the machine, under the usual umask."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.own_bookies import OwnBookie
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie.local import LocalCluster
from bkctl.client.ledger import BookKeeper
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import run


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def write(uri: str) -> None:
    """Ledgers in scope 0 and in another, which have files of their own."""

    async def work() -> None:
        with open_cluster(uri) as cluster:
            async with BookKeeper(cluster) as bookkeeper:
                for scope in (0, 7):
                    writer = await bookkeeper.create_ledger_adv(
                        ensemble_size=1, write_quorum_size=1, ack_quorum_size=1, password=b"hush",
                        ledger_scope_id=scope,
                    )  # fmt: skip
                    async with writer:
                        for number in range(10):
                            await writer.add(b"entry %d" % number)

    run(work())


def too_open(*roots: Path) -> list[str]:
    """The paths below that others may use, or the group may change."""
    found = []
    for root in roots:
        for path in (root, *root.rglob("*")):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o027:
                found.append(f"{mode:o} {path}")
    return found


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_bookie_files_are_closed_to_other_users(tmp_path: Path, storage: str) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    bookie = OwnBookie(uri, tmp_path / "bookie", storage=storage)
    bookie.start()
    try:
        write(uri)
        places = [bookie.journal_dir / "current", bookie.ledger_dir / "current"]
        assert too_open(*places, *tmp_path.glob("metadata.db*")) == []  # as it runs
        os.kill(bookie.pid, signal.SIGTERM)
        assert bookie.process.wait(LIMIT_S) == 0
        assert too_open(*places, *tmp_path.glob("metadata.db*")) == []
        assert any(path.suffix == ".log" for path in places[1].rglob("*"))
        bookie.start()  # the bookie itself may still do everything
        write(uri)
    finally:
        bookie.kill()


def test_local_cluster_is_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    local = LocalCluster()
    local.up(1, http=True)
    try:
        write(local.metadata_uri)
        assert stat.S_IMODE(local.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((local.directory / "bookie-0").stat().st_mode) == 0o700
        names = {"metadata.db", "cluster.json", "bookie-0/bk_server.conf", "bookie-0/bookie.log", "bookie-0/bookie.pid"}
        assert all((local.directory / name).is_file() for name in names)
        assert too_open(local.directory) == []
    finally:
        local.down()


def test_pointer_to_local_cluster_is_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share" / "data"))
    os.umask(0)
    LocalCluster(tmp_path / "cluster")._make_active()
    places = sorted((tmp_path / "share").rglob("*"))
    assert [path.name for path in places] == ["data", "bkctl", "local-cluster"]
    assert too_open(tmp_path / "share") == []


def test_open_local_cluster_is_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    old, shared = tmp_path / "old", tmp_path / "shared"
    for directory in (old, shared):
        directory.mkdir(mode=0o755)
    (shared / "something else").write_text("of the user")
    LocalCluster(old)._make_directory()
    LocalCluster(shared)._make_directory()
    assert stat.S_IMODE(old.stat().st_mode) == 0o700
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755  # not ours to change
