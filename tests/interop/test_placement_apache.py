"""Apache's rack-aware policy judges the ensembles that our client chooses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest
from support.servers import Java

from bkctl.client.placement import Placement, RackRules, choose_ensemble, choose_replacements, mend_placement
from bkctl.errors import NotEnoughBookies
from bkctl.formats.metadata import BookieServiceInfo
from bkctl.metadata.cluster import RegisteredBookie

pytestmark = [pytest.mark.java, pytest.mark.releases]

COUNT = 300


class Case(NamedTuple):
    """A topology, the rules, and an ensemble to judge."""

    racks: dict[str, str]
    write_quorum_size: int
    rules: RackRules
    ensemble: tuple[str, ...]

    def line(self, names: list[str]) -> str:
        racks = ",".join(f"{name}={self.racks.get(name, '')}" for name in names)
        enforced = str(self.rules.is_enforced).lower()
        return f"{racks} {self.write_quorum_size} {self.rules.count_min} {enforced} {','.join(self.ensemble)}"


def judged(java: Java, tmp_path: Path, lines: list[str]) -> list[tuple[str, str]]:
    file = tmp_path / "cases"
    file.write_text("".join(f"{line}\n" for line in lines))
    rows = map(json.loads, java.run_source("PlacementJudge", file).stdout.splitlines())
    found = [(row["adherence"], row["apache"]) for row in rows]
    assert len(found) == len(lines)
    return found


def topology(rng: random.Random) -> tuple[list[str], dict[str, str], int, int, RackRules]:
    names = [f"10.0.0.{at}:3181" for at in range(1, rng.randint(2, 14))]
    rack_count = rng.randint(1, 5)
    racks = {name: f"/r{rng.randrange(rack_count)}" for name in names if rng.random() < 0.9}
    size = rng.randint(1, min(len(names), 7))
    rules = RackRules(rng.randint(1, 3), is_enforced=rng.random() < 0.3)
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
    strict = [at for at, (_, apache) in enumerate(answers) if apache == "MEETS_STRICT"]
    assert [lines[at] for at in strict if at in refused or answers[at][0] != "MEETS_STRICT"] == []
    assert len(strict) > COUNT // 4
    assert any(apache != "MEETS_STRICT" for _, apache in answers)


def test_our_replacements_and_mended_ensembles_adhere(java: Java, tmp_path: Path) -> None:
    rng = random.Random(18)
    replaced, mended, broken = [], [], []
    while min(len(replaced), len(mended)) < 60:
        names, racks, size, write_quorum_size, rules = topology(rng)
        placement, there = Placement(racks, rules), registered(names)
        if not racks:
            continue
        try:
            before = choose_ensemble(
                there,
                size,
                write_quorum_size,
                Placement(racks, rules._replace(is_enforced=True)),
                scoped=False,
                rng=rng,
            )
            index = rng.randrange(size)
            spare = [name for name in names if racks.get(name) == racks[before[index]] and name not in before]
            target = choose_replacements(before, [index], write_quorum_size, there, placement, scoped=False, rng=rng)
        except NotEnoughBookies:
            spare = []
        if spare:  # Of the same rack, so that another ensemble in enough racks is possible.
            after = tuple(target.get(at, name) for at, name in enumerate(before))
            replaced.append(Case(racks, write_quorum_size, rules, after).line(names))
        ensemble = tuple(rng.sample(names, size))
        moved = mend_placement(ensemble, write_quorum_size, there, placement, scoped=False, rng=rng)
        if moved:
            after = tuple(moved.get(at, name) for at, name in enumerate(ensemble))
            broken.append(Case(racks, write_quorum_size, rules, ensemble).line(names))
            mended.append(Case(racks, write_quorum_size, rules, after).line(names))
    for lines in (replaced, mended):
        answers = judged(java, tmp_path, lines)
        assert [line for line, (ours, _) in zip(lines, answers, strict=True) if ours != "MEETS_STRICT"] == []
    assert {ours for ours, _ in judged(java, tmp_path, broken)} == {"FAIL"}
