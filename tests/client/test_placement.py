"""The bookies of ensembles, and their replacements, with and without racks."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.client.placement import (
    DEFAULT_RACK,
    Adherence,
    Placement,
    PlacementRules,
    PolicyKind,
    capped_weights,
    choose_ensemble,
    choose_replacements,
    mend_placement,
)
from bkctl.config import ClientConfig, read_properties, settings_of
from bkctl.errors import NotEnoughBookies, Unsupported, UsageError
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


def adheres(placement: Placement, ensemble: Sequence[str], write_quorum_size: int, ack_quorum_size: int = 1) -> bool:
    metadata = LedgerMetadata(
        len(ensemble), write_quorum_size, ack_quorum_size, DigestType.CRC32C, b"", (Fragment(0, tuple(ensemble)),)
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


def test_replacements_are_no_bookies_of_the_ensemble_nor_excluded_ones() -> None:
    there, ensemble = bookies([f"b{at}" for at in range(6)]), ("b0", "b1", "b2")

    def replaced(indexes: list[int], of: list[RegisteredBookie] = there, **options: set[str]) -> dict[int, str]:
        return choose_replacements(ensemble, indexes, 2, of, ANYWHERE, scoped=True, **options)

    assert replaced([1])[1] in {"b3", "b4", "b5"}
    assert replaced([]) == {}
    chosen = replaced([0, 2], exclude={"b3"})
    assert {*chosen} == {0, 2}
    assert {*chosen.values()} == {"b4", "b5"}
    with pytest.raises(NotEnoughBookies, match="in use or failed: b0, b1, b2"):
        replaced([0, 2], there[:4])


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


def domains(count: int, width: int, prefix: str) -> dict[str, str]:
    """`count` regions or zones a, b, … with `width` bookies in racks of their own: a1, a2, …, b1, …"""
    return {
        f"{name}{at}": f"/{prefix}{name}/r{at}" for name in "abcdef"[:count] for at in range(1, width + 1)
    }  # fmt: skip


def regions(**settings: Any) -> PlacementRules:
    policy = "org.apache.bookkeeper.client.RegionAwareEnsemblePlacementPolicy"
    return PlacementRules.of(ClientConfig(ensemble_placement_policy=policy, **settings))


def zones(least: int = 2, desired: int = 3, **settings: Any) -> PlacementRules:
    policy = "org.apache.bookkeeper.client.ZoneawareEnsemblePlacementPolicy"
    return PlacementRules.of(ClientConfig(
        ensemble_placement_policy=policy, min_num_zones_per_write_quorum=least,
        desired_num_zones_per_write_quorum=desired, **settings,
    ))  # fmt: skip


def durable(least: int, names: str = "abcde", **settings: Any) -> PlacementRules:
    return regions(
        repp_regions_to_write=";".join(f"r{name}" for name in names),
        repp_minimum_regions_for_durability=least,
        **settings,
    )


def spread_of(ensemble: Iterable[str]) -> list[int]:
    """The number of bookies in each region or zone, the largest first."""
    return sorted(Counter(name[0] for name in ensemble).values(), reverse=True)


@pytest.mark.parametrize(
    ("rules", "racks", "shape", "spread"),
    [
        (regions(), domains(4, 2, "r"), (4, 2, 2), [1, 1, 1, 1]),  # testNewEnsembleWithEnoughRegions
        (regions(), domains(1, 4, "r"), (3, 2, 2), [3]),  # testNewEnsembleWithSingleRegion
        (durable(2), domains(3, 4, "r"), (6, 6, 4), [2, 2, 2]),  # testNewEnsembleWithThreeRegions
        (durable(2), domains(3, 4, "r"), (9, 9, 6), [3, 3, 3]),
        (durable(5), domains(5, 3, "r"), (10, 10, 10), [2, 2, 2, 2, 2]),  # testNewEnsembleWithFiveRegions
        (durable(1, "abc"), domains(1, 9, "r"), (6, 6, 4), [6]),  # testEnsembleMinDurabilityOne
        (zones(1, 1), domains(6, 1, "z"), (6, 3, 2), [1, 1, 1, 1, 1, 1]),  # testNotEnoughRWBookies
        (zones(2, 4), domains(6, 1, "z"), (3, 3, 2), [1, 1, 1]),  # testEnoughRWBookies
        (zones(3, 4), domains(3, 2, "z"), (4, 4, 2), [2, 1, 1]),  # testMinZonesPerWriteQuorum
    ],
)  # fmt: skip
def test_new_ensembles_span_regions_and_zones(
    rules: PlacementRules, racks: dict[str, str], shape: tuple[int, int, int], spread: list[int]
) -> None:
    for seed in range(5):
        placement = Placement(racks, rules)
        size, write, ack = shape
        chosen = choose_ensemble(
            bookies(racks), size, write, placement, scoped=False, ack_quorum_size=ack, rng=random.Random(seed)
        )
        assert spread_of(chosen) == spread
        assert adheres(placement, chosen, write, ack)


@pytest.mark.parametrize(
    ("rules", "racks", "shape", "error"),
    [
        (durable(5), domains(4, 2, "r"), (5, 5, 5), NotEnoughBookies),  # testNewEnsembleFailWithFiveRegions
        (durable(2), domains(1, 6, "r"), (3, 3, 3), NotEnoughBookies),
        (durable(3), domains(3, 3, "r"), (3, 3, 2), UsageError),
        (durable(2), domains(3, 3, "r"), (4, 4, 2), UsageError),
        (regions(), domains(4, 1, "r"), (5, 5, 3), NotEnoughBookies),  # testNewEnsembleBookieWithNotEnoughBookies
        (zones(), domains(1, 6, "z"), (3, 3, 2), NotEnoughBookies),
        (zones(), dict.fromkeys("ab", "/z1/u1") | {"c": "/z2/u1"}, (3, 3, 2), NotEnoughBookies),
        (zones(), dict.fromkeys("abc", "/z1"), (3, 3, 2), NotEnoughBookies),
        (zones(3, 4), domains(6, 2, "z"), (4, 3, 2), UsageError),
        (zones(3, 4), domains(6, 2, "z"), (3, 3, 2), UsageError),
    ],
)  # fmt: skip
def test_ensembles_that_a_policy_cannot_have_are_refused(
    rules: PlacementRules, racks: dict[str, str], shape: tuple[int, int, int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        choose_ensemble(
            bookies(racks), shape[0], shape[1], Placement(racks, rules), scoped=False, ack_quorum_size=shape[2]
        )


def test_zones_that_are_not_strict_are_any() -> None:
    chosen = choose_ensemble(
        bookies("abcd"), 4, 3, Placement({}, zones(enforce_strict_zoneaware_placement=False)), scoped=False
    )
    assert sorted(chosen) == list("abcd")


#: TestZoneawareEnsemblePlacementPolicy.testIsEnsembleAdheringToPlacementPolicy
ZONES = {
    "1": "/z1/u1", "2": "/z1/u2", "3": "/z1/u2", "4": "/z2/u1", "5": "/z2/u2", "6": "/z2/u2", "7": "/z3/u1",
    "8": "/z3/u2", "9": "/z3/u2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("ensemble", "write_quorum_size", "adherence"),
    [
        ("123", 3, Adherence.FAIL), ("124", 3, Adherence.SOFT), ("147", 3, Adherence.STRICT), ("14", 2, Adherence.FAIL),
        ("234", 3, Adherence.FAIL), ("147x", 4, Adherence.FAIL), ("14789", 5, Adherence.STRICT),
        ("147289", 3, Adherence.FAIL), ("149287", 3, Adherence.FAIL), ("149278", 3, Adherence.SOFT),
    ],
)  # fmt: skip
def test_zones_adhere_as_apaches(ensemble: str, write_quorum_size: int, adherence: Adherence) -> None:
    metadata = LedgerMetadata(len(ensemble), write_quorum_size, 2, DigestType.CRC32C, b"", ())
    assert Placement(ZONES, zones()).adherence(metadata, ensemble) is adherence


def test_a_region_that_holds_an_ack_quorum_is_a_problem() -> None:
    racks = domains(3, 3, "r")
    metadata = LedgerMetadata(
        3, 3, 2, DigestType.CRC32C, b"", (Fragment(0, ("a1", "b1", "c1")), Fragment(5, ("a1", "a2", "b1")))
    )
    placement = Placement(racks, durable(2, "abc"))
    assert placement.adherence(metadata, ("a1", "b1", "c1")) is Adherence.STRICT
    assert placement.adherence(metadata, ("a1", "a2", "b1")) is Adherence.FAIL
    problem = placement.ledger_problem(metadata)
    assert problem is not None
    assert problem.startswith("from entry 5, the write set a1, a2, b1 has 2 bookies in ra")
    assert Placement(racks, regions()).adherence(metadata, ("a1", "a2", "a3")) is Adherence.SOFT


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (durable(3, "abc"), None),  # testEnsembleWithThreeRegionsReplace
        (durable(1, "abc", repp_enable_durability_enforcement_in_replace=False), "ac"),
        (durable(3, "abc", repp_enable_durability_enforcement_in_replace=False), "ac"),
    ],
)
def test_replacements_come_from_the_same_region(rules: PlacementRules, expected: str | None) -> None:
    racks, ensemble = domains(3, 3, "r"), ("a1", "a2", "b1", "b2", "c1", "c2")

    def replaced(exclude: Collection[str] = ()) -> str:
        return choose_replacements(
            ensemble, [2], 6, bookies(racks), Placement(racks, rules), scoped=False, ack_quorum_size=5, exclude=exclude
        )[2]

    assert replaced() == "b3"
    if expected is None:
        with pytest.raises(NotEnoughBookies, match="3 regions"):
            replaced(["b3"])
    else:
        assert replaced(["b3"])[0] in expected


@pytest.mark.parametrize(
    ("rules", "ensemble", "write", "ack", "moved"),
    [
        (durable(2, "abc"), ("a1", "a2", "b1"), 3, 2, 1),
        (zones(), ("a1", "a2", "a3"), 3, 2, 1),
        (zones(), ("a1", "b1", "c1"), 3, 2, 0),
    ],
)
def test_ensembles_are_mended_by_any_policy(
    rules: PlacementRules, ensemble: tuple[str, ...], write: int, ack: int, moved: int
) -> None:
    placement = Placement(domains(3, 3, "z"), rules)
    found = mend_placement(
        ensemble, write, bookies(placement.racks), placement, scoped=False, ack_quorum_size=ack, rng=random.Random(1)
    )
    if moved:
        assert len(found) == moved
    mended = [found.get(at, name) for at, name in enumerate(ensemble)]
    assert adheres(placement, mended, write, ack)


def test_the_first_bookie_is_in_the_own_rack_or_region() -> None:
    racks = domains(3, 2, "r")
    for seed, rules in enumerate([PlacementRules(), regions()] * 5):
        placement = Placement(racks, rules, local="/rb/r1")
        chosen = choose_ensemble(bookies(racks), 3, 2, placement, scoped=False, rng=random.Random(seed))
        assert chosen[0] == "b1"


@pytest.mark.parametrize("racks", [{}, {"a": "/r1", "b": "/r1", "c": "/r2", "d": "/r2"}])
def test_bookies_with_more_free_space_are_chosen_more_often(racks: dict[str, str]) -> None:
    weights = capped_weights({"a": 100, "b": 100, "c": 100, "d": 1000}, 3)
    assert weights["d"] == 300
    rng = random.Random(1)
    placement = Placement(racks, weights=weights)
    counts = Counter(
        choose_ensemble(bookies("abcd"), 1, 1, placement, scoped=False, rng=rng)[0] for _ in range(2000)
    )  # fmt: skip
    assert 850 < counts["d"] < 1150  # 300 of 600
    assert all(230 < counts[name] < 440 for name in "abc")


def test_weights_are_capped_only_with_a_multiple_and_unknown_ones_are_the_least() -> None:
    assert capped_weights({"a": 1, "b": 1000}, 0) == {"a": 1, "b": 1000}
    placement = Placement(weights={"a": 1000, "b": 0})
    rng = random.Random(1)
    counts = Counter(choose_ensemble(bookies("ab"), 1, 1, placement, scoped=False, rng=rng)[0] for _ in range(400))
    assert 140 < counts["a"] < 260


def test_a_rack_of_bookies_without_free_space_is_chosen_as_rarely_as_the_fullest() -> None:
    racks = {"a": "/r1", "b": "/r2", "c": "/r3"}
    placement = Placement(racks, weights={"a": 1000, "b": 10, "c": 0})
    rng = random.Random(1)
    counts = Counter(
        choose_ensemble(bookies("abc"), 1, 1, placement, scoped=False, rng=rng)[0] for _ in range(400)
    )  # fmt: skip
    assert counts["b"] + counts["c"] < 40


@pytest.mark.parametrize(
    ("size", "secondary", "inside"),
    [(2, "", "ab"), (3, "s", "abc"), (4, "s", "abcx"), (2, "s", "ab"), (3, "", "abx")],
)
def test_isolation_groups_bound_the_bookies(size: int, secondary: str, inside: str) -> None:
    groups = {"p": {"a", "b"}, "s": {"c"}, "default": {"d", "e", "a"}}
    rules = PlacementRules(isolation=(frozenset("p"), frozenset(secondary)))
    placement = Placement(rules=rules, groups=groups)
    for seed in range(10):
        chosen = choose_ensemble(bookies("abcdex"), size, 1, placement, scoped=False, rng=random.Random(seed))
        assert set(chosen) <= set(inside)


POLICY = "ensemblePlacementPolicy=org.apache"


@pytest.mark.parametrize(
    ("conf", "rules"),
    [
        ("", {}),
        (f"{POLICY}.bookkeeper.client.DefaultEnsemblePlacementPolicy", {"kind": PolicyKind.RANDOM}),
        (f"{POLICY}.pulsar.bookie.rackawareness.IsolatedBookieEnsemblePlacementPolicy\nisolationBookieGroups=g1,g2",
         {"isolation": (frozenset(("g1", "g2")), frozenset())}),
        (f"isolationBookieGroups=g1\n{POLICY}.bookkeeper.client.RackawareEnsemblePlacementPolicy", {}),
        ("bookkeeperClientRackawarePolicyEnabled=false", {"kind": PolicyKind.RANDOM}),
        ("bookkeeperClientRegionawarePolicyEnabled=true\nreppRegionsToWrite=r1;r2;r3\nreppMinimumRegionsForDurability=3",
         {"kind": PolicyKind.REGIONS, "region_count_min": 3}),
        ("bookkeeperClientIsolationGroups=g1,g2\nbookkeeperClientSecondaryIsolationGroups=g3",
         {"isolation": (frozenset(("g1", "g2")), frozenset(("g3",)))}),
        ("bookkeeperClientMinNumRacksPerWriteQuorum=3\nbookkeeperClientEnforceMinNumRacksPerWriteQuorum=true",
         {"count_min": 3, "is_enforced": True}),
        ("bookkeeper_minNumRacksPerWriteQuorum=4", {"count_min": 4}),
    ],
)  # fmt: skip
def test_names_of_java_and_of_a_broker_are_read(tmp_path: Path, conf: str, rules: dict[str, Any]) -> None:
    file = tmp_path / "broker.conf"
    file.write_text(conf)
    found = PlacementRules.of(ClientConfig.from_properties(read_properties(file)))
    assert found == PlacementRules()._replace(**rules)


@pytest.mark.parametrize(
    ("conf", "error", "name"),
    [
        ({"ensemble_placement_policy": "com.acme.RackawareEnsemblePlacementPolicy"}, Unsupported, "com.acme.Rackaware"),
        ({"ensemble_placement_policy": "org.apache.bookkeeper.bookie.LocalBookieEnsemblePlacementPolicy"}, Unsupported,
         "LocalBookieEnsemblePlacementPolicy"),
        ({"repp_dns_resolver_class": "com.acme.Resolver"}, Unsupported, "reppDnsResolverClass=com.acme.Resolver"),
        ({"regionaware_policy_enabled": True, "repp_regions_to_write": "r1"}, UsageError, "fewer than"),
        ({"ensemble_placement_policy": "org.apache.bookkeeper.client.ZoneawareEnsemblePlacementPolicy",
          "min_num_zones_per_write_quorum": 4}, UsageError, "minNumZonesPerWriteQuorum=4"),
    ],
)  # fmt: skip
def test_policies_that_are_not_supported_are_refused_by_name(
    conf: dict[str, Any], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=re.escape(name)):
        PlacementRules.of(ClientConfig(**conf))


@pytest.mark.parametrize(
    ("conf", "waits_s"),
    [
        ({}, [2.0, 2.0, 2.0]),
        ({"speculative_read_timeout": 0}, [None, None, None]),
        ({"first_speculative_read_timeout": 100, "max_speculative_read_timeout": 300}, [0.1, 0.2, 0.3]),
    ],
)
def test_speculative_reads_wait_as_apaches(conf: dict[str, Any], waits_s: list[float | None]) -> None:
    assert [ClientConfig(**conf).speculative_read_s(count) for count in range(3)] == waits_s


@st.composite
def located(draw: st.DrawFn) -> tuple[PlacementRules, dict[str, str], int, int, int]:
    """A policy of regions or zones, bookies with locations, and sizes of ensemble, write and ack quorum."""
    names = [f"b{at}" for at in range(draw(st.integers(2, 6)))]
    places = [f"/{domain}/{rack}" for domain in "xyz" for rack in "12"]
    racks = {name: draw(st.sampled_from(places)) for name in names}
    size = draw(st.integers(1, min(len(names), 5)))
    write = draw(st.integers(1, size))
    least = draw(st.integers(1, 2))
    rules = draw(st.sampled_from([regions(), durable(least, "xyz"), zones(least)]))
    return rules, racks, size, write, draw(st.integers((write + 1) // 2, write))


@given(located(), st.integers(0, 1 << 16))
def test_ensembles_adhere_to_regions_and_zones_as_well_as_any_does(
    case: tuple[PlacementRules, dict[str, str], int, int, int], seed: int
) -> None:
    rules, racks, size, write, ack = case
    placement = Placement(racks, rules)
    metadata = LedgerMetadata(size, write, ack, DigestType.CRC32C, b"", ())
    best = max(placement.adherence(metadata, each) for each in permutations(racks, size))
    try:
        chosen = choose_ensemble(
            bookies(racks), size, write, placement, scoped=False, ack_quorum_size=ack, rng=random.Random(seed)
        )
    except UsageError:
        return  # The policy allows no ensemble of that shape.
    except NotEnoughBookies:
        assert best is Adherence.FAIL
        return
    assert placement.adherence(metadata, chosen) is best


def test_every_setting_of_a_client_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    keys = [key for keys, _ in settings_of(ClientConfig) for key in keys if "_" not in key]
    assert [key for key in keys if f"`{key}`" not in page and f"`{key}:" not in page] == []
