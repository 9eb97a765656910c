from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bkctl.errors import BkctlError, Conflict, Corrupt, MetadataVersionConflict, NotFound, Unauthorized, Unsupported
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.undo import UndoFile, describe_undo_file, end_undos, list_undo_files, undo
from bkctl.metadata.cluster import Cluster, init_cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AutoRecoveryState


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        yield cluster


def value(cluster: Cluster, path: str) -> bytes | None:
    found = cluster.store.get(path)
    return None if found is None else found.value


def outcomes(cluster: Cluster, path: Path, *, dry_run: bool = False) -> list[tuple[str, str]]:
    return [(each.path, each.outcome) for each in undo(cluster, path, dry_run=dry_run)]


def test_undo_restores_the_last_change_first(cluster: Cluster, tmp_path: Path) -> None:
    store, path = cluster.store, tmp_path / "undo"
    store.put("n/changed", b"\x00\xff", NEW)
    store.put("n/deleted", b"", NEW)
    with UndoFile(path, cluster, ["bkctl", "x"]) as kept:
        for before, after in ((b"\x00\xff", b"1"), (b"1", b"2")):
            kept.record("n/changed", before, after)
            store.put("n/changed", after, None)
        kept.record("n/deleted", b"", None)
        store.delete("n/deleted")
        kept.record("n/made", None, b"x")
        store.put("n/made", b"x", NEW)
        assert kept.count == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header = json.loads(path.read_bytes().splitlines()[0])
    assert (header["format"], header["version"], header["command"]) == ("bkctl-undo", 1, ["bkctl", "x"])
    assert (header["metadataUri"], header["instanceId"]) == (cluster.uri, cluster.instance_id())
    restored = [(name, "restored") for name in ("n/made", "n/deleted", "n/changed", "n/changed")]
    assert outcomes(cluster, path, dry_run=True) == restored
    assert value(cluster, "n/changed") == b"2"
    assert outcomes(cluster, path) == restored
    assert [value(cluster, f"n/{name}") for name in ("made", "deleted", "changed")] == [None, b"", b"\x00\xff"]


def test_an_undo_file_that_cannot_be_created_says_so_and_how_to_do_without(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "undo", tmp_path):
        with pytest.raises(OSError, match=r"No undo file: .*--undo none"), UndoFile(path, cluster, []) as kept:
            kept.record("a", None, b"")


def test_undo_leaves_nodes_changed_since(cluster: Cluster, tmp_path: Path) -> None:
    store, path = cluster.store, tmp_path / "undo"
    with UndoFile(path, cluster, []) as kept:
        kept.record("a", b"before", b"after")
        kept.record("b", None, b"after")
        kept.record("c", b"before", None)
    for name in "ac":
        store.put(name, b"other", NEW)
    # The change of b was recorded, and never made.
    assert outcomes(cluster, path) == [("c", "changed"), ("b", "already"), ("a", "changed")]
    assert [value(cluster, name) for name in "abc"] == [b"other", None, b"other"]


def test_undo_restores_files_only_on_their_host(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old, new = tmp_path / "undo", tmp_path / "old" / "VERSION", tmp_path / "new" / "VERSION"
    for file in (old, new):
        file.parent.mkdir()
    old.write_bytes(b"1")
    with UndoFile(path, cluster, []) as kept:
        kept.record_file(old, b"2")
        old.write_bytes(b"2")
        kept.record_file(new, b"3")
        new.write_bytes(b"3")
    header, *rest = path.read_text().splitlines(keepends=True)
    other = tmp_path / "other"
    other.write_text(header.replace(os.uname().nodename, "elsewhere.example") + "".join(rest))
    with pytest.raises(Conflict, match=r"elsewhere\.example"):
        outcomes(cluster, other)
    assert outcomes(cluster, path) == [(str(new), "restored"), (str(old), "restored")]
    assert (old.read_bytes(), new.exists()) == (b"1", False)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("read_only", [True, False])
def test_undo_keeps_the_cookie_of_a_registered_bookie(
    cluster: Cluster, tmp_path: Path, read_only: bool, dry_run: bool
) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, []) as kept:
        store = kept.recorded().store
        for place in ("cookies/b:1", "a"):
            store.put(place, b"2", None)
    cluster.bookies.register("b:1", BookieServiceInfo(), read_only)
    with pytest.raises(Conflict, match="Bookie b:1 is registered, so it is running; stop it first"):
        outcomes(cluster, path, dry_run=dry_run)
    assert [value(cluster, place) for place in ("cookies/b:1", "a")] == [b"2", b"2"]
    cluster.bookies.unregister("b:1")
    assert {outcome for _, outcome in outcomes(cluster, path, dry_run=dry_run)} == {"restored"}


def test_undo_gives_a_registered_bookie_its_cookie_again(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    cluster.store.put("cookies/b:1", b"1", NEW)
    with UndoFile(path, cluster, []) as kept:
        store = kept.recorded().store
        store.delete("cookies/b:1")
        with pytest.raises(NotFound):
            store.put("cookies/b:1", b"3", 5)  # void
    cluster.bookies.register("b:1", BookieServiceInfo())
    assert outcomes(cluster, path) == [("cookies/b:1", "restored")]
    assert value(cluster, "cookies/b:1") == b"1"


def test_undo_takes_back_an_update_of_the_cookie_of_a_registered_bookie(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    cluster.store.put("cookies/b:1", b"right", NEW)
    cluster.bookies.register("b:1", BookieServiceInfo())
    with UndoFile(path, cluster, []) as kept:
        kept.recorded().store.put("cookies/b:1", b"wrong", None)
    assert outcomes(cluster, path) == [("cookies/b:1", "restored")]
    assert value(cluster, "cookies/b:1") == b"right"


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["0.log", "1.txn", "scoped/0.log"])
def test_undo_removes_no_cookie_beside_files_of_a_bookie(
    cluster: Cluster, tmp_path: Path, name: str, dry_run: bool
) -> None:
    path, file = tmp_path / "undo", tmp_path / "current" / "VERSION"
    file.parent.mkdir()
    with UndoFile(path, cluster, []) as kept:
        kept.recorded().store.put("a", b"2", None)
        kept.record_file(file, b"3")
        file.write_bytes(b"3")
    (file.parent / "lastMark").touch()
    log = file.parent / name
    log.parent.mkdir(exist_ok=True)
    log.touch()
    with pytest.raises(Conflict, match=f"{file.parent} has entry logs or journals beside the cookie"):
        outcomes(cluster, path, dry_run=dry_run)
    assert (file.exists(), value(cluster, "a")) == (True, b"2")
    log.unlink()
    assert {outcome for _, outcome in outcomes(cluster, path, dry_run=dry_run)} == {"restored"}


def test_undo_file_is_created_by_the_first_change_and_never_overwrites(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, []):
        pass
    assert not path.exists()
    path.write_bytes(b"mine")
    with UndoFile(path, cluster, []) as kept, pytest.raises(FileExistsError):
        kept.record("a", None, b"")
    assert path.read_bytes() == b"mine"


def test_undo_file_without_path_writes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with UndoFile(None, cluster, []) as kept:
        kept.record("a", None, b"1")
    assert kept.count == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("before", [None, b"ssh-ed25519 AAAA"], ids=["deletes", "writes"])
def test_undo_touches_no_file_but_cookies(cluster: Cluster, tmp_path: Path, before: bytes | None) -> None:
    """An undo file may have been edited, or come from someone else."""
    path, victim = tmp_path / "undo", tmp_path / "authorized_keys"
    victim.write_bytes(b"ssh-rsa BBBB")
    with UndoFile(path, cluster, []) as kept:
        kept.record_file(tmp_path / "none", None)
    header = path.read_text().splitlines(keepends=True)[0]
    coded = [None if each is None else base64.b64encode(each).decode() for each in (before, b"ssh-rsa BBBB")]
    path.write_text(header + json.dumps({"file": str(victim), "before": coded[0], "after": coded[1]}) + "\n")
    with pytest.raises(Corrupt, match="authorized_keys: Cookie does not begin"):
        outcomes(cluster, path)
    assert victim.read_bytes() == b"ssh-rsa BBBB"


@pytest.mark.parametrize("name", ["/VERSION\0", "/\ud800/VERSION"])
def test_impossible_name_of_a_file_is_corrupt(cluster: Cluster, tmp_path: Path, name: str) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, []) as kept:
        kept.record_file(tmp_path / "none", None)
    header = path.read_text().splitlines(keepends=True)[0]
    path.write_text(header + json.dumps({"file": name, "before": None, "after": None}) + "\n")
    with pytest.raises(Corrupt, match="names no file"):
        outcomes(cluster, path)


@pytest.mark.parametrize("name", ["../../etc", "/a", "a\0"])
def test_impossible_path_of_a_node_is_corrupt(cluster: Cluster, tmp_path: Path, name: str) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, []) as kept:
        kept.record("a", b"1", None)
    header = path.read_text().splitlines(keepends=True)[0]
    path.write_text(header + json.dumps({"path": name, "before": None, "after": None}) + "\n")
    with pytest.raises(Corrupt, match=f"undo: the line at byte {len(header)}: Not a path"):
        outcomes(cluster, path)


def test_undo_does_not_wait_for_a_pipe(cluster: Cluster, tmp_path: Path) -> None:
    path, pipe = tmp_path / "undo", tmp_path / "VERSION"
    with UndoFile(path, cluster, []) as kept:
        kept.record_file(pipe, b"1")
    os.mkfifo(pipe)
    assert outcomes(cluster, path) == [(str(pipe), "changed")]


class FullDisk:
    """os.write on a disk that has room for `room` more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self._write = room, os.write
        monkeypatch.setattr("bkctl.metadata.admin.undo.os.write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.room]
        self.room -= len(part)
        return self._write(file, part)


def test_line_that_a_full_disk_cut_does_not_join_the_next(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, ["bkctl"]) as kept:
        kept.record("a", b"1", b"2")
        disk = FullDisk(monkeypatch, 20)
        with pytest.raises(OSError, match=re.escape(f"No space left on device: '{path}'")):
            kept.record("b", b"1", b"2")
        disk.room = 1 << 20
        kept.record("c", b"1", b"2")
        assert kept.count == 2
    for name in "ac":
        cluster.store.put(name, b"2", NEW)
    assert outcomes(cluster, path) == [("c", "restored"), ("a", "restored")]


def test_undo_file_without_room_for_its_first_line_is_none(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "undo"
    disk = FullDisk(monkeypatch, 20)
    with UndoFile(path, cluster, ["bkctl"]) as kept:
        with pytest.raises(OSError, match="No space"):
            kept.record("a", None, b"1")
        assert (path.exists(), kept.count) == (False, 0)
        disk.room = 1 << 20
        kept.record("b", None, b"1")
    assert outcomes(cluster, path) == [("b", "already")]


def test_undo_skips_a_truncated_last_line(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, []) as kept:
        kept.record("a", None, b"1")
        kept.record("b", None, b"1")
    path.write_bytes(path.read_bytes()[: -len('{"changes":2}\n') - 5])
    assert outcomes(cluster, path) == [("a", "already")]


def test_undo_file_that_lacks_its_end_is_cut(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    kept = UndoFile(path, cluster, [])
    kept.record("a", None, b"1")
    killed = path.read_bytes()
    kept.record("b", None, b"1")
    kept.record("c", None, b"1")
    kept.void("c")
    kept.close()
    whole = path.read_bytes()
    earlier = whole.replace(b',"counted":true', b"").removesuffix(b'{"changes":2}\n')
    for data, is_cut in ((whole, False), (whole + b'{"end":true}\n', False), (killed, True), (earlier, False)):
        path.write_bytes(data)
        found = describe_undo_file(path)
        assert found is not None
        assert (found.is_cut, found.change_count) == (is_cut, 1 if data == killed else 2)
        assert outcomes(cluster, path)[-1] == ("a", "already")


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"damage\n", b'{"path":"/","before":null,"after":null}\n'])
def test_damaged_or_missing_line_is_found_before_anything_is_undone(
    cluster: Cluster, tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, []) as kept:
        for name in "abc":
            kept.recorded().store.put(name, b"1", NEW)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    with pytest.raises(Corrupt):
        outcomes(cluster, path)
    assert [value(cluster, name) for name in "abc"] == [b"1"] * 3


def test_undo_files_of_other_clusters_and_versions_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    with UndoFile(path, cluster, []) as kept:
        kept.record("a", None, b"1")
    header, line, _ = path.read_bytes().splitlines(keepends=True)
    fields = json.loads(header)
    for changes, error in (
        ({"instanceId": "other"}, Conflict), ({"version": 2}, Unsupported), ({"format": "x"}, Corrupt),
    ):  # fmt: skip
        path.write_bytes(json.dumps({**fields, **changes}).encode() + b"\n" + line)
        with pytest.raises(error):
            outcomes(cluster, path)
    path.write_bytes(header + b"x" * (4 << 20))
    with pytest.raises(Corrupt, match="longer"):
        outcomes(cluster, path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=60), at=st.integers(0, 400))
def test_damaged_undo_file_is_corrupt(cluster: Cluster, tmp_path: Path, data: bytes, at: int) -> None:
    path = tmp_path / "undo"
    path.unlink(missing_ok=True)
    with UndoFile(path, cluster, []) as kept:
        kept.record("a", b"1", b"2")
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    with contextlib.suppress(BkctlError):  # any other exception fails
        outcomes(cluster, path)


def test_recorded_store_records_every_change_before_it_is_made(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    store = cluster.store
    version = store.put("n/changed", b"1", NEW)
    store.put("n/many", b"a", NEW)
    store.put("n/gone", b"x", NEW)
    with UndoFile(path, cluster, ["bkctl", "x"]) as kept:
        recorded = kept.recorded().store
        assert recorded.put("n/changed", b"2", version) == version + 1
        recorded.put("n/made", b"m", NEW)
        assert [type(each) for each in recorded.put_many([("n/many", b"b", 0), ("n/none", b"c", 3)])] == [int, NotFound]
        recorded.delete("n/gone")
        assert recorded.get("n/changed") == store.get("n/changed")
    assert outcomes(cluster, path) == [
        ("n/gone", "restored"), ("n/many", "restored"), ("n/made", "restored"), ("n/changed", "restored"),
    ]  # fmt: skip
    assert [value(cluster, f"n/{name}") for name in ("changed", "many", "gone", "made")] == [b"1", b"a", b"x", None]


def test_changes_of_versions_just_read_are_recorded_without_another_read(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = cluster.store, tmp_path / "undo"
    versions = {name: store.put(f"n/{name}", name.encode(), NEW) for name in ("a", "b", "c", "d", "e")}
    asked: list[str] = []
    get_many = store.get_many
    monkeypatch.setattr(store, "get_many", lambda paths: get_many(asked.extend(each := list(paths)) or each))
    with UndoFile(path, cluster, ["bkctl", "x"]) as kept:
        recorded = kept.recorded().store
        assert recorded.get("n/a") == store.get("n/a")
        assert [found and found.value for found in recorded.get_many(["n/b", "n/c", "n/none"])] == [b"b", b"c", None]
        asked.clear()
        recorded.put("n/a", b"1", versions["a"])  # With the file's first line, which names the cluster.
        assert asked.pop() == "INSTANCEID"
        recorded.put_many([("n/b", b"2", versions["b"]), ("n/new", b"3", NEW)])
        recorded.delete("n/c", versions["c"])
        assert asked == []
        # Neither what was read in another version nor what was not read at all is known.
        recorded.get("n/d")
        asked.clear()
        recorded.put("n/d", b"5", store.put("n/d", b"4", versions["d"]))
        recorded.delete("n/e")
        recorded.put("n/a", b"6", None)
        assert asked == ["n/d", "n/e", "n/a"]
    outcomes(cluster, path)
    assert [value(cluster, f"n/{name}") for name in ("a", "b", "c", "d", "e", "new")] == [
        b"a", b"b", b"c", b"4", b"e", None,
    ]  # fmt: skip


def test_memory_of_recorded_reads_is_bounded(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.metadata.admin.undo._READ_COUNT_MAX", 2)
    versions = [cluster.store.put(f"n/{number}", b"%d" % number, NEW) for number in range(4)]
    with UndoFile(tmp_path / "undo", cluster, ["bkctl", "x"]) as kept:
        recorded = kept.recorded().store
        assert len(list(recorded.get_many(f"n/{number}" for number in range(4)))) == 4
        assert list(recorded._read) == ["n/2", "n/3"]  # type: ignore[attr-defined]
        for number in range(4):
            recorded.delete(f"n/{number}", versions[number])
    assert {outcome for _, outcome in outcomes(cluster, tmp_path / "undo")} == {"restored"}


def test_refused_changes_are_not_undone(cluster: Cluster, tmp_path: Path) -> None:
    """A change that lost a race is tried again: only the second attempt counts."""
    path = tmp_path / "undo"
    version = cluster.store.put("n", b"mine", NEW)
    with UndoFile(path, cluster, ["bkctl", "x"]) as kept:
        recorded = kept.recorded().store
        theirs = cluster.store.put("n", b"theirs", version)
        for refused in (lambda: recorded.put("n", b"lost", version), lambda: recorded.delete("n", version)):
            with pytest.raises(MetadataVersionConflict):
                refused()
        recorded.put("n", b"ours", theirs)
    assert outcomes(cluster, path) == [("n", "restored")]
    assert value(cluster, "n") == b"theirs"


@pytest.mark.parametrize("changed_nothing", [True, False])
def test_changes_of_a_user_without_access_are_void_unless_they_may_be_made(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed_nothing: bool
) -> None:
    error = Unauthorized("No access")
    error.changed_nothing = changed_nothing

    def refuse(*_: object, **__: object) -> None:
        raise error

    for name in ("put", "delete"):
        monkeypatch.setattr(cluster.store, name, refuse)
    monkeypatch.setattr(cluster.store, "put_many", lambda nodes: [error for _ in nodes])
    with UndoFile(tmp_path / "undo", cluster, []) as kept:
        recorded = kept.recorded().store
        for change in (lambda: recorded.put("n", b"1", NEW), lambda: recorded.delete("n")):
            with pytest.raises(Unauthorized):
                change()
        assert recorded.put_many([("n", b"1", NEW)]) == [error]
    assert (kept.count, (tmp_path / "undo").exists()) == ((0, False) if changed_nothing else (3, True))


def test_node_that_the_store_refuses_stops_no_other(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, put = tmp_path / "undo", cluster.store.put
    with UndoFile(path, cluster, []) as kept:
        for name in "abc":
            put(name, b"1", NEW)
            kept.recorded().store.put(name, b"2", 0)

    def refuse(path: str, value: bytes, expected: int | None) -> int:
        if path != "b":
            return put(path, value, expected)
        error = Unauthorized("No access")
        error.changed_nothing = True
        raise error

    monkeypatch.setattr(cluster.store, "put", refuse)
    with UndoFile(tmp_path / "redo", cluster, []) as redo:
        done = [(each.path, each.outcome) for each in undo(cluster, path, redo=redo)]
    assert done == [("c", "restored"), ("b", "refused"), ("a", "restored")]
    assert redo.count == 2


def test_undoing_can_be_undone(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "VERSION"
    with UndoFile(tmp_path / "undo", cluster, []) as kept:
        kept.recorded().store.put("n", b"1", NEW)
        kept.record_file(file, b"new")
        file.write_bytes(b"new")
    with UndoFile(tmp_path / "redo", cluster, []) as redo:
        assert len(list(undo(cluster, tmp_path / "undo", redo=redo))) == 2
    assert (value(cluster, "n"), file.exists()) == (None, False)
    assert {outcome for _, outcome in outcomes(cluster, tmp_path / "redo")} == {"restored"}
    assert (value(cluster, "n"), file.read_bytes()) == (b"1", b"new")


def test_an_undo_that_did_not_end_names_the_file_that_continues_it(cluster: Cluster, tmp_path: Path) -> None:
    with UndoFile(tmp_path / "a", cluster, []) as kept:
        kept.recorded().store.put("n", b"1", NEW)
        kept.recorded().store.put("m", b"1", NEW)
    with UndoFile(tmp_path / "b", cluster, []) as redo:
        next(undo(cluster, tmp_path / "a", redo=redo))

    def found() -> dict[str, tuple[int, str | None]]:
        return {each.path.name: (each.change_count, each.continues) for each in list_undo_files(tmp_path)}

    assert found() == {"a": (2, None), "b": (1, str(tmp_path / "a"))}
    with UndoFile(tmp_path / "c", cluster, []) as redo:
        assert [each.outcome for each in undo(cluster, tmp_path / "a", redo=redo)] == ["already", "restored"]
    end_undos(tmp_path, tmp_path / "a")
    assert found() == {"a": (2, None), "b": (1, None), "c": (1, None)}


def test_undo_files_of_a_directory_are_listed_with_their_changes(cluster: Cluster, tmp_path: Path) -> None:
    directory = tmp_path / "undo"
    assert list_undo_files(directory) == []
    directory.mkdir()
    (directory / "other").write_bytes(b"\xff\n")
    (directory / "json").write_text('{"format": "x"}\n')
    with UndoFile(directory / "one", cluster, ["bkctl", "a b"]) as kept:
        kept.record("n", None, b"")
        kept.record("m", None, b"")
        kept.void("m")
    [found] = list_undo_files(directory)
    assert (found.path, found.command, found.change_count) == (directory / "one", ("bkctl", "a b"), 1)
    assert (found.metadata_uri, found.instance_id) == (cluster.uri, cluster.instance_id())


def test_refused_changes_alone_leave_no_undo_file(cluster: Cluster, tmp_path: Path) -> None:
    cluster.store.put("n", b"", NEW)
    with UndoFile(tmp_path / "undo", cluster, []) as kept:
        for _ in range(2):
            with pytest.raises(Conflict):
                kept.recorded().store.put("n", b"1", NEW)
    assert (kept.count, list(tmp_path.glob("undo"))) == (0, [])


def test_undo_file_belongs_to_one_store_not_to_copies_of_its_cluster(cluster: Cluster, tmp_path: Path) -> None:
    path, link = tmp_path / "undo", tmp_path / "link.db"
    with UndoFile(path, cluster, []) as kept:
        kept.recorded().store.put("n", b"1", NEW)
    link.symlink_to(tmp_path / "metadata.db")
    with open_cluster(f"sqlite://{link}") as same:
        assert outcomes(same, path, dry_run=True) == [("n", "restored")]
    old = tmp_path / "old"  # of a release that wrote no `store`
    header, line, _ = path.read_text().splitlines()
    fields = json.loads(header)
    del fields["store"], fields["counted"]
    old.write_text(json.dumps(fields) + f"\n{line}\n")
    unnamed = tmp_path / "unnamed"
    unnamed.write_text(json.dumps(fields | {"metadataUri": None}) + f"\n{line}\n")
    assert outcomes(cluster, old, dry_run=True) == [("n", "restored")]
    with open_cluster(f"sqlite://{tmp_path / 'copy.db'}", create_store=True) as copy:
        init_cluster(copy, instance_id=cluster.instance_id())
        copy.store.put("n", b"1", NEW)
        for file in (path, old, unnamed):
            with pytest.raises(Conflict, match="is another store"):
                outcomes(copy, file)
            assert not any(each.is_of(copy) for each in list_undo_files(tmp_path))
        assert value(copy, "n") == b"1"
        assert [each.outcome for each in undo(copy, path, moved=True)] == ["restored"]


def test_shared_nodes_are_neither_recorded_nor_removed(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "undo"
    shared = [f"underreplication/{name}" for name in ("LAYOUT", "ledgers", "locks")]
    with UndoFile(path, cluster, []) as kept:
        AutoRecoveryState(kept.recorded().store).settings.disable()
        for name in shared:
            with pytest.raises(Conflict):
                kept.recorded().store.put(name, b"", NEW)
    assert outcomes(cluster, path) == [("underreplication/disable", "restored")]
    assert all(value(cluster, name) is not None for name in shared)
    with UndoFile(tmp_path / "old", cluster, []) as kept:  # as earlier releases wrote it
        for name in shared:
            kept.record(name, None, value(cluster, name))
    assert {outcome for _, outcome in outcomes(cluster, tmp_path / "old")} == {"shared"}
    assert all(value(cluster, name) is not None for name in shared)


@pytest.mark.parametrize("ledger", [LedgerId(0, 5), LedgerId(7, 5)], ids=str)
@pytest.mark.parametrize("dry_run", [True, False])
def test_moved_ledger_keeps_the_bookies_that_have_its_entries(
    cluster: Cluster, tmp_path: Path, ledger: LedgerId, dry_run: bool
) -> None:
    before = LedgerMetadata(1, 1, 1, DigestType.CRC32, b"", (Fragment(0, ("a:1",)),), custom_metadata={"k": b"1"})
    moved = before._replace(ensembles=(Fragment(0, ("b:1",)),))
    cluster.ledgers.create(ledger, before)
    for command, outcome in (("bookies", "recover"), "moved"), (("metadata", "replace-bookie"), "restored"):
        path = tmp_path / command[1]
        with UndoFile(path, cluster, ["bkctl", *command]) as kept:
            recorded = kept.recorded().ledgers
            recorded.write(ledger, moved, recorded.read(ledger).version)
        assert [each for _, each in outcomes(cluster, path, dry_run=dry_run)] == [outcome]
        is_restored = outcome == "restored" and not dry_run
        found = cluster.ledgers.read(ledger)
        assert found.metadata.ensembles == (before if is_restored else moved).ensembles
        cluster.ledgers.write(ledger, before, found.version)
