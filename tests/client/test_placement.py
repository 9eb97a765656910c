"""The bookies of ensembles, and their replacements, with and without racks."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.client.placement import (
    DEFAULT_RACK,
    Placement,
    PlacementRules,
    choose_ensemble,
    choose_replacements,
    mend_placement,
    replace_bookies,
)
from bkctl.errors import NotEnoughBookies
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Fragment, LedgerMetadata
from bkctl.metadata.cluster import RegisteredBookie

ENFORCED = PlacementRules(2, is_enforced=True)
ANYWHERE = Placement()


def bookies(
    names: Iterable[str], *, plain: Collection[str] = (), read_only: Collection[str] = ()
) -> list[RegisteredBookie]:
    return [
        RegisteredBookie(
            name,
            "ro" if name in read_only else "rw",
            BookieServiceInfo((), {} if name in plain else {"ledgerScopes": "1"}),
        )
        for name in names
    ]


def adheres(placement: Placement, ensemble: Sequence[str], write_quorum_size: int) -> bool:
    metadata = LedgerMetadata(
        len(ensemble), write_quorum_size, 1, DigestType.CRC32C, b"", (Fragment(0, tuple(ensemble)),)
    )
    return not placement.problems(metadata, ensemble)


def is_striped(
    ensemble: Sequence[str], write_quorum_size: int, racks: Mapping[str, str], rules: PlacementRules
) -> bool:
    """The rule as Apache's policy words it, without any code of ours."""
    doubled = [racks.get(bookie_id, DEFAULT_RACK) for bookie_id in ensemble] * 2
    quorums = [set(doubled[at : at + write_quorum_size]) for at in range(len(ensemble))]
    needed = min(rules.count_min, write_quorum_size)
    return all(len(each) >= needed and not (rules.is_enforced and DEFAULT_RACK in each) for each in quorums)


@st.composite
def topologies(draw: st.DrawFn) -> tuple[dict[str, str], list[str], int, int, PlacementRules, int]:
    """Racks, bookies (some of them without one), sizes of ensemble and write quorum, rules and a seed."""
    count = draw(st.integers(1, 7))
    names = [f"b{at}:3181" for at in range(count)]
    racks = {name: f"/r{rack}" for name in names if (rack := draw(st.integers(0, 4))) < 4}
    size = draw(st.integers(1, min(count, 6)))
    rules = PlacementRules(draw(st.integers(1, 4)), is_enforced=draw(st.booleans()))
    return racks, names, size, draw(st.integers(1, size)), rules, draw(st.integers(0, 1 << 32))


@given(topologies())
def test_ensembles_adhere_wherever_any_ensemble_does(
    topology: tuple[dict[str, str], list[str], int, int, PlacementRules, int],
) -> None:
    racks, names, size, write_quorum_size, rules, seed = topology
    placement = Placement(racks, rules)
    can = any(is_striped(each, write_quorum_size, racks, rules) for each in permutations(names, size))
    try:
        chosen = choose_ensemble(
            bookies(names), size, write_quorum_size, placement, scoped=True, rng=random.Random(seed)
        )
    except NotEnoughBookies:
        assert rules.is_enforced
        assert not can
        return
    assert len(set(chosen)) == size
    assert adheres(placement, chosen, write_quorum_size) or not (racks or rules.is_enforced) or not can
    if racks or rules.is_enforced:
        assert is_striped(chosen, write_quorum_size, racks, rules) is can


@given(topologies(), st.data())
def test_replacements_adhere_wherever_any_do(
    topology: tuple[dict[str, str], list[str], int, int, PlacementRules, int], data: st.DataObject
) -> None:
    racks, names, size, write_quorum_size, rules, seed = topology
    ensemble = data.draw(st.permutations(names))[:size]
    indexes = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2)))
    placement, others = Placement(racks, rules), [name for name in names if name not in ensemble]

    def replaced(chosen: Sequence[str]) -> list[str]:
        by_index = dict(zip(indexes, chosen, strict=True))
        return [by_index.get(at, name) for at, name in enumerate(ensemble)]

    can = any(
        is_striped(replaced(each), write_quorum_size, racks, rules) for each in permutations(others, len(indexes))
    )
    try:
        chosen = choose_replacements(
            ensemble, indexes, write_quorum_size, bookies(names), placement, scoped=True, rng=random.Random(seed)
        )
    except NotEnoughBookies:
        assert len(others) < len(indexes) or rules.is_enforced
        assert not can
        return
    assert sorted(chosen) == indexes
    assert set(chosen.values()) <= set(others)
    if racks or rules.is_enforced:
        found = is_striped(replaced([chosen[at] for at in indexes]), write_quorum_size, racks, rules)
        assert found is can


@given(topologies())
def test_mending_replaces_as_few_bookies_as_can_be(
    topology: tuple[dict[str, str], list[str], int, int, PlacementRules, int],
) -> None:
    racks, names, size, write_quorum_size, rules, seed = topology
    size = min(size, 5)
    write_quorum_size = min(write_quorum_size, size)
    placement, ensemble = Placement(racks, rules), names[:size]
    if not placement.applies:
        return
    counts = [
        sum(old != new for old, new in zip(ensemble, each, strict=True))
        for each in permutations(names, size)
        if is_striped(each, write_quorum_size, racks, rules)
    ]
    moved = mend_placement(ensemble, write_quorum_size, bookies(names), placement, scoped=True, rng=random.Random(seed))
    assert len(moved) == min(counts, default=0)
    if moved:
        mended = [moved.get(at, name) for at, name in enumerate(ensemble)]
        assert len(set(mended)) == size
        assert is_striped(mended, write_quorum_size, racks, rules)


def test_large_ensembles_are_striped_over_uneven_racks() -> None:
    racks = (
        {f"a{at}": "/a" for at in range(20)}
        | {f"b{at}": "/b" for at in range(11)}
        | {f"c{at}": "/c" for at in range(9)}
    )
    for write_quorum_size, count_min in ((2, 2), (3, 2), (3, 3), (5, 3)):
        placement = Placement(racks, PlacementRules(count_min, is_enforced=True))
        size = 27 if count_min == 3 else 40
        for seed in range(5):
            chosen = choose_ensemble(
                bookies(racks), size, write_quorum_size, placement, scoped=False, rng=random.Random(seed)
            )
            assert is_striped(chosen, write_quorum_size, racks, placement.rules)


def test_an_ensemble_of_the_largest_size_is_chosen() -> None:
    racks = {f"b{at}": f"/r{at % 50}" for at in range(1200)}
    chosen = choose_ensemble(bookies(racks), 1000, 3, Placement(racks), scoped=False)
    assert len(set(chosen)) == 1000
    assert is_striped(chosen, 3, racks, PlacementRules())


def test_without_enough_racks_neighbours_still_differ() -> None:
    racks = {f"b{at}": "/r1" if at < 6 else "/r2" for at in range(8)}
    placement = Placement(racks, PlacementRules(3))
    for seed in range(20):
        chosen = choose_ensemble(bookies(racks), 4, 3, placement, scoped=False, rng=random.Random(seed))
        doubled = [racks[each] for each in chosen] * 2
        assert all(len(set(doubled[at : at + 3])) == 2 for at in range(4))


def test_every_bookie_and_rack_is_chosen_at_times() -> None:
    racks = {f"b{at}": f"/r{at % 3}" for at in range(9)}
    seen = {
        chosen
        for seed in range(100)
        for chosen in choose_ensemble(bookies(racks), 3, 2, Placement(racks), scoped=False, rng=random.Random(seed))
    }
    assert seen == set(racks)


def test_enforced_racks_refuse_in_one_sentence() -> None:
    racks = {"a": "/r1", "b": "/r1", "c": "/r1"}
    with pytest.raises(NotEnoughBookies, match="bookies in 2 racks; the 4 usable bookies are in /r1") as caught:
        choose_ensemble(bookies([*racks, "d"]), 2, 2, Placement(racks, ENFORCED), scoped=False)
    assert "bkctl bookies racks set" in (caught.value.hint or "")
    for names in (["a", "d"], ["d", "e"]):
        with pytest.raises(NotEnoughBookies):
            choose_ensemble(bookies(names), 2, 2, Placement(racks, ENFORCED), scoped=False)


def test_enforced_racks_leave_an_ensemble_no_worse() -> None:
    racks = {"a": "/r1", "b": "/r1", "c": "/r1", "d": "/r2", "e": "/r2"}
    placement = Placement(racks, ENFORCED)
    assert choose_replacements(("a", "d"), [1], 2, bookies(racks), placement, scoped=False) == {1: "e"}
    with pytest.raises(NotEnoughBookies):
        choose_replacements(("a", "d"), [1], 2, bookies(["a", "b", "c"]), placement, scoped=False)
    # This one had both bookies in one rack before.
    assert choose_replacements(("a", "b"), [1], 2, bookies(["a", "b", "c"]), placement, scoped=False) == {1: "c"}


def test_placement_takes_writable_bookies_and_for_a_scope_those_that_serve_scopes() -> None:
    there = bookies([f"b{at}" for at in range(6)], plain={"b0", "b1"}, read_only={"b2"})

    def chosen(count: int, *, scoped: bool, seed: int = 0, avoid: Collection[str] = ()) -> tuple[str, ...]:
        return choose_ensemble(there, count, 1, ANYWHERE, scoped=scoped, avoid=avoid, rng=random.Random(seed))

    seen = set()
    for seed in range(50):
        found = chosen(3, scoped=True, seed=seed)
        assert len(set(found)) == 3
        seen |= set(found)
    assert seen == {"b3", "b4", "b5"}
    assert {each for seed in range(50) for each in chosen(2, scoped=False, seed=seed)} == {"b0", "b1", "b3", "b4", "b5"}
    with pytest.raises(NotEnoughBookies, match="without ledger scopes: b0, b1"):
        chosen(4, scoped=True)
    assert set(chosen(2, scoped=True, avoid={"b4"})) == {"b3", "b5"}
    assert "b4" in chosen(3, scoped=True, avoid={"b4"})


def test_replace_bookies_changes_failed_indexes_only() -> None:
    there = bookies([f"b{at}" for at in range(6)])
    ensemble = ("b0", "b1", "b2")

    def replaced(failed: dict[int, str], of: list[RegisteredBookie] = there, **options: set[str]) -> tuple[str, ...]:
        return replace_bookies(ensemble, failed, 2, of, ANYWHERE, scoped=True, **options)

    changed = replaced({1: "b1"})
    assert (changed[0], changed[2]) == ("b0", "b2")
    assert changed[1] in {"b3", "b4", "b5"}
    assert replaced({1: "b9"}) == ensemble
    assert replaced({0: "b0", 2: "b2"}, exclude={"b3"})[1] == "b1"
    with pytest.raises(NotEnoughBookies, match="in use or failed: b0, b1, b2"):
        replaced({0: "b0", 2: "b2"}, there[:4])


def replacement(
    ensemble: tuple[str, ...],
    indexes: list[int],
    there: list[RegisteredBookie],
    *,
    seed: int = 0,
    scoped: bool = False,
    racks: Mapping[str, str] = {},
    **options: Collection[str],
) -> dict[int, str]:
    placement = Placement(racks)
    return choose_replacements(
        ensemble, indexes, 2, there, placement, scoped=scoped, rng=random.Random(seed), **options
    )


def test_only_writable_bookies_outside_the_ensemble_take_over() -> None:
    there = bookies("abcde", read_only="c")
    for seed in range(20):
        assert replacement(("a", "b", "x"), [2], there, seed=seed, exclude={"d"}) == {2: "e"}
    with pytest.raises(NotEnoughBookies, match="b"):
        replacement(("a", "b", "x"), [2], there, exclude={"d", "e"})


def test_a_scoped_ledger_goes_to_bookies_with_scopes_only() -> None:
    there = bookies("abc", plain="b")
    for seed in range(20):
        assert replacement(("a", "x"), [1], there, seed=seed, scoped=True) == {1: "c"}
    assert {replacement(("a", "x"), [1], there, seed=seed)[1] for seed in range(30)} == {"b", "c"}
    with pytest.raises(NotEnoughBookies, match="without ledger scopes: b"):
        replacement(("a", "x"), [1], there, scoped=True, exclude={"c"})


def test_two_places_get_two_bookies() -> None:
    there = bookies("abcde")
    for seed in range(20):
        chosen = replacement(("x", "a", "y"), [0, 2], there, seed=seed)
        assert set(chosen) == {0, 2}
        assert len({*chosen.values(), "a"}) == 3
    with pytest.raises(NotEnoughBookies):
        replacement(("x", "a", "y"), [0, 2], there[:2])


@pytest.mark.parametrize("racks", [{}, {"a": "/1", "b": "/2", "c": "/3", "x": "/4"}])
def test_suspect_bookies_come_last(racks: dict[str, str]) -> None:
    there = bookies("abc")
    for seed in range(20):
        assert replacement(("x",), [0], there, seed=seed, avoid={"a", "c"}, racks=racks) == {0: "b"}
        assert replacement(("x", "b"), [0], there, seed=seed, avoid={"a", "c"}, racks=racks)[0] in {"a", "c"}


def test_replacements_prefer_free_racks() -> None:
    racks = {"a": "/1", "b": "/2", "c": "/2", "d": "/3", "e": "/4", "x": "/3"}

    def chosen(exclude: Collection[str] = ()) -> set[str]:
        there = bookies("abcde")
        return {
            replacement(("a", "b", "x"), [2], there, seed=seed, racks=racks, exclude=exclude)[2] for seed in range(30)
        }

    assert chosen() == {"d"}  # the rack of the one that left
    assert chosen({"d"}) == {"e"}  # a rack that no other bookie of the ensemble is in
    assert chosen({"d", "e"}) == {"c"}  # rather two in one rack than a replica too few
