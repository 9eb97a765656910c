"""Apache's rack-aware policy judges the ensembles that our client chooses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest
from support.servers import Java

from bkctl.client.placement import Placement, PlacementRules, choose_ensemble, choose_replacements, mend_placement
from bkctl.errors import NotEnoughBookies
from bkctl.formats.metadata import BookieServiceInfo
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
        racks = ",".join(f"{name}={self.racks.get(name, '')}" for name in names)
        enforced = str(self.rules.is_enforced).lower()
        return f"{racks} {self.write_quorum_size} {self.rules.count_min} {enforced} {','.join(self.ensemble)}"


def judged(java: Java, tmp_path: Path, lines: list[str]) -> list[tuple[str, str, str]]:
    """The adherence of each ensemble, of the best one that Apache chooses, and of the one that it would mend it to."""
    file = tmp_path / "cases"
    file.write_text("".join(f"{line}\n" for line in lines))
    rows = map(json.loads, java.run_source("PlacementJudge", file).stdout.splitlines())
    found = [(row["adherence"], row["apache"], row["mended"]) for row in rows]
    assert len(found) == len(lines)
    return found


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
