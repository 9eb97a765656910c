"""Bundles: read back as the cluster that they are of, without secrets, and whatever a stranger put into one."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import CommandLine

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.http import bundle as bundles
from bkctl.http.bookie_client import DiskSpace
from bkctl.http.bookie_load import NO_COUNTS, BookieLoad, BookieReading, ClusterLoad, LoadCounts, Percentiles
from bkctl.ids import LedgerId
from bkctl.metadata.admin.dump.sources import ClusterSource
from bkctl.metadata.backends import sqlite
from bkctl.metadata.cluster import RegisteredBookie, open_cluster
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.store import RACKS
from bkctl.metadata.underreplication import LedgerMarks

LEDGERS = [LedgerId(0, 3), LedgerId(0, 4), LedgerId(7, 3)]
READS = (
    ("ledger", "list", "--all-scopes"),
    ("ledger", "show", "3"),
    ("ledger", "show", str(LEDGERS[2])),
    ("bookies", "list"),
    ("cookie", "list"),
    ("autorecovery", "list"),
    ("cluster", "health"),
    ("cluster", "health", "detail"),
    ("why", "bookie", "b3"),
    ("why", "create"),
    ("why", "create", "--ensemble-size", "1", "--write-quorum", "1", "--ack-quorum", "1", "--scoped"),
    ("bookies", "racks", "list"),
    ("top", "--once", "--interval", "100ms"),
)


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        for bookie_id in ("b1", "b2", "b3"):
            cookie = Cookie(bookie_id, ("/j",), ("/l",), instance_id=cluster.instance_id())
            cluster.cookies.write(bookie_id, cookie, -1)
        cluster.bookies.register("b1", BookieServiceInfo(properties={"version": "x"}))
        cluster.bookies.register("b2", BookieServiceInfo(), read_only=True)
        for number, ledger in enumerate(LEDGERS):
            cluster.ledgers.create(
                ledger,
                LedgerMetadata(
                    2, 2, 2, DigestType.CRC32C, b"s3cret-of-ledger", (Fragment(0, ("b1", "b2")),),
                    state=LedgerState.CLOSED, last_entry_id=9, length=90 + number, ctime_ms=1_700_000_000_000,
                    format_version=3, custom_metadata={"application": b"pulsar", "db-password": b"s3cret-custom"},
                ),
            )  # fmt: skip
        LedgerMarks(cluster.store).add(LEDGERS[1], ["b1"])
        BookieRacks(cluster).set(["b1"], "/r1")
        yield cluster.uri


def plain(found: object) -> object:
    """Leave out what hides secrets or counts seconds."""
    hidden = {"version", "customMetadata", "ageSeconds", "message", "details", "password", "facts"}
    if isinstance(found, dict):
        return {name: plain(value) for name, value in found.items() if name not in hidden}
    return [plain(each) for each in found] if isinstance(found, list) else found


def collect(uri: str, file: Path) -> Path:
    done = CommandLine(uri)("diagnose", "bundle", file, "--pause", "1ms", "--timeout", "5s")
    assert done.code == 0, done.err
    return file


def test_a_bundle_answers_as_its_cluster_did(uri: str, tmp_path: Path) -> None:
    live, file = CommandLine(uri), tmp_path / "b.tar.gz"
    before = {words: live(*words, "-o", "json") for words in READS}
    collect(uri, file)
    for words in READS:
        answer = CommandLine(None)(*words, "-o", "json", "--bundle", file)
        assert answer.code == before[words].code, answer.err
        then, now = json.loads(before[words].out), json.loads(answer.out)
        assert plain(now) == plain(then), words
        if words[:2] == ("why", "create"):
            assert now == then
        assert f"from the bundle {file}" in answer.err
    assert b"s3cret" not in gzip.decompress(file.read_bytes())
    done = CommandLine(None)("top", "--bundle", file)
    assert (done.code, "add --once" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    "words",
    [("why", "ledger", "3"), ("cluster", "status"),
     ("ledger", "read", "3"), ("ledger", "delete", "3", "--yes"),
     ("autorecovery", "disable"), ("bookies", "usage"), ("ledger", "verify", "3"),
     ("metadata", "migrate", "--to", "sqlite:///nowhere/m.db")],
)  # fmt: skip
def test_commands_that_need_bookies_or_changes_refuse_a_bundle(
    uri: str, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = collect(uri, tmp_path / "b.tar.gz")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a bundle led to a connection"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = CommandLine(None)(*words, "--bundle", file)
    assert done.code == 8, (done.out, done.err)
    assert "bundle" in done.err
    assert "Undo" not in done.err
    assert not [*tmp_path.glob("state/**/*.ndjson")]


LOAD = ClusterLoad(
    (
        BookieLoad(
            RegisteredBookie("b1", "rw", BookieServiceInfo((BookieEndpoint("h", 80, "h", "http"),), {"v": "x"})),
            BookieReading(
                1.5, LoadCounts(1, 2, 3, 4, None), *[Percentiles(0.1, 2, None, None)] * 4, 1, None, 3, 4, 5,
                DiskSpace(1, 4), "idle", None,
            ),
            LoadCounts(10.5, 2, 3, 4, None), 2, None,
        ),
        BookieLoad(RegisteredBookie("b2", "down", None), None, NO_COUNTS, 0, "has a cookie, but is not registered"),
    ),
    2,
)  # fmt: skip


def test_the_load_of_a_bundle_is_the_load_that_was(tmp_path: Path) -> None:
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode="w") as archive:
        bundles.Bundle(archive, 1 << 20).json("load.json", LOAD)
    with tarfile.open(fileobj=io.BytesIO(kept.getvalue())) as archive:
        file = archive.extractfile("bkctl-bundle/load.json")
        assert file is not None
        document = json.load(file)
    assert bundles.typed(ClusterLoad, document) == LOAD
    for path, wrong in (("underreplicated_count", "2"), ("bookies", {}), ("bookies", [{}]), ("more", 1)):
        with pytest.raises((ValueError, TypeError, KeyError)):
            bundles.typed(ClusterLoad, {**document, path: wrong})


@pytest.mark.parametrize("is_known", [True, False])
def test_ledgers_of_a_bundle_are_as_old_as_the_cluster_says(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The age is not known where neither the metadata nor the store has the time, as on etcd."""
    with monkeypatch.context() as patch, open_cluster(uri) as cluster:
        patch.setattr(sqlite, "_wall_ms", lambda: 1_600_000_000_000)
        metadata = cluster.ledgers.read(LEDGERS[0]).metadata
        cluster.ledgers.create(LedgerId(0, 8), metadata._replace(ctime_ms=None))
    if not is_known:
        stored = ClusterSource._of_ledgers
        monkeypatch.setattr(
            ClusterSource, "_of_ledgers", lambda *given: (each._replace(ctime_ms=None) for each in stored(*given))
        )
    file = collect(uri, tmp_path / "b.tar.gz")
    found = json.loads(CommandLine(None)("ledger", "list", "-o", "json", "--bundle", file).out)
    expected = "2020-09-13T12:26:40.000Z" if is_known else None
    assert [row["ctime"] for row in found] == ["2023-11-14T22:13:20.000Z"] * 2 + [expected]
    old = CommandLine(None)("ledger", "list", "-o", "id", "--min-age", "1w", "--bundle", file)
    assert old.out.split() == [b"3", b"4"] + [b"8"] * is_known


def test_damaged_racks_are_in_a_bundle_as_they_are(uri: str, tmp_path: Path) -> None:
    with open_cluster(uri) as cluster:
        cluster.store.put(RACKS, b"{", None)
    file = collect(uri, tmp_path / "b.tar.gz")
    assert CommandLine(None)("bookies", "racks", "list", "-o", "id", "--bundle", file).code == 7


def test_damaged_bundles_are_corrupt_and_nothing_else(uri: str, tmp_path: Path) -> None:
    good = collect(uri, tmp_path / "b.tar.gz").read_bytes()
    plain = gzip.decompress(good)
    chance = random.Random(28)
    bad = [b"", b"x", good[: len(good) // 2], gzip.compress(b""), gzip.compress(b"x" * 5000)]
    for _ in range(40):
        data = bytearray(plain)
        for _ in range(chance.randrange(1, 30)):
            data[chance.randrange(len(data) // 2)] = chance.randrange(256)
        bad.append(gzip.compress(bytes(data)))
    file = tmp_path / "bad.tar.gz"
    for data in bad:
        file.write_bytes(data)
        for words in (("ledger", "list"), ("cluster", "health")):
            done = CommandLine(None)(*words, "--bundle", file)
            assert done.code in (0, 3, 7), done.err
            assert done.code == 7 or data not in bad[:5]


def test_a_bundle_that_grows_without_end_and_names_paths_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "READ_SIZE_BYTES_MAX", 1 << 20)
    file, outside = tmp_path / "bomb.tar.gz", tmp_path / "outside"
    with tarfile.open(file, "w:gz") as archive:
        for name in ("../../outside", str(outside), "bkctl-bundle/../outside"):
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("bkctl-bundle/bookies.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        info = tarfile.TarInfo("bkctl-bundle/metadata.ndjson")
        info.size = 64 << 20
        archive.addfile(info, io.BytesIO(bytes(64 << 20)))
    done = CommandLine(None)("ledger", "list", "--bundle", file)
    assert (done.code, "more than 1,048,576 bytes" in done.err) == (7, True), done.err
    assert not outside.exists()
