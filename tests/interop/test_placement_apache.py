"""Apache's placement policies judge the ensembles that our client chooses, and our policies those that Apache's do."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.servers import Java

from bkctl.client.placement import (
    Adherence,
    Placement,
    PlacementRules,
    choose_ensemble,
    choose_replacements,
    mend_placement,
)
from bkctl.config import ClientConfig, Properties, Property
from bkctl.errors import NotEnoughBookies, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, LedgerMetadata
from bkctl.metadata.cluster import RegisteredBookie

pytestmark = [pytest.mark.java, pytest.mark.releases]

COUNT = 300


class Case(NamedTuple):
    """A topology, the rules, and an ensemble to judge."""

    racks: dict[str, str]
    write_quorum_size: int
    rules: PlacementRules
    ensemble: tuple[str, ...]

    def line(self, names: list[str]) -> str:
        enforced = str(self.rules.is_enforced).lower()
        settings = f"minNumRacksPerWriteQuorum={self.rules.count_min}&enforceMinNumRacksPerWriteQuorum={enforced}"
        return case_line(names, self.racks, self.write_quorum_size, self.write_quorum_size, settings, self.ensemble)


def case_line(
    names: list[str], racks: dict[str, str], write_quorum_size: int, ack_quorum_size: int, settings: str,
    ensemble: Sequence[str],
) -> str:  # fmt: skip
    all_racks = ",".join(f"{name}={racks.get(name, '')}" for name in names)
    return f"{all_racks} {write_quorum_size} {ack_quorum_size} {settings} {','.join(ensemble)}"


def answers_to(java: Java, tmp_path: Path, lines: list[str]) -> list[dict[str, Any]]:
    file = tmp_path / "cases"
    file.write_text("".join(f"{line}\n" for line in lines))
    found = [json.loads(line) for line in java.run_source("PlacementJudge", file).stdout.splitlines()]
    assert len(found) == len(lines)
    return found


def judged(java: Java, tmp_path: Path, lines: list[str]) -> list[tuple[str, str, str]]:
    """The adherence of each ensemble, of the best one that Apache chooses, and of the one that it would mend it to."""
    return [(row["adherence"], row["apache"], row["mended"]) for row in answers_to(java, tmp_path, lines)]


def topology(rng: random.Random) -> tuple[list[str], dict[str, str], int, int, PlacementRules]:
    names = [f"10.0.0.{at}:3181" for at in range(1, rng.randint(2, 14))]
    rack_count = rng.randint(1, 5)
    racks = {name: f"/r{rng.randrange(rack_count)}" for name in names if rng.random() < 0.9}
    size = rng.randint(1, min(len(names), 7))
    rules = PlacementRules(rng.randint(1, 3), is_enforced=rng.random() < 0.3)
    return names, racks, size, rng.randint(1, size), rules


def registered(names: list[str]) -> list[RegisteredBookie]:
    return [RegisteredBookie(name, "rw", BookieServiceInfo((), {})) for name in names]


def test_our_ensembles_adhere_wherever_apaches_own_do(java: Java, tmp_path: Path) -> None:
    rng = random.Random(17)
    lines, refused = [], set()
    for _ in range(COUNT):
        names, racks, size, write_quorum_size, rules = topology(rng)
        placement = Placement(racks, rules)
        try:
            chosen = choose_ensemble(registered(names), size, write_quorum_size, placement, scoped=False, rng=rng)
        except NotEnoughBookies:
            refused.add(len(lines))
            chosen = tuple(names[:size])
        lines.append(Case(racks, write_quorum_size, rules, chosen).line(names))
    answers = judged(java, tmp_path, lines)
    strict = [at for at, (_, apache, _) in enumerate(answers) if apache == "MEETS_STRICT"]
    assert [lines[at] for at in strict if at in refused or answers[at][0] != "MEETS_STRICT"] == []
    assert len(strict) > COUNT // 4
    assert any(apache != "MEETS_STRICT" for _, apache, _ in answers)


def test_our_replacements_keep_ensembles_in_enough_racks(java: Java, tmp_path: Path) -> None:
    rng = random.Random(18)
    lines = []
    while len(lines) < COUNT // 3:
        names, racks, size, write_quorum_size, rules = topology(rng)
        enforced = Placement(racks, rules._replace(is_enforced=True))
        try:
            before = choose_ensemble(registered(names), size, write_quorum_size, enforced, scoped=False, rng=rng)
        except NotEnoughBookies:
            continue
        index = rng.randrange(size)
        if not any(racks.get(name) == racks[before[index]] and name not in before for name in names):
            continue  # Perhaps no other bookie keeps the ensemble in enough racks.
        placement = Placement(racks, rules)
        target = choose_replacements(
            before, [index], write_quorum_size, registered(names), placement, scoped=False, rng=rng
        )
        after = tuple(target.get(at, name) for at, name in enumerate(before))
        lines.append(Case(racks, write_quorum_size, rules, after).line(names))
    answers = judged(java, tmp_path, lines)
    assert [line for line, (ours, _, _) in zip(lines, answers, strict=True) if ours != "MEETS_STRICT"] == []


def test_we_mend_every_ensemble_that_apaches_policy_mends(java: Java, tmp_path: Path) -> None:
    rng = random.Random(19)
    before, after, moved_at = [], [], set()
    while len(before) < COUNT:
        names, racks, size, write_quorum_size, rules = topology(rng)
        if not racks:
            continue
        ensemble, placement = tuple(rng.sample(names, size)), Placement(racks, rules)
        moved = mend_placement(ensemble, write_quorum_size, registered(names), placement, scoped=False, rng=rng)
        if moved:
            moved_at.add(len(before))
        before.append(Case(racks, write_quorum_size, rules, ensemble).line(names))
        mended = tuple(moved.get(at, name) for at, name in enumerate(ensemble))
        after.append(Case(racks, write_quorum_size, rules, mended).line(names))
    was, now = judged(java, tmp_path, before), judged(java, tmp_path, after)
    assert [after[at] for at in moved_at if (was[at][0], now[at][0]) != ("FAIL", "MEETS_STRICT")] == []
    by_apache = [at for at, (found, _, mended) in enumerate(was) if (found, mended) == ("FAIL", "MEETS_STRICT")]
    assert [before[at] for at in by_apache if at not in moved_at] == []
    assert len(by_apache) > 20


CLIENT = "ensemblePlacementPolicy=org.apache.bookkeeper.client."
RACKS, REGIONS, ZONES = (f"{CLIENT}{name}EnsemblePlacementPolicy" for name in ("Rackaware", "RegionAware", "Zoneaware"))
WORDS = {Adherence.FAIL: "FAIL", Adherence.SOFT: "MEETS_SOFT", Adherence.STRICT: "MEETS_STRICT"}


def settings_of(text: str) -> PlacementRules:
    pairs = (each.split("=", 1) for each in text.split("&"))
    entries = {key: Property((value,), "here") for key, value in pairs}
    return PlacementRules.of(ClientConfig.from_properties(Properties(Path("conf"), entries)))


def adherence(placement: Placement, write_quorum_size: int, ack_quorum_size: int, ensemble: Sequence[str]) -> Adherence:
    metadata = LedgerMetadata(len(ensemble), write_quorum_size, ack_quorum_size, DigestType.CRC32C, b"", ())
    return placement.adherence(metadata, ensemble)


def random_case(rng: random.Random, kind: str) -> tuple[list[str], dict[str, str], int, int, int, str]:
    """Bookies and racks, sizes of ensemble, write and ack quorum, and settings."""
    names = [f"10.0.0.{at}:3181" for at in range(1, rng.randint(3, 14))]
    upper, lower = rng.randint(1, 5), rng.randint(1, 4)
    # Apache's topology takes no bookie without a rack where others are in /region/rack.
    is_flat = kind == RACKS and rng.random() < 0.5
    known = 1.0 if kind == RACKS and not is_flat else 0.95
    racks = {name: f"/z{rng.randrange(upper)}/u{rng.randrange(lower)}" for name in names if rng.random() < known}
    if is_flat:
        racks = {name: rack.rpartition("/")[0] for name, rack in racks.items()}
    size = rng.randint(1, min(len(names), 8))
    write = rng.randint(1, size)
    ack = rng.randint((write + 1) // 2, write)
    if kind == ZONES:
        least = rng.randint(1, 2)
        settings = f"minNumZonesPerWriteQuorum={least}&desiredNumZonesPerWriteQuorum={rng.randint(least, 4)}"
        if rng.random() < 0.7 and size > 2:
            write = rng.choice([each for each in range(2, size + 1) if size % each == 0])
            ack = write
    else:
        settings = f"minNumRacksPerWriteQuorum={rng.randint(1, 3)}"
        if kind == REGIONS and rng.random() < 0.7:
            regions = ";".join(f"z{at}" for at in range(upper))
            settings += f"&reppRegionsToWrite={regions}&reppMinimumRegionsForDurability={rng.randint(1, min(upper, 3))}"
    return names, racks, size, write, ack, f"{kind}&{settings}"


@pytest.mark.parametrize("kind", [RACKS, ZONES])
def test_verdicts_on_random_ensembles_are_apaches(java: Java, tmp_path: Path, kind: str) -> None:
    rng = random.Random(20)
    lines, ours = [], []
    while len(lines) < COUNT:
        names, racks, size, write, ack, settings = random_case(rng, kind)
        placement = Placement(racks, settings_of(settings))
        if not racks:
            continue
        ensemble = rng.sample(names, size)
        if rng.random() < 0.5:
            with contextlib.suppress(NotEnoughBookies, UsageError):
                ensemble = list(choose_ensemble(
                    registered(names), size, write, placement, scoped=False, ack_quorum_size=ack, rng=rng
                ))  # fmt: skip
        lines.append(case_line(names, racks, write, ack, settings, ensemble))
        ours.append(WORDS[adherence(placement, write, ack, ensemble)])
    answers = answers_to(java, tmp_path, lines)
    pairs = zip(lines, ours, answers, strict=True)
    assert [(line, word, row["adherence"]) for line, word, row in pairs if word != row["adherence"]] == []
    assert len(set(ours)) == (3 if kind == ZONES else 2)


def has_region_of_one_rack(racks: Mapping[str, str]) -> bool:
    regions = Counter(rack.split("/")[1] for rack in set(racks.values()))
    return 1 in regions.values()


@pytest.mark.parametrize("kind", [REGIONS, ZONES])
def test_we_accept_and_find_every_kind_of_ensemble_that_apache_chooses(java: Java, tmp_path: Path, kind: str) -> None:
    rng = random.Random(21)
    cases, lines = [], []
    for _ in range(COUNT):
        names, racks, size, write, ack, settings = random_case(rng, kind)
        placement = Placement(racks, settings_of(settings))
        try:
            chosen = choose_ensemble(
                registered(names), size, write, placement, scoped=False, ack_quorum_size=ack, rng=rng
            )  # fmt: skip
        except (NotEnoughBookies, UsageError):
            chosen = ()
        cases.append((placement, write, ack, chosen))
        lines.append(case_line(names, racks, write, ack, settings, chosen or names[:size]))
    wrong, found_count, refused_count = [], 0, 0
    for line, (placement, write, ack, chosen), row in zip(lines, cases, answers_to(java, tmp_path, lines), strict=True):
        if not row["chosen"]:
            refused_count += 1
            continue
        if kind == REGIONS and has_region_of_one_rack(placement.racks):
            # There, Apache's takes any bookies of the region, with no regard to durability.
            continue
        found_count += 1
        theirs = adherence(placement, write, ack, row["chosen"])
        best = adherence(placement, write, ack, chosen) if chosen else None
        if theirs is Adherence.FAIL or best is None or best < theirs:
            wrong.append((line, row["chosen"], theirs, chosen, best))
    assert wrong == []
    assert found_count > COUNT // 10
    assert refused_count > 20
