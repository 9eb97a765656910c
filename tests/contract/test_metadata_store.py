"""The contract of metadata stores, over SQLite, a real ZooKeeper, a real etcd and a real HBase."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.waiting import eventually

from bkctl.errors import AlreadyExists, Conflict, MetadataVersionConflict, NotFound, Unreachable, UsageError
from bkctl.metadata.store import NEW, PATH_LENGTH_MAX, RACKS, VALUE_SIZE_BYTES_MAX, AbsolutePath, Claim, MetadataStore


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` … `work(count - 1)` at once, and raise what any of them raised."""
    problems: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def test_a_created_node_is_read_back_with_its_version_and_its_parent(store: MetadataStore) -> None:
    before_ms = time.time() * 1000 - 60_000
    assert store.get("cookies/bookie-1") is None
    version = store.put("cookies/bookie-1", b"\x00value\xff", NEW)
    found = store.get("cookies/bookie-1")
    assert found is not None
    assert found[:2] == (b"\x00value\xff", version)
    if found.ctime_ms is None:  # etcd keeps no time
        assert "etcd" in store.name
    else:
        assert before_ms < found.ctime_ms < time.time() * 1000 + 60_000
        assert version == 0
    assert store.get("cookies") == found._replace(value=b"")


def test_create_refuses_a_node_that_exists(store: MetadataStore) -> None:
    version = store.put("node", b"first", NEW)
    with pytest.raises(AlreadyExists):
        store.put("node", b"second", NEW)
    assert store.get("node")[:2] == (b"first", version)  # type: ignore[index]


def test_replace_needs_the_version_that_was_read(store: MetadataStore) -> None:
    first = store.put("node", b"0", NEW)
    second = store.put("node", b"1", first)
    third = store.put("node", b"2", second)
    assert first < second < third
    for version in (0, first, second, third + 1):
        with pytest.raises(MetadataVersionConflict):
            store.put("node", b"no", version)
    assert store.get("node")[:2] == (b"2", third)  # type: ignore[index]
    with pytest.raises(NotFound):
        store.put("other", b"no", 0)
    assert store.get("other") is None


def test_put_many_writes_each_node_on_its_own(store: MetadataStore) -> None:
    paths = [f"many/{number:03d}" for number in range(100)]
    versions = [store.put(path, b"0", NEW) for path in paths]
    written = store.put_many([(path, b"1", version) for path, version in zip(paths, versions, strict=True)])
    found = list(store.get_many(paths))
    assert [each and each[:2] for each in found] == [(b"1", version) for version in written]
    # One that is gone and one that somebody changed keep none of the others back; the whole is above what fits into
    # one request.
    store.delete(paths[0])
    stale = store.put(paths[1], b"by another", written[1])  # type: ignore[arg-type]
    large = b"2" * (VALUE_SIZE_BYTES_MAX // 3)
    nodes = [(path, large, version) for path, version in zip(paths[:7], written[:7], strict=True)]
    again = store.put_many(nodes)  # type: ignore[arg-type]
    assert [type(each) for each in again[:2]] == [NotFound, MetadataVersionConflict]
    values = [each and each[:2] for each in store.get_many(paths[:7])]
    assert values == [None, (b"by another", stale), *((large, version) for version in again[2:])]
    assert store.put_many([]) == []


@pytest.mark.parametrize("directory", ["ledgers", "many"])
def test_put_many_creates_new_nodes_and_leaves_existing_ones(store: MetadataStore, directory: str) -> None:
    paths = [f"{directory}/{number:032x}" for number in range(300)]
    there = store.put(paths[1], b"there", NEW)
    created = store.put_many([(path, b"%d" % at, NEW) for at, path in enumerate(paths)])
    assert isinstance(created[1], AlreadyExists)
    assert all(isinstance(each, int) for at, each in enumerate(created) if at != 1)
    found = list(store.get_many(paths))
    assert [each and each[:2] for each in found] == [
        (b"there", there) if at == 1 else (b"%d" % at, version) for at, version in enumerate(created)
    ]
    # All of them exist now, and one of a batch is changed while another is created.
    assert {type(each) for each in store.put_many([(path, b"no", NEW) for path in paths])} == {AlreadyExists}
    store.delete(paths[2])
    assert isinstance(created[0], int)
    mixed = store.put_many([(paths[0], b"changed", created[0]), (paths[2], b"new", NEW), (paths[3], b"no", 10**6)])
    assert [type(each) for each in mixed] == [int, int, MetadataVersionConflict]
    assert [each and each.value for each in store.get_many(paths[:4])] == [b"changed", b"there", b"new", b"3"]
    large = b"2" * (VALUE_SIZE_BYTES_MAX + 1)
    assert isinstance(store.put_many([(paths[0], large, NEW), (paths[1], b"", NEW)])[0], UsageError)


def test_unconditional_put_creates_and_replaces(store: MetadataStore) -> None:
    first = store.put("a/node", b"0", None)
    assert store.get("a/node")[:2] == (b"0", first)  # type: ignore[index]
    second = store.put("a/node", b"1", None)
    assert second > first
    assert store.get("a/node")[:2] == (b"1", second)  # type: ignore[index]


def test_one_of_many_conditional_writers_wins_each_version(backend: Any) -> None:
    stores = [backend.open() for _ in range(3)]
    stores[0].put("counter", b"0 -", NEW)
    won = [0] * 6

    def count(index: int) -> None:
        store = stores[index % 3]
        for _ in range(200):
            found = store.get("counter")
            number = int(found.value.split()[0]) + 1
            try:
                version = store.put("counter", b"%d %d" % (number, index), found.version)
            except MetadataVersionConflict:
                continue
            assert version > found.version
            won[index] += 1

    in_threads(6, count)
    found = stores[1].get("counter")
    assert int(found.value.split()[0]) == sum(won)
    assert sum(won) >= 200


def test_one_of_many_creators_wins(backend: Any) -> None:
    stores = [backend.open() for _ in range(3)]
    won: list[tuple[int, int]] = []

    def create(index: int) -> None:
        for number in range(20):
            try:
                stores[index].put(f"deep/{number % 3}/{number % 5}/node-{number}", b"%d" % index, NEW)
            except AlreadyExists:
                continue
            won.append((number, index))

    in_threads(3, create)
    assert sorted(number for number, _ in won) == list(range(20))
    for number, index in won:
        assert stores[0].get(f"deep/{number % 3}/{number % 5}/node-{number}")[0] == b"%d" % index


def test_delete_needs_the_version_if_one_is_given(store: MetadataStore) -> None:
    first = store.put("node", b"0", NEW)
    second = store.put("node", b"1", first)
    for version in (0, first, second + 1):
        with pytest.raises(MetadataVersionConflict):
            store.delete("node", version)
    store.delete("node", second)
    assert store.get("node") is None
    for expected in (None, 0):
        with pytest.raises(NotFound):
            store.delete("node", expected)


def test_a_node_with_children_is_not_deleted(store: MetadataStore) -> None:
    store.put("parent/child", b"", NEW)
    with pytest.raises(Conflict):
        store.delete("parent")
    assert store.get("parent/child") is not None
    with pytest.raises(UsageError):
        store.delete("")


def test_prune_removes_parents_up_to_the_first_non_empty_one(store: MetadataStore) -> None:
    store.put("a/b/c/d/leaf", b"", NEW)
    store.put("a/b/other", b"", NEW)
    store.delete("a/b/c/d/leaf", prune=4)
    assert store.children("a/b") == ["other"]
    store.put("a/b/c/d/leaf", b"", NEW)
    store.delete("a/b/c/d/leaf", prune=1)
    assert store.children("a/b/c") == []
    store.delete("a/b/other", prune=0)
    store.delete("a/b/c", prune=9)
    assert "a" not in (store.children("") or [])
    assert store.children("") is not None


def test_creates_and_prunes_in_one_directory_lose_nothing(backend: Any) -> None:
    """A parent that somebody prunes between two steps of a create does not make the create fail."""
    stores = [backend.open() for _ in range(3)]

    def churn(index: int) -> None:
        for number in range(40):
            path = f"scopes/0000/0007/L{index}{number:03d}"
            stores[index].put(path, b"x", NEW)
            assert stores[index].get(path) is not None
            stores[index].delete(path, prune=2)

    stores[0].put("scopes", b"", NEW)
    in_threads(3, churn)
    assert stores[0].children("scopes") in ([], ["0000"])


def test_children_are_sorted_and_can_be_paged(store: MetadataStore) -> None:
    names = ["L0009", "L0010", "a", "ä", "Z", "readonly", "127.0.0.1:3181"]
    for name in names:
        store.put(f"directory/{name}", b"", NEW)
    store.put("directory/a/below", b"", NEW)
    assert store.children("directory") == sorted(names)
    assert store.children("directory", limit=2) == sorted(names)[:2]
    assert store.children("directory", after="L0010", limit=2) == ["Z", "a"]
    assert store.children("directory", after="L00") == sorted(names)[1:]
    assert store.children("directory", after="ä") == []
    assert store.children("directory/Z") == []
    assert store.children("missing") is None
    assert store.children("directory/missing/x") is None


def test_children_without_a_valid_name_are_left_out_and_noted(
    store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs can create such nodes: one of them must not end every command that lists its parent."""
    long = "n" * (PATH_LENGTH_MAX - len("cookies"))
    invalid = [long]
    with monkeypatch.context() as unchecked:
        unchecked.setattr("bkctl.metadata.store.PATH_LENGTH_MAX", 2 * PATH_LENGTH_MAX)
        if "sqlite" in type(store).__module__ or "etcd" in type(store).__module__:  # ZooKeeper refuses these itself
            unchecked.setattr("bkctl.metadata.store._UNPRINTABLE", re.compile("(?!)"))
            unchecked.setattr("bkctl.metadata.store._RESERVED_NAMES", frozenset())
            invalid = ["..", "b\n", "b\x1b", long]
        for name in ("a", *invalid, "z"):
            store.put(f"cookies/{name}", b"", NEW)
    assert store.children("cookies") == ["a", "z"]
    assert store.children("cookies", after="a", limit=1) == ["z"]
    assert store.children("cookies", limit=2) == ["a", "z"]
    assert list(store.children_many(["cookies", "missing"])) == [["a", "z"], None]
    assert [value is not None for value in store.get_many(f"cookies/{name}" for name in ("a", "z"))] == [True, True]
    assert sorted(store.invalid_names) == sorted(f"cookies/{name}"[:PATH_LENGTH_MAX] for name in invalid)


def test_get_many_keeps_order_with_missing_nodes_in_place(store: MetadataStore) -> None:
    for number in range(0, 300, 2):
        store.put(f"many/{number}", b"%d" % number, NEW)
    found = list(store.get_many(f"many/{number}" for number in range(300)))
    assert [None if one is None else one.value for one in found] == [
        b"%d" % number if number % 2 == 0 else None for number in range(300)
    ]
    listed = list(store.children_many(["many", "missing", "many/0", ""]))
    assert listed[0] == store.children("many")
    assert listed[1:3] == [None, []]
    assert list(store.get_many([])) == []
    paths = [f"tree/{number:02}" for number in range(60)]
    for number in range(0, 60, 3):
        for name in ("b", "a", "c/d"):
            store.put(f"{paths[number]}/{name}", b"", NEW)
        store.put(paths[number + 1], b"", NEW)
    assert list(store.children_many(paths)) == [["a", "b", "c"], [], None] * 20


def test_get_many_reads_a_bounded_number_ahead(store: MetadataStore) -> None:
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield "missing"

    results = store.get_many(endless())
    assert [next(results) for _ in range(3)] == [None, None, None]
    assert asked <= 1000


def test_put_all_creates_all_or_none(store: MetadataStore) -> None:
    store.put_all([("a", b"1"), ("a/b", b"2"), ("c", b"3")])
    assert [found.value for found in store.get_many(["a", "a/b", "c"]) if found] == [b"1", b"2", b"3"]
    with pytest.raises(AlreadyExists):
        store.put_all([("new", b""), ("c", b"other"), ("newer", b"")])
    assert store.get("new") is None
    assert store.get("newer") is None
    assert store.get("c")[0] == b"3"  # type: ignore[index]


def test_sequence_gives_each_number_to_one_client(backend: Any) -> None:
    stores = [backend.open() for _ in range(3)]
    taken: list[list[int]] = [[], [], []]

    def take(index: int) -> None:
        taken[index] += [stores[index].sequence("idgen") for _ in range(25)]

    in_threads(3, take)
    assert all(numbers == sorted(numbers) for numbers in taken)
    assert sorted(number for numbers in taken for number in numbers) == list(range(75))
    assert stores[0].sequence("other") == 0


def test_an_ephemeral_lives_as_long_as_its_store(backend: Any) -> None:
    owner, other = backend.open(), backend.open()
    owner.ephemeral("available/bookie-1", b"info")
    assert other.get("available/bookie-1").value == b"info"
    owner.ephemeral("available/bookie-1", b"newer info")
    assert other.get("available/bookie-1").value == b"newer info"
    owner.ephemeral("available/bookie-2", b"")
    owner.delete("available/bookie-2")
    assert other.children("available") == ["bookie-1"]
    owner.close()
    assert other.children("available") == []


def test_ephemeral_without_value_only_waits_for_another_owner(backend: Any) -> None:
    first, second = backend.open(), backend.open()
    second.ephemeral("available/bookie-1", None)
    assert first.get("available/bookie-1") is None
    first.ephemeral("available/bookie-1", b"first")
    first.ephemeral("available/bookie-1", None)
    with pytest.raises(AlreadyExists):
        second.ephemeral("available/bookie-1", None, wait_s=0.2)
    assert first.get("available/bookie-1").value == b"first"
    first.close()
    second.ephemeral("available/bookie-1", None, wait_s=60)
    assert second.get("available/bookie-1") is None


def test_ephemeral_waits_for_another_owner(backend: Any) -> None:
    first, second = backend.open(), backend.open()
    first.ephemeral("available/bookie-1", b"first")
    with pytest.raises(AlreadyExists):
        second.ephemeral("available/bookie-1", b"second", wait_s=0.2)
    timer = threading.Timer(0.3, first.close)
    timer.start()
    second.ephemeral("available/bookie-1", b"second", wait_s=60)
    timer.join()
    assert second.get("available/bookie-1").value == b"second"


def test_ephemeral_never_replaces_a_persistent_node(store: MetadataStore) -> None:
    store.put("available/bookie-1", b"persistent", NEW)
    with pytest.raises(AlreadyExists):
        store.ephemeral("available/bookie-1", b"", wait_s=0.1)
    assert store.get("available/bookie-1")[0] == b"persistent"  # type: ignore[index]


def test_watch_reports_each_change_until_cancelled(backend: Any) -> None:
    writer, watcher = backend.open(), backend.open()
    seen: list[bytes | None] = []

    def look() -> None:
        found = watcher.get("node")
        seen.append(None if found is None else found.value)

    cancel = watcher.watch("node", look)
    version = writer.put("node", b"0", NEW)
    eventually(lambda: seen and seen[-1] == b"0")
    writer.put("node", b"1", version)
    eventually(lambda: seen[-1] == b"1")
    writer.delete("node")
    eventually(lambda: seen[-1] is None)
    writer.put("node", b"again", NEW)
    eventually(lambda: seen[-1] == b"again")
    cancel()
    after_cancel: list[bytes] = []
    watcher.watch("node", lambda: after_cancel.append(b""))
    seen_count = len(seen)
    writer.put("node", b"unseen", None)
    eventually(lambda: after_cancel)
    assert len(seen) == seen_count


def test_watch_of_children_reports_created_and_deleted_ones(backend: Any) -> None:
    writer, watcher = backend.open(), backend.open()
    seen: list[list[str] | None] = []
    watcher.watch("available", lambda: seen.append(watcher.children("available")), children=True)
    writer.ephemeral("available/bookie-1", b"")
    eventually(lambda: seen and seen[-1] == ["bookie-1"])
    writer.put("available/bookie-2", b"", NEW)
    eventually(lambda: seen[-1] == ["bookie-1", "bookie-2"])
    writer.close()
    eventually(lambda: seen[-1] == ["bookie-2"])


def test_every_call_after_close_is_unreachable(backend: Any) -> None:
    store = backend.open()
    store.put("node", b"", NEW)
    store.close()
    store.close()
    with pytest.raises(Unreachable):
        store.get("node")
    with pytest.raises(Unreachable):
        store.put("node", b"", None)


@pytest.mark.parametrize("path", ["/.", "/a/../b", "/..", "/a//b", "/a/", "/a\x01"])
def test_malformed_path_of_another_program_is_refused(store: MetadataStore, path: str) -> None:
    with pytest.raises(UsageError, match="Not a path of the metadata store"):
        store.get(AbsolutePath(path))


@pytest.mark.parametrize("path", ["/", "/node", "node/", "a//b", ".", "a/../b", "a\0b", "a\nb", "x" * 2000, "\ud800"])
def test_malformed_path_is_refused(store: MetadataStore, path: str) -> None:
    with pytest.raises(UsageError):
        store.get(path)
    with pytest.raises(UsageError):
        store.put(path, b"", NEW)
    with pytest.raises(UsageError):
        store.children(path)


def test_racks_are_a_node_beside_the_root(store: MetadataStore) -> None:
    try:
        store.put(RACKS, b"{}", NEW)
        with pytest.raises(AlreadyExists):
            store.put(RACKS, b"x", NEW)
        found = store.get(RACKS)
        assert found is not None
        assert found.value == b"{}"
        assert [each is None for each in store.get_many([RACKS, "node", RACKS])] == [False, True, False]
        store.put(RACKS, b"[]", found.version)
        with pytest.raises(MetadataVersionConflict):
            store.put(RACKS, b"x", found.version)
        names = [name for name in store.children("") or [] if name != "ledgers"]  # HBase's table
        assert names == (["bookies"] if store.name.startswith("metadata store") else [])
    finally:
        store.delete(RACKS)
    assert store.get(RACKS) is None


def test_too_large_value_is_refused_before_it_is_sent(store: MetadataStore) -> None:
    with pytest.raises(UsageError):
        store.put("node", bytes(VALUE_SIZE_BYTES_MAX + 1), NEW)
    store.put("node", bytes(VALUE_SIZE_BYTES_MAX // 2), NEW)
    assert len(store.get("node").value) == VALUE_SIZE_BYTES_MAX // 2  # type: ignore[union-attr]


def test_failed_callback_is_called_again(backend: Any) -> None:
    writer, watcher = backend.open(), backend.open()
    calls: list[str] = []

    def fail_twice() -> None:
        calls.append("called")
        if len(calls) <= 2:
            raise Unreachable("away for a moment")

    watcher.watch("node", fail_twice)
    others: list[str] = []
    watcher.watch("node", lambda: others.append("called"))
    version = writer.put("node", b"", NEW)
    eventually(lambda: len(calls) >= 3 and others)
    before = len(calls), len(others)
    writer.put("node", b"", version)
    eventually(lambda: len(calls) > before[0] and len(others) > before[1])


def test_claim_is_held_until_released(store: MetadataStore, backend: Any) -> None:
    claim = store.claim("locks/one", b"us")
    assert (claim.path, claim.is_held()) == ("locks/one", True)
    found = store.get("locks/one")
    assert found is not None
    assert found.value == b"us"
    for each in (store, backend.open()):
        with pytest.raises(AlreadyExists):
            each.claim("locks/one", b"others")
    claim.release()
    claim.release()
    assert not claim.is_held()
    assert store.get("locks/one") is None
    # Whoever has it now keeps it, whatever was ours once: other sessions, and later claims of our own.
    other_store = backend.open()
    other = other_store.claim("locks/one", b"us")
    claim.release()
    assert other.is_held()
    assert not claim.is_held()
    other_store.close()
    again = store.claim("locks/one", b"us")
    claim.release()
    assert again.is_held()


def test_claim_many_makes_each_claim_on_its_own(store: MetadataStore, backend: Any) -> None:
    paths = [f"locks/{number:03d}" for number in range(100)]
    for some in (paths, paths[::-1]):
        ours = [claim for claim in store.claim_many(some, b"us") if isinstance(claim, Claim)]
        assert [claim.path for claim in ours] == some
        assert store.held_many(ours) == [True] * 100
        store.release_many(ours)
        assert store.held_many(ours) == [False] * 100
        assert store.children("locks") == []
    other = backend.open()
    theirs = other.claim(paths[3], b"them")
    found = store.claim_many(paths, b"us")
    ours = [claim for claim in found if isinstance(claim, Claim)]
    assert [claim.path for claim in ours] == [*paths[:3], *paths[4:]]
    assert isinstance(found[3], AlreadyExists)
    # A node taken from us belongs to its new owner, and stays when we release ours.
    store.delete(paths[5])
    taken = other.claim(paths[5], b"them")
    assert store.held_many(ours) == [claim.path != paths[5] for claim in ours]
    store.release_many(ours)
    store.release_many(ours)
    assert other.held_many([theirs, taken]) == [True, True]
    assert store.children("locks") == [each.path.rpartition("/")[2] for each in (theirs, taken)]


def test_claims_end_with_their_store(store: MetadataStore, backend: Any) -> None:
    owner = backend.open()
    for path in ("locks/one", "locks/two"):
        owner.claim(path, b"")
    owner.close()
    assert store.children("locks") == []


def test_numbered_claims_ascend_across_sessions(store: MetadataStore, backend: Any) -> None:
    stores = [store, backend.open()]
    claims = [stores[count % 2].claim("election/V_", b"%d" % count, numbered=True) for count in range(6)]
    names = [claim.path for claim in claims]
    assert names == sorted(names)
    assert all(len(name) == len("election/V_0000000000") for name in names)
    assert store.children("election") == [name.rpartition("/")[2] for name in names]
    for claim in claims[::2]:
        claim.release()
    later = stores[1].claim("election/V_", b"later", numbered=True)
    assert later.path > names[-1]
    assert store.children("election") == [name.rpartition("/")[2] for name in (*names[1::2], later.path)]
    store.put("election", b"who won", None)
    assert stores[1].claim("election/V_", b"last", numbered=True).path > later.path


def test_concurrent_numbered_claims_get_distinct_numbers(store: MetadataStore, backend: Any) -> None:
    stores = [store, *(backend.open() for _ in range(2))]
    with ThreadPoolExecutor(6) as executor:
        claims = list(
            executor.map(lambda at: stores[at % 3].claim("election/V_", b"%d" % at, numbered=True), range(18))
        )
    assert len({claim.path for claim in claims}) == 18
    assert all(claim.is_held() for claim in claims)
    assert store.children("election") == sorted(claim.path.rpartition("/")[2] for claim in claims)
