"""Chooses the bookies of new ensembles, and replacements in ensembles, by the racks of bookies.

Each write quorum gets bookies in `minNumRacksPerWriteQuorum` racks, or in as many as it has bookies if these are fewer.
Without enough racks, the racks of neighbours differ as far as they can; with `enforceMinNumRacksPerWriteQuorum` such an
ensemble is refused, and bookies without a rack are not used. `/region/rack` is one rack of its own, as in Apache's
rack-aware policy: regions are not weighed against each other.

Source: RackawareEnsemblePlacementPolicyImpl, RRTopologyAwareCoverageEnsemble. Unlike Apache's choice, which takes one
bookie after the other and may end where none fits, this one goes back and tries others. The client's own rack is not
preferred.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.client.ensemble import RoundRobinDistributionSchedule, usable_bookies
from bkctl.errors import NotEnoughBookies
from bkctl.formats.metadata import LedgerMetadata

if TYPE_CHECKING:
    from bkctl.config import BookieConfig
    from bkctl.metadata.cluster import RegisteredBookie

#: The least number of racks of an entry's replicas. Source: ClientConfiguration.getMinNumRacksPerWriteQuorum.
RACK_COUNT_MIN: Final = 2
#: The rack of bookies without one. Source: NetworkTopology.DEFAULT_RACK.
DEFAULT_RACK: Final = "/default-rack"
#: Racks that one search tries beyond a few for each index.
_STEPS_MAX: Final = 1000
#: Sets of indexes that are tried before all bookies of an ensemble may be replaced.
_INDEX_SETS_MAX: Final = 500


class RackRules(NamedTuple):
    """The settings of placement: minNumRacksPerWriteQuorum and enforceMinNumRacksPerWriteQuorum.

    `script` is networkTopologyScriptFileName, the program that prints racks (None: the metadata store's racks only).
    """

    count_min: int = RACK_COUNT_MIN
    is_enforced: bool = False
    script: str | None = None


DEFAULT_RULES: Final = RackRules()


def rack_rules(config: BookieConfig) -> RackRules:
    """Return the settings of placement of a bookie's configuration."""
    return RackRules(
        config.min_num_racks_per_write_quorum,
        config.enforce_min_num_racks_per_write_quorum,
        config.network_topology_script_file_name,
    )


class Placement(NamedTuple):
    """The racks of bookies, by bookie id, and the rules. A bookie that is not in `racks` is in DEFAULT_RACK."""

    racks: Mapping[str, str] = {}
    rules: RackRules = DEFAULT_RULES

    @property
    def applies(self) -> bool:
        """False if any bookies will do: no bookie has a rack, and racks are not enforced."""
        return bool(self.racks) or self.rules.is_enforced

    def rack(self, bookie_id: str) -> str:
        return self.racks.get(bookie_id, DEFAULT_RACK)

    def adheres(self, metadata: LedgerMetadata, bookies: Sequence[str]) -> bool:
        """Return True if every write quorum of the ledger's ensemble `bookies` has enough racks.

        Source: isEnsembleAdheringToPlacementPolicy.
        """
        return not self.applies or not write_sets_in_few_racks(metadata, bookies, self.racks, self.rules)


def write_sets_in_few_racks(
    metadata: LedgerMetadata, bookies: Sequence[str], racks: Mapping[str, str], rules: RackRules
) -> list[tuple[int, ...]]:
    """Return the write sets of the ensemble `bookies` that have too few racks, as ensemble indexes.

    That is fewer than `rules.count_min`, or than the write quorum if that is smaller; where racks are enforced, a
    bookie in DEFAULT_RACK is one too many.
    """
    schedule = RoundRobinDistributionSchedule.of(metadata)
    needed = min(rules.count_min, schedule.write_quorum_size)
    found = []
    for write_set in map(schedule.write_set, range(schedule.ensemble_size)):
        in_racks = {racks.get(bookies[index], DEFAULT_RACK) for index in write_set}
        if len(in_racks) < needed or (rules.is_enforced and DEFAULT_RACK in in_racks):
            found.append(write_set)
    return found


def choose_ensemble(
    bookies: Iterable[RegisteredBookie],
    ensemble_size: int,
    write_quorum_size: int,
    placement: Placement,
    *,
    scoped: bool,
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> tuple[str, ...]:
    """Return the bookies of a new ensemble, chosen at random by the racks. Raises as `usable_bookies`.

    Raises NotEnoughBookies too if racks are enforced, and the usable bookies are in too few. Source: newEnsemble.
    """
    chosen = _fill(
        [None] * ensemble_size, {}, write_quorum_size, bookies, placement, scoped=scoped, avoid=avoid, rng=rng
    )
    return tuple(chosen[index] for index in range(ensemble_size))


def choose_replacements(
    ensemble: Sequence[str],
    indexes: Iterable[int],
    write_quorum_size: int,
    bookies: Iterable[RegisteredBookie],
    placement: Placement,
    *,
    scoped: bool,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> dict[int, str]:
    """Return a replacement for the bookie at each of `indexes`; none is in the ensemble or in `exclude`.

    Of the racks that leave every write quorum with enough racks, one without other bookies of the ensemble is
    preferred, and among these the rack of the bookie that leaves. Raises as `choose_ensemble`. Where racks are
    enforced, replacements may leave as many write quorums with too few racks as there were before.
    Source: replaceBookie.
    """
    former = {index: ensemble[index] for index in indexes}
    kept = [None if index in former else bookie_id for index, bookie_id in enumerate(ensemble)]
    unusable = {*ensemble, *exclude}
    return _fill(
        kept, former, write_quorum_size, bookies, placement, scoped=scoped, exclude=unusable, avoid=avoid, rng=rng
    )


def replace_bookies(
    ensemble: Sequence[str],
    failed: Mapping[int, str],
    write_quorum_size: int,
    bookies: Iterable[RegisteredBookie],
    placement: Placement,
    *,
    scoped: bool,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the ensemble with another bookie at each failed index; `failed` maps an index to its failed bookie.

    An index that holds another bookie by now stays unchanged. No bookie gets two indexes, and none of `failed` or
    `exclude` gets one. Raises as `choose_replacements`. Source: EnsembleUtils.replaceBookiesInEnsemble.
    """
    indexes = [index for index, bookie_id in failed.items() if ensemble[index] == bookie_id]
    if not indexes:
        return tuple(ensemble)
    chosen = choose_replacements(
        ensemble, indexes, write_quorum_size, bookies, placement,
        scoped=scoped, exclude={*failed.values(), *exclude}, avoid=avoid,
    )  # fmt: skip
    return tuple(chosen.get(index, bookie_id) for index, bookie_id in enumerate(ensemble))


def mend_placement(
    ensemble: Sequence[str],
    write_quorum_size: int,
    bookies: Iterable[RegisteredBookie],
    placement: Placement,
    *,
    scoped: bool,
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> dict[int, str]:
    """Return replacements, as few as can be, after which every write quorum has enough racks; {} if there are none.

    A bookie of the ensemble may replace another one whose index it leaves: it then gets the entries of both.
    Source: replaceToAdherePlacementPolicy.
    """
    rng = rng or random.Random()
    usable = usable_bookies(bookies, 0, scoped=scoped, exclude=(), rng=rng)
    spare = [bookie_id for bookie_id in usable if bookie_id not in avoid and bookie_id not in ensemble]
    size, needed = len(ensemble), min(placement.rules.count_min, write_quorum_size)
    racks = [placement.rack(bookie_id) for bookie_id in ensemble]
    refused = {index for index, rack in enumerate(racks) if placement.rules.is_enforced and rack == DEFAULT_RACK}
    sets = (set(each) | refused for count in range(size) for each in combinations(range(size), count))
    for free in (*islice(sets, _INDEX_SETS_MAX), set(range(size))):
        kept = [None if index in free else rack for index, rack in enumerate(racks)]
        for moving in ((), [ensemble[index] for index in free if ensemble[index] in usable]):
            striping = _Striping(kept, write_quorum_size, needed)
            shelf = _Shelf((*spare, *moving), placement)
            found = None if striping.broken_count else _search(striping, sorted(free), shelf, {}, rng)
            if found is not None:
                staying = {index: ensemble[index] for index, rack in found.items() if moving and rack == racks[index]}
                found = {index: rack for index, rack in found.items() if index not in staying}
                left = (bookie_id for bookie_id in (*spare, *moving) if bookie_id not in staying.values())
                return _Shelf(left, placement).bookies(found)
    return {}


class _Shelf:
    """The usable bookies by rack, in the order in which they are taken; where racks are enforced, those with one.

    Bookies in `avoid` come last in `usable`.
    """

    def __init__(self, usable: Iterable[str], placement: Placement, avoid: Collection[str] = ()) -> None:
        self.by_rack: dict[str, list[str]] = {}
        self._avoided: Counter[str] = Counter()
        for bookie_id in usable:
            rack = placement.rack(bookie_id)
            if not (placement.rules.is_enforced and rack == DEFAULT_RACK):
                self.by_rack.setdefault(rack, []).append(bookie_id)
                self._avoided[rack] += bookie_id in avoid
        self.count = sum(map(len, self.by_rack.values()))

    def is_avoided(self, rack: str, stock_count: int) -> bool:
        """Return True if the next bookie of the rack, when it has `stock_count` left, should be avoided."""
        return stock_count <= self._avoided[rack]

    def stock(self) -> dict[str, int]:
        """Return the number of bookies in each rack."""
        return {rack: len(bookies) for rack, bookies in self.by_rack.items()}

    def bookies(self, racks: Mapping[int, str]) -> dict[int, str]:
        """Return a bookie of each rack, by index."""
        taken = {rack: iter(bookies) for rack, bookies in self.by_rack.items()}
        return {index: next(taken[rack]) for index, rack in sorted(racks.items())}


class _Striping:
    """The racks of an ensemble's bookies, None for one that is not chosen yet, and the racks in each write quorum."""

    def __init__(self, racks: Sequence[str | None], write_quorum_size: int, needed: int) -> None:
        self._size, self._width = len(racks), write_quorum_size
        self._racks: list[str | None] = [None] * self._size
        count = 1 if self._width == self._size else self._size
        #: By the index that a write quorum begins at: the number of its bookies in each rack, and how many more may
        #: share a rack with another one.
        self._counts: list[dict[str, int]] = [{} for _ in range(count)]
        self._spare = [write_quorum_size - needed] * count
        self.uses: Counter[str] = Counter()
        for index, rack in enumerate(racks):
            if rack is not None:
                self.place(index, rack)

    def _quorums(self, index: int) -> Iterable[int]:
        if len(self._counts) == 1:
            return (0,)
        return ((index - back) % self._size for back in range(self._width))

    def place(self, index: int, rack: str) -> None:
        self._racks[index] = rack
        self.uses[rack] += 1
        for quorum in self._quorums(index):
            counts = self._counts[quorum]
            self._spare[quorum] -= rack in counts
            counts[rack] = counts.get(rack, 0) + 1

    def remove(self, index: int) -> str:
        rack = self._racks[index]
        assert rack is not None
        self._racks[index] = None
        self.uses[rack] -= 1
        for quorum in self._quorums(index):
            counts = self._counts[quorum]
            counts[rack] -= 1
            if counts[rack]:
                self._spare[quorum] += 1
            else:
                del counts[rack]
        return rack

    @property
    def broken_count(self) -> int:
        """The number of write quorums that have too few racks, or cannot get enough any more."""
        return sum(spare < 0 for spare in self._spare)

    def refused(self, index: int) -> set[str] | None:
        """Return the racks that would leave a write quorum of the index with too few; None if any rack would."""
        racks: set[str] = set()
        for quorum in self._quorums(index):
            if self._spare[quorum] < 0:
                return None
            if self._spare[quorum] == 0:
                racks.update(self._counts[quorum])
        return racks

    def broken_by(self, index: int) -> Counter[str]:
        """Return the number of write quorums of the index that each rack would leave with too few."""
        return Counter(
            rack for quorum in self._quorums(index) if self._spare[quorum] <= 0 for rack in self._counts[quorum]
        )

    def nearness(self, index: int) -> Counter[str]:
        """Return, for each rack, the number of write quorums that the index shares with bookies of that rack."""
        near: Counter[str] = Counter()
        for distance in range(1, self._width):
            for other in (index - distance, index + distance):
                rack = self._racks[other % self._size]
                if rack is not None:
                    near[rack] += self._width - distance
        return near

    def may_suffice(self, stock: Mapping[str, int], needed: int) -> bool:
        """Return False if the bookies in `stock` cannot give every write quorum the needed number of racks."""
        quorums = len(self._counts)
        width = 1 if quorums == 1 else self._width
        reached = (min((stock.get(rack, 0) + self.uses[rack]) * width, quorums) for rack in {*stock, *self.uses})
        return sum(reached) >= needed * quorums


def _search(
    striping: _Striping, free: Sequence[int], shelf: _Shelf, former: Mapping[int, str], rng: random.Random
) -> dict[int, str] | None:
    """Return a rack for each index in `free`, with enough racks in each write quorum of these; None if none is found.

    `former` are the racks of the bookies that leave. The first attempt prefers racks that are not near; the second one
    takes the fullest racks first, which finds a solution if there is hardly one.
    """
    if not free:
        return {}
    for is_second in (False, True):
        stock, chosen = shelf.stock(), dict[int, str]()

        def candidates(index: int, stock: Mapping[str, int] = stock, is_second: bool = is_second) -> Iterator[str]:
            refused = striping.refused(index)
            if refused is None:
                return iter(())
            near = striping.nearness(index)
            ranks = {
                rack: (
                    shelf.is_avoided(rack, count),
                    (-count,) if is_second else (near[rack], striping.uses[rack], rack != former.get(index)),
                    # Each bookie is as likely as another one, so a fuller rack comes first more often.
                    -(rng.random() ** (1 / count)),
                )
                for rack, count in stock.items()
                if count and rack not in refused
            }
            return iter(sorted(ranks, key=ranks.__getitem__))

        steps = _STEPS_MAX + 4 * len(free)
        attempts = [candidates(free[0])]
        while attempts and steps:
            steps -= 1
            index = free[len(attempts) - 1]
            if index in chosen:
                stock[striping.remove(index)] += 1
                del chosen[index]
            rack = next(attempts[-1], None)
            if rack is None:
                attempts.pop()
                continue
            striping.place(index, rack)
            stock[rack] -= 1
            chosen[index] = rack
            if len(chosen) == len(free):
                return chosen
            attempts.append(candidates(free[len(attempts)]))
        for index in chosen:
            striping.remove(index)
        if attempts == []:
            return None  # Every way was tried.
    return None


def _spread(
    striping: _Striping, free: Sequence[int], shelf: _Shelf, former: Mapping[int, str], rng: random.Random
) -> dict[int, str]:
    """Return a rack for each index in `free`, with few write quorums in too few racks."""
    stock, chosen = shelf.stock(), dict[int, str]()
    for index in free:
        broken, near = striping.broken_by(index), striping.nearness(index)
        ranks = {
            rack: (
                shelf.is_avoided(rack, count), broken[rack], near[rack], rack != former.get(index),
                -(rng.random() ** (1 / count)),
            )
            for rack, count in stock.items()
            if count
        }  # fmt: skip
        rack = chosen[index] = min(ranks, key=ranks.__getitem__)
        striping.place(index, rack)
        stock[rack] -= 1
    return chosen


def _fill(
    kept: Sequence[str | None],
    former: Mapping[int, str],
    write_quorum_size: int,
    bookies: Iterable[RegisteredBookie],
    placement: Placement,
    *,
    scoped: bool,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> dict[int, str]:
    """Return a bookie for each index where `kept` has None; `former` are the bookies that were there."""
    free = [index for index, bookie_id in enumerate(kept) if bookie_id is None]
    rng = rng or random.SystemRandom()
    usable = usable_bookies(bookies, len(free), scoped=scoped, exclude=exclude, avoid=avoid, rng=rng)
    if not placement.applies or not free:
        return dict(zip(free, usable, strict=False))
    trusted = [bookie_id for bookie_id in usable if bookie_id not in avoid]
    rules, former_racks = placement.rules, {index: placement.rack(name) for index, name in former.items()}
    needed = min(rules.count_min, write_quorum_size)
    racks = [None if bookie_id is None else placement.rack(bookie_id) for bookie_id in kept]
    before = _Striping([former_racks.get(at, rack) for at, rack in enumerate(racks)], write_quorum_size, needed)
    for candidates in (trusted, usable):
        shelf = _Shelf(candidates, placement, avoid)
        if shelf.count < len(free):
            continue
        striping, found = _Striping(racks, write_quorum_size, needed), None
        if striping.may_suffice(shelf.stock(), needed):
            found = _search(striping, free, shelf, former_racks, rng)
        if found is None:
            found = _spread(striping, free, shelf, former_racks, rng)
            if rules.is_enforced and striping.broken_count > (before.broken_count if former else 0):
                continue
        return shelf.bookies(found)
    in_racks = sorted({placement.rack(bookie_id) for bookie_id in usable} - {DEFAULT_RACK})
    raise NotEnoughBookies(
        f"Each write quorum needs bookies in {needed} racks; the {len(usable)} usable bookies are in "
        f"{', '.join(in_racks[:10]) or 'none'}{' …' if len(in_racks) > 10 else ''}",
        hint="start bookies in other racks, or set racks with 'bkctl bookies racks set' "
        "(enforceMinNumRacksPerWriteQuorum is true)",
    )
