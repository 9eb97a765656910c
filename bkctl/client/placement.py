"""Chooses the bookies of new ensembles, and replacements in ensembles, by the placement policy that operators set.

- racks (RackawareEnsemblePlacementPolicy, the default): each write quorum gets bookies in `minNumRacksPerWriteQuorum`
  racks, or in as many as it has bookies if these are fewer. Without enough racks, the racks of neighbours differ as far
  as they can; with `enforceMinNumRacksPerWriteQuorum` such an ensemble is refused, and bookies without a rack are not
  used. `/region/rack` is one rack of its own.
- regions (RegionAwareEnsemblePlacementPolicy): bookies are `/region/rack`. With `reppRegionsToWrite`, no
  `reppMinimumRegionsForDurability` − 1 regions have an ack quorum of an entry; else write quorums span regions where
  they can.
- zones (ZoneawareEnsemblePlacementPolicy): bookies are `/zone/upgrade-domain`. A write quorum has
  `desiredNumZonesPerWriteQuorum` zones, at least `minNumZonesPerWriteQuorum`; bookies of one zone are in two domains.
- random (DefaultEnsemblePlacementPolicy): any bookies.

Pulsar's IsolatedBookieEnsemblePlacementPolicy goes by racks among the bookies of some groups. Unlike Apache's
choices, which take one bookie after the other and may end where none fits, these go back and try others.

Source: these classes, and RRTopologyAwareCoverageEnsemble, WeightedRandomSelectionImpl.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import combinations, islice
from statistics import median
from typing import Final, NamedTuple, TypeVar

from bkctl.client.ensemble import RoundRobinDistributionSchedule, usable_bookies
from bkctl.config import ClientConfig
from bkctl.errors import NotEnoughBookies, Unsupported, UsageError
from bkctl.formats.metadata import LedgerMetadata
from bkctl.metadata.cluster import RegisteredBookie

T = TypeVar("T")

#: The rack of bookies without one. Source: NetworkTopology.DEFAULT_RACK.
DEFAULT_RACK: Final = "/default-rack"
#: Racks that one search tries beyond a few for each index.
_STEPS_MAX: Final = 1000
#: Sets of indexes that are tried before all bookies of an ensemble may be replaced.
_INDEX_SETS_MAX: Final = 500


class PolicyKind(StrEnum):
    """The kinds of placement policies, by the domains of failure that each knows."""

    RANDOM = "random"
    RACKS = "racks"
    REGIONS = "regions"
    ZONES = "zones"


_CLIENT: Final = "org.apache.bookkeeper.client."
_PULSAR: Final = ("org.apache.pulsar.bookie.rackawareness.", "org.apache.pulsar.zookeeper.Zk")
_ISOLATED: Final = tuple(f"{package}IsolatedBookieEnsemblePlacementPolicy" for package in _PULSAR)
_KINDS: Final = {
    f"{_CLIENT}DefaultEnsemblePlacementPolicy": PolicyKind.RANDOM,
    f"{_CLIENT}RackawareEnsemblePlacementPolicy": PolicyKind.RACKS,
    f"{_CLIENT}RackawareEnsemblePlacementPolicyImpl": PolicyKind.RACKS,
    f"{_CLIENT}RegionAwareEnsemblePlacementPolicy": PolicyKind.REGIONS,
    f"{_CLIENT}ZoneawareEnsemblePlacementPolicy": PolicyKind.ZONES,
    f"{_CLIENT}ZoneawareEnsemblePlacementPolicyImpl": PolicyKind.ZONES,
    **dict.fromkeys(_ISOLATED, PolicyKind.RACKS),
}
#: Sources of the racks of bookies: the script, and Pulsar's node. Both always count.
_RESOLVERS: Final = (
    "org.apache.bookkeeper.net.ScriptBasedMapping", *(f"{package}BookieRackAffinityMapping" for package in _PULSAR)
)  # fmt: skip
_DEFAULT_LOCATIONS: Final = {
    PolicyKind.REGIONS: "/default-region/default-rack",
    PolicyKind.ZONES: "/default-zone/default-upgradedomain",
}


class Adherence(IntEnum):
    """The adherence of an ensemble to a policy. Source: PlacementPolicyAdherence."""

    FAIL = 0
    SOFT = 1
    STRICT = 2


class PlacementRules(NamedTuple):
    """A placement policy and its settings, for `PolicyKind`; the module's docstring has their meaning.

    `isolation` are the primary and secondary groups of Pulsar's racks that new entries go to, empty for all bookies.
    """

    #: minNumRacksPerWriteQuorum
    count_min: int = 2
    #: enforceMinNumRacksPerWriteQuorum
    is_enforced: bool = False
    kind: PolicyKind = PolicyKind.RACKS
    #: reppMinimumRegionsForDurability, 0 without reppRegionsToWrite
    region_count_min: int = 0
    #: reppEnableDurabilityEnforcementInReplace
    is_replacing_enforced: bool = True
    zone_count_min: int = 2
    zone_count_desired: int = 3
    #: enforceStrictZoneawarePlacement
    is_strict: bool = True
    isolation: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    @staticmethod
    def of(config: ClientConfig) -> PlacementRules:
        """Return the policy that a configuration asks for.

        Raises Unsupported, naming the class, for another policy or resolver of racks than Apache's and Pulsar's, and
        UsageError for settings that contradict each other, as Java does.
        """
        policy = config.ensemble_placement_policy
        isolated = config.isolation_bookie_groups
        kind = PolicyKind.RACKS
        if policy is not None:
            kind = _known(_KINDS, policy, "ensemblePlacementPolicy")
            isolated = isolated if policy in _ISOLATED else ""
        elif config.regionaware_policy_enabled and not isolated:
            kind = PolicyKind.REGIONS
        elif not config.rackaware_policy_enabled and not isolated:
            kind = PolicyKind.RANDOM
        if config.repp_dns_resolver_class is not None and kind is not PolicyKind.RANDOM:
            _known(dict.fromkeys(_RESOLVERS, True), config.repp_dns_resolver_class, "reppDnsResolverClass")
        regions = [name for name in config.repp_regions_to_write.split(";") if name]
        region_count_min = config.repp_minimum_regions_for_durability if regions else 0
        if kind is PolicyKind.REGIONS and len(regions) < region_count_min:
            raise UsageError(
                f"reppRegionsToWrite names {len(regions)} regions, fewer than reppMinimumRegionsForDurability="
                f"{region_count_min}"
            )
        zone_count_min, zone_count_desired = (
            config.min_num_zones_per_write_quorum, config.desired_num_zones_per_write_quorum
        )  # fmt: skip
        if kind is PolicyKind.ZONES and zone_count_min > zone_count_desired:
            raise UsageError(
                f"minNumZonesPerWriteQuorum={zone_count_min} is more than desiredNumZonesPerWriteQuorum="
                f"{zone_count_desired}"
            )
        groups = (isolated, config.secondary_isolation_bookie_groups if isolated else "")
        return PlacementRules(
            config.min_num_racks_per_write_quorum, config.enforce_min_num_racks_per_write_quorum, kind,
            region_count_min, config.repp_enable_durability_enforcement_in_replace, zone_count_min, zone_count_desired,
            config.enforce_strict_zoneaware_placement,
            (_names(groups[0]), _names(groups[1])),
        )  # fmt: skip

    @property
    def default_location(self) -> str:
        """The location of bookies without one."""
        return _DEFAULT_LOCATIONS.get(self.kind, DEFAULT_RACK)

    @property
    def uses_default(self) -> bool:
        """False if bookies without a location get no entries."""
        return not (self.is_strict if self.kind is PolicyKind.ZONES else self.is_enforced)

    @property
    def domains(self) -> tuple[str, int]:
        """The kind of the domains that a write quorum spans, and their least number."""
        if self.kind is PolicyKind.REGIONS:
            return "region", self.region_count_min
        return ("zone", self.zone_count_min) if self.kind is PolicyKind.ZONES else ("rack", self.count_min)

    def refuses(self, *, new: bool) -> bool:
        """Return True if an ensemble that fails is refused, in place of the best one that there is."""
        if self.kind is PolicyKind.ZONES:
            return self.is_strict
        durable = self.kind is PolicyKind.REGIONS and self.region_count_min > 1
        return self.is_enforced or (durable and (new or self.is_replacing_enforced))

    def check(self, ensemble_size: int, write_quorum_size: int, ack_quorum_size: int) -> None:
        """Raise UsageError if the policy allows no ensemble of that shape. Source: newEnsemble."""
        if self.kind is PolicyKind.REGIONS and (needed := self.region_count_min) > 0:
            least = max(needed, write_quorum_size - write_quorum_size // needed + 1)
            if ack_quorum_size < least:
                raise UsageError(
                    f"Ack quorum {ack_quorum_size} of write quorum {write_quorum_size} does not survive the loss of "
                    f"regions; {least} are needed (reppMinimumRegionsForDurability={needed})"
                )
        if self.kind is PolicyKind.ZONES and self.is_strict:
            problem = self.shape_problem(ensemble_size, write_quorum_size)
            if problem is not None:
                raise UsageError(problem, hint="enforceStrictZoneawarePlacement is true")

    def shape_problem(self, ensemble_size: int, write_quorum_size: int) -> str | None:
        """Return the reason why no ensemble of that shape adheres; None if some do."""
        if self.kind is not PolicyKind.ZONES:
            return None
        if ensemble_size % write_quorum_size:
            return f"The ensemble size {ensemble_size} is not a multiple of the write quorum {write_quorum_size}"
        if write_quorum_size <= self.zone_count_min:
            least = f"minNumZonesPerWriteQuorum={self.zone_count_min}"
            return f"The write quorum {write_quorum_size} must be more than {least}"
        return None


def _known(names: Mapping[str, T], name: str, key: str) -> T:
    if name not in names:
        raise Unsupported(
            f"{key}={name} is not supported: bookies that bkctl chose would not be where that class puts them",
            hint=f"use Java's tools, or set {key} to one of {', '.join(names)}",
        )
    return names[name]


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, text.split(","))))


class WriteSetProblem(NamedTuple):
    """A write set, as ensemble indexes, that a policy does not accept, and why."""

    write_set: tuple[int, ...]
    reason: str


class Placement(NamedTuple):
    """The racks of bookies, by bookie id, and the rules. A bookie that is not in `racks` has no location.

    `weights` are free bytes, by bookie id, where these count; `groups` the bookies of Pulsar's groups; `local` is the
    location of this client.
    """

    racks: Mapping[str, str] = {}
    rules: PlacementRules = PlacementRules()
    weights: Mapping[str, int] | None = None
    groups: Mapping[str, Collection[str]] = {}
    local: str | None = None

    @property
    def applies(self) -> bool:
        """False if any bookies will do: no bookie has a location, and none is needed."""
        kind = self.rules.kind
        if kind is PolicyKind.RANDOM or (kind is PolicyKind.ZONES and not self.rules.is_strict):
            return False
        return bool(self.racks) or self.rules.refuses(new=True)

    def rack(self, bookie_id: str) -> str:
        return self.racks.get(bookie_id, self.rules.default_location)

    def acks_domains(self, bookies: Sequence[str], write_quorum_size: int) -> tuple[list[str], int]:
        """Return the domain of each of `bookies`, and the number that the bookies of an acknowledged entry span.

        Source: areAckedBookiesAdheringToPlacementPolicy.
        """
        kind, racks = self.rules.kind, [self.rack(bookie_id) for bookie_id in bookies]
        if kind is PolicyKind.ZONES:
            return [region_of(rack) for rack in racks], min(self.rules.zone_count_min, write_quorum_size)
        return racks, 0 if kind is PolicyKind.RANDOM else min(self.rules.count_min, write_quorum_size)

    def outside(self, bookies: Iterable[str], ensemble_size: int) -> set[str]:
        """Return the ids of `bookies` that are not in the isolation groups.

        The secondary groups count if the primary ones have fewer than an ensemble of them.
        Source: IsolatedBookieEnsemblePlacementPolicy.getExcludedBookiesWithIsolationGroups.
        """
        primary, secondary = self.rules.isolation
        if not primary:
            return set()
        known = set(bookies)
        inside = known.intersection(name for group in primary for name in self.groups.get(group, ()))
        if len(inside) < ensemble_size:
            inside.update(known.intersection(name for group in secondary for name in self.groups.get(group, ())))
        if len(inside) < ensemble_size:
            inside.update(known.difference(*self.groups.values()))
        return known - inside

    def problems(self, metadata: LedgerMetadata, bookies: Sequence[str]) -> list[WriteSetProblem]:
        """Return the write sets of the ensemble `bookies` that the policy does not accept; [] if it accepts all."""
        return self._judge(metadata, bookies, Adherence.SOFT)

    def adherence(self, metadata: LedgerMetadata, bookies: Sequence[str]) -> Adherence:
        """Return how the ensemble `bookies` adheres. Source: isEnsembleAdheringToPlacementPolicy.

        Apache's region-aware policy accepts every ensemble that exists; here, one fails that it would not choose.
        """
        if self.problems(metadata, bookies):
            return Adherence.FAIL
        return Adherence.SOFT if self._judge(metadata, bookies, Adherence.STRICT) else Adherence.STRICT

    def ledger_problem(self, metadata: LedgerMetadata) -> str | None:
        """Return why the policy does not accept the first such ensemble of a ledger; None if it accepts all."""
        for first_entry_id, bookies in metadata.ensembles:
            for write_set, reason in self.problems(metadata, bookies):
                names = ", ".join(bookies[index] for index in write_set)
                return f"from entry {first_entry_id}, the write set {names} {reason}"
        return None

    def _judge(self, metadata: LedgerMetadata, bookies: Sequence[str], aim: Adherence) -> list[WriteSetProblem]:
        zones = self.rules.kind is PolicyKind.ZONES
        if not (self.applies or zones):
            return []
        schedule = RoundRobinDistributionSchedule.of(metadata)
        problem = self.rules.shape_problem(schedule.ensemble_size, schedule.write_quorum_size)
        if problem is not None:
            reason = f"cannot adhere: {problem[0].lower()}{problem[1:]}"
            return [WriteSetProblem(tuple(range(schedule.ensemble_size)), reason)]
        judge = self.judge(schedule.ack_quorum_size)
        racks = [self.rack(bookie_id) for bookie_id in bookies]
        found = []
        for write_set in map(schedule.write_set, range(schedule.ensemble_size)):
            problem = judge.problem(Counter(racks[index] for index in write_set), 0, aim)
            if problem is not None:
                found.append(WriteSetProblem(write_set, problem))
        return found

    def judge(self, ack_quorum_size: int) -> _Judge:
        """Return what judges the locations of write sets."""
        return _Judge(self.rules, ack_quorum_size, len({region_of(rack) for rack in self.racks.values()}))

    def drawn(self, usable: Sequence[str], avoid: Collection[str], rng: random.Random) -> list[str]:
        """Return bookies in the order in which they are taken: those in `avoid` last, heavier ones sooner.

        Source: WeightedRandomSelectionImpl.
        """
        if self.weights is None:
            return list(usable)
        weights = self.weights_of(usable)
        least = min(weights.values(), default=1)
        return [bookie_id for _, _, bookie_id in sorted(
            (bookie_id in avoid, -(rng.random() ** (least / weight)), bookie_id)
            for bookie_id, weight in weights.items()
        )]  # fmt: skip

    def weights_of(self, bookies: Iterable[str]) -> dict[str, int]:
        """Return the weight of each bookie, the least of them where it is unknown or 0."""
        free = {bookie_id: (self.weights or {}).get(bookie_id, 0) for bookie_id in bookies}
        least = min((each for each in free.values() if each > 0), default=1)
        return {bookie_id: each if each > 0 else least for bookie_id, each in free.items()}


def capped_weights(free_bytes: Mapping[str, int], multiple_max: int) -> dict[str, int]:
    """Return weights of bookies: free bytes, up to `multiple_max` medians (0 or less: any).

    Source: WeightedRandomSelectionImpl.updateMap.
    """
    limit = int(median(free_bytes.values()) * multiple_max) if free_bytes and multiple_max > 0 else 0
    return {name: min(free, limit) if limit > 0 else free for name, free in free_bytes.items()}


def region_of(location: str) -> str:
    """Return the region or zone of a location."""
    return location.split("/", 2)[1] if "/" in location else location


class _Judge(NamedTuple):
    """The rules for one write set; `region_count` regions are known."""

    rules: PlacementRules
    ack_quorum_size: int
    region_count: int

    @property
    def aims(self) -> tuple[Adherence, ...]:
        """The adherences that a choice tries to reach, the best first."""
        if self.rules.kind is PolicyKind.RACKS:
            return (Adherence.SOFT,)
        return (Adherence.STRICT, Adherence.SOFT)

    def problem(self, racks: Mapping[str, int], open_count: int, aim: Adherence) -> str | None:
        """Return why bookies in `racks`, and any `open_count` more, cannot adhere as `aim` says; None if they can."""
        rules, size = self.rules, sum(racks.values()) + open_count
        if rules.default_location in racks and not (rules.uses_default and rules.kind is not PolicyKind.ZONES):
            return (
                "has a bookie without a rack" if rules.kind is PolicyKind.RACKS else "has a bookie of unknown location"
            )
        if rules.kind is PolicyKind.RACKS:
            return _too_few(len(racks), open_count, min(rules.count_min, size), "rack")
        return (self._zones if rules.kind is PolicyKind.ZONES else self._regions)(racks, open_count, size, aim)

    def _regions(self, racks: Mapping[str, int], open_count: int, size: int, aim: Adherence) -> str | None:
        rules, counts = self.rules, Counter[str]()
        for rack, count in racks.items():
            counts[region_of(rack)] += count
        if rules.region_count_min > 1:
            regions = counts.most_common(rules.region_count_min - 1)
            held = sum(count for _, count in regions)
            if held >= self.ack_quorum_size:
                names = ", ".join(name for name, _ in regions)
                return f"has {held} bookies in {names}; these must be less than an ack quorum, {self.ack_quorum_size}"
        elif aim is Adherence.STRICT:
            needed = min(rules.count_min, size, self.region_count)
            if (problem := _too_few(len(counts), open_count, needed, "region")) is not None:
                return problem
        if rules.is_enforced:
            for region, count in counts.items():
                found, needed = sum(region_of(rack) == region for rack in racks), min(count, rules.count_min)
                if found < needed:
                    return f"is in {found} rack{'s' if found > 1 else ''} of {region}; {needed} are needed"
        return _too_few(len(racks), open_count, min(rules.count_min, size), "rack") if aim is Adherence.STRICT else None

    def _zones(self, racks: Mapping[str, int], open_count: int, size: int, aim: Adherence) -> str | None:
        rules, domains, counts = self.rules, Counter[str](), Counter[str]()
        for location, count in racks.items():
            if location.count("/") != 2:
                return f"has a bookie in {location}, which is not a zone and an upgrade domain"
            domains[region_of(location)] += 1
            counts[region_of(location)] += count
        desired = min(rules.zone_count_desired, size) if aim is Adherence.STRICT else 0
        single = [zone for zone, count in counts.items() if count > 1 and domains[zone] < 2]
        if len(single) > open_count:
            return f"has several bookies in one upgrade domain of {', '.join(single)}; 2 are needed"
        return _too_few(len(counts), open_count, max(rules.zone_count_min, desired), "zone")


def _too_few(count: int, open_count: int, needed: int, what: str) -> str | None:
    if count + open_count >= needed:
        return None
    return f"is in {count} {what}{'s' if count != 1 else ''}; {needed} are needed"


def choose_ensemble(
    bookies: Iterable[RegisteredBookie],
    ensemble_size: int,
    write_quorum_size: int,
    placement: Placement,
    *,
    scoped: bool,
    ack_quorum_size: int | None = None,
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> tuple[str, ...]:
    """Return the bookies of a new ensemble, chosen at random by the policy. Raises as `usable_bookies`.

    Raises NotEnoughBookies too if the policy must hold, and the usable bookies are in too few racks, UsageError as
    `PlacementRules.check`. `ack_quorum_size` None is the write quorum. Source: newEnsemble.
    """
    acks = ack_quorum_size or write_quorum_size
    placement.rules.check(ensemble_size, write_quorum_size, acks)
    chosen = choose_replacements(
        [None] * ensemble_size, range(ensemble_size), write_quorum_size, bookies, placement,
        scoped=scoped, ack_quorum_size=acks, avoid=avoid, rng=rng,
    )  # fmt: skip
    return tuple(chosen[index] for index in range(ensemble_size))


def choose_replacements(
    ensemble: Sequence[str | None],
    indexes: Iterable[int],
    write_quorum_size: int,
    bookies: Iterable[RegisteredBookie],
    placement: Placement,
    *,
    scoped: bool,
    ack_quorum_size: int | None = None,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> dict[int, str]:
    """Return a replacement for the bookie at each of `indexes`, None in a new ensemble; none is in it or in `exclude`.

    Of the racks that leave every write quorum with enough racks, one without other bookies of the ensemble is
    preferred, and among these the rack of the bookie that leaves; its region is preferred to others. Raises as
    `choose_ensemble`. Where the policy must hold, replacements may leave as many write quorums that fail as there were
    before. Source: replaceBookie.
    """
    free, acks = sorted(set(indexes)), ack_quorum_size or write_quorum_size
    exclude = {*filter(None, ensemble), *exclude}
    rng = rng or random.SystemRandom()
    bookies = list(bookies)
    outside = placement.outside((bookie.bookie_id for bookie in bookies), len(ensemble))
    usable = placement.drawn(
        usable_bookies(bookies, len(free), scoped=scoped, exclude=outside.union(exclude), avoid=avoid, rng=rng),
        avoid, rng,
    )  # fmt: skip
    if not placement.applies or not free:
        return dict(zip(free, usable, strict=False))
    trusted = [bookie_id for bookie_id in usable if bookie_id not in avoid]
    rules, judge = placement.rules, placement.judge(acks)
    before = [None if bookie_id is None else placement.rack(bookie_id) for bookie_id in ensemble]
    racks, former = before.copy(), dict[int, str]()
    for index in free:
        racks[index] = None
        if (rack := before[index]) is not None:
            former[index] = rack
    preferred = former or ({free[0]: placement.local} if placement.local else {})
    shelves = [shelf for each in (trusted, usable) if (shelf := _Shelf(each, placement, avoid)).count >= len(free)]
    broken_max = _Striping(before, write_quorum_size, judge, Adherence.SOFT).broken_count if former else 0
    for shelf in shelves:
        for aim in judge.aims:
            striping = _Striping(racks, write_quorum_size, judge, aim)
            found = None if striping.broken_count else _search(striping, free, shelf, preferred, rng)
            if found is not None:
                return shelf.bookies(found)
        striping = _Striping(racks, write_quorum_size, judge, Adherence.SOFT)
        found = _spread(striping, free, shelf, preferred, rng)
        if not rules.refuses(new=not former) or striping.broken_count <= broken_max:
            return shelf.bookies(found)
    in_racks = sorted({placement.rack(bookie_id) for bookie_id in usable} - {rules.default_location})
    raise NotEnoughBookies(
        f"{_NEEDS[rules.kind].format(rules=rules, racks=min(rules.count_min, write_quorum_size), acks=acks)}; the "
        f"{len(usable)} usable bookies are in {', '.join(in_racks[:10]) or 'none'}{' …' if len(in_racks) > 10 else ''}",
        hint="start bookies in other racks, or set racks with 'bkctl bookies racks set' "
        f"({_SETTINGS[rules.kind]} is true)",
    )


def mend_placement(
    ensemble: Sequence[str],
    write_quorum_size: int,
    bookies: Iterable[RegisteredBookie],
    placement: Placement,
    *,
    scoped: bool,
    ack_quorum_size: int | None = None,
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> dict[int, str]:
    """Return the fewest replacements after which the policy accepts the ensemble; {} if no replacements do that.

    A bookie of the ensemble may replace another one whose index it leaves: it then gets the entries of both.
    Source: replaceToAdherePlacementPolicy.
    """
    rng = rng or random.Random()
    size, rules = len(ensemble), placement.rules
    if rules.shape_problem(size, write_quorum_size) is not None:
        return {}
    bookies = list(bookies)
    outside = placement.outside((bookie.bookie_id for bookie in bookies), size)
    usable = usable_bookies(bookies, 0, scoped=scoped, exclude=outside, rng=rng)
    spare = [bookie_id for bookie_id in usable if bookie_id not in avoid and bookie_id not in ensemble]
    racks = [placement.rack(bookie_id) for bookie_id in ensemble]
    refused = {index for index, rack in enumerate(racks) if rack == rules.default_location and not rules.uses_default}
    judge = placement.judge(ack_quorum_size or write_quorum_size)
    sets = (set(each) | refused for count in range(size) for each in combinations(range(size), count))
    for free in (*islice(sets, _INDEX_SETS_MAX), set(range(size))):
        kept = [None if index in free else rack for index, rack in enumerate(racks)]
        for moving in ((), [ensemble[index] for index in free if ensemble[index] in usable]):
            striping = _Striping(kept, write_quorum_size, judge, Adherence.SOFT)
            shelf = _Shelf((*spare, *moving), placement)
            found = None if striping.broken_count else _search(striping, sorted(free), shelf, {}, rng)
            if found is not None:
                staying = {index: ensemble[index] for index, rack in found.items() if moving and rack == racks[index]}
                found = {index: rack for index, rack in found.items() if index not in staying}
                left = (bookie_id for bookie_id in (*spare, *moving) if bookie_id not in staying.values())
                return _Shelf(left, placement).bookies(found)
    return {}


class _Shelf:
    """The usable bookies by rack, in the order in which they are taken; where it must be known, those with one.

    Bookies in `avoid` come last in `usable`.
    """

    def __init__(self, usable: Iterable[str], placement: Placement, avoid: Collection[str] = ()) -> None:
        self.by_rack: dict[str, list[str]] = {}
        self._avoided: Counter[str] = Counter()
        self._weights: Counter[str] = Counter()
        rules = placement.rules
        for bookie_id, weight in placement.weights_of(usable).items():
            rack = placement.rack(bookie_id)
            if rules.uses_default or rack != rules.default_location:
                self.by_rack.setdefault(rack, []).append(bookie_id)
                self._avoided[rack] += bookie_id in avoid
                self._weights[rack] += weight
        self.count = sum(map(len, self.by_rack.values()))
        self._mean = sum(self._weights.values()) / max(self.count, 1)

    def is_avoided(self, rack: str, stock_count: int) -> bool:
        """Return True if the next bookie of the rack, when it has `stock_count` left, should be avoided."""
        return stock_count <= self._avoided[rack]

    def draw(self, rack: str, stock_count: int, rng: random.Random) -> float:
        """Return a random rank: each bookie is as likely as another one of its weight, so fuller racks come first."""
        weight = self._weights[rack] / len(self.by_rack[rack]) / self._mean
        return -float(rng.random() ** (1 / (stock_count * weight)))

    def stock(self) -> dict[str, int]:
        return {rack: len(bookies) for rack, bookies in self.by_rack.items()}

    def bookies(self, racks: Mapping[int, str]) -> dict[int, str]:
        """Return a bookie of each rack, by index."""
        taken = {rack: iter(bookies) for rack, bookies in self.by_rack.items()}
        return {index: next(taken[rack]) for index, rack in sorted(racks.items())}


class _Striping:
    """The racks of an ensemble's bookies, None for one that is not chosen yet, and the racks in each write quorum."""

    def __init__(self, racks: Sequence[str | None], write_quorum_size: int, judge: _Judge, aim: Adherence) -> None:
        self._size, self._width, self._judge, self._aim = len(racks), write_quorum_size, judge, aim
        self._racks: list[str | None] = [None] * self._size
        count = 1 if self._width == self._size else self._size
        #: By the index that a write quorum begins at: the number of its bookies in each rack, and of those to come.
        self._counts: list[dict[str, int]] = [{} for _ in range(count)]
        self._open = [write_quorum_size] * count
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
            self._open[quorum] -= 1
            counts[rack] = counts.get(rack, 0) + 1

    def remove(self, index: int) -> str:
        rack = self._racks[index]
        assert rack is not None
        self._racks[index] = None
        self.uses[rack] -= 1
        for quorum in self._quorums(index):
            counts = self._counts[quorum]
            counts[rack] -= 1
            self._open[quorum] += 1
            if not counts[rack]:
                del counts[rack]
        return rack

    def _is_broken(self, quorum: int) -> bool:
        return self._judge.problem(self._counts[quorum], self._open[quorum], self._aim) is not None

    @property
    def broken_count(self) -> int:
        """The number of write quorums that fail, or cannot adhere any more."""
        return sum(map(self._is_broken, range(len(self._counts))))

    def broken_by(self, index: int, rack: str) -> int:
        """Return the number of write quorums of the index that a bookie of the rack would leave broken."""
        self.place(index, rack)
        count = sum(map(self._is_broken, self._quorums(index)))
        self.remove(index)
        return count

    def nearness(self, index: int) -> tuple[Counter[str], Counter[str]]:
        """Return the number of write quorums that the index shares with bookies of each region or zone, and rack."""
        near, wide = Counter[str](), Counter[str]()
        for distance in range(1, self._width):
            for other in (index - distance, index + distance):
                rack = self._racks[other % self._size]
                if rack is not None:
                    near[rack] += self._width - distance
                    wide[region_of(rack)] += self._width - distance
        return wide, near

    def ranks(
        self, index: int, stock: Mapping[str, int], shelf: _Shelf, former: Mapping[int, str], rng: random.Random,
        *, fullest: bool = False,
    ) -> list[str]:  # fmt: skip
        """Return the racks that have bookies, the one to take first at the front; `fullest` ones first."""
        wide, near = self.nearness(index)
        region_uses = Counter[str]()
        by_region = self._judge.rules.kind is not PolicyKind.RACKS
        if by_region:
            for rack, count in self.uses.items():
                region_uses[region_of(rack)] += count
        left = former.get(index)
        ranks = {}
        for rack, count in stock.items():
            if not count:
                continue
            ranked: tuple[float, ...] = (near[rack], self.uses[rack], rack != left)
            if by_region:
                region = region_of(rack)
                is_other = left is not None and region_of(left) != region
                ranked = (is_other, wide[region], region_uses[region], *ranked)
            ranks[rack] = (
                shelf.is_avoided(rack, count), (-count,) if fullest else ranked, shelf.draw(rack, count, rng)
            )  # fmt: skip
        return sorted(ranks, key=ranks.__getitem__)


def _search(
    striping: _Striping, free: Sequence[int], shelf: _Shelf, former: Mapping[int, str], rng: random.Random
) -> dict[int, str] | None:
    """Return a rack for each index in `free`, with which every write quorum of these adheres; None if none is found.

    `former` are the racks of the bookies that leave. The first attempt prefers racks that are not near; the second one
    takes the fullest racks first, which finds a solution if there is hardly one.
    """
    if not free:
        return {}
    for is_second in (False, True):
        stock, chosen = shelf.stock(), dict[int, str]()

        def candidates(index: int, stock: Mapping[str, int] = stock, is_second: bool = is_second) -> Iterator[str]:
            ranked = striping.ranks(index, stock, shelf, former, rng, fullest=is_second)
            return (rack for rack in ranked if not striping.broken_by(index, rack))

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
    """Return a rack for each index in `free`, with few write quorums that fail."""
    stock, chosen = shelf.stock(), dict[int, str]()
    for index in free:
        ranked = striping.ranks(index, stock, shelf, former, rng)
        # Bookies that should be avoided come last still.
        rack = min(ranked, key=lambda each: (shelf.is_avoided(each, stock[each]), striping.broken_by(index, each)))
        chosen[index] = rack
        striping.place(index, rack)
        stock[rack] -= 1
    return chosen


_NEEDS: Final = {
    PolicyKind.RACKS: "Each write quorum needs bookies in {racks} racks",
    PolicyKind.REGIONS: "An entry must not have {acks} replicas in fewer than {rules.region_count_min} regions",
    PolicyKind.ZONES: "Each write quorum needs bookies in {rules.zone_count_min} zones, in 2 upgrade domains of each",
}
_SETTINGS: Final = {
    PolicyKind.RACKS: "enforceMinNumRacksPerWriteQuorum",
    PolicyKind.REGIONS: "reppEnableDurabilityEnforcementInReplace",
    PolicyKind.ZONES: "enforceStrictZoneawarePlacement",
}
