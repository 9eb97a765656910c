"""Who takes the place of a bookie in an ensemble."""

from __future__ import annotations

from pathlib import Path

import pytest

from bkctl.errors import BkctlError, NotEnoughBookies
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import RegisteredBookie
from bkctl.replication.placement import Topology, choose_replacements

PLAIN, SCOPED = LedgerId(0, 5), LedgerId(7, 5)


def bookie(name: str, state: str = "rw", *, scopes: bool = True, host: str | None = None) -> RegisteredBookie:
    endpoint = BookieEndpoint("bookie", 3181, host or name, "bookie-rpc")
    return RegisteredBookie(name, state, BookieServiceInfo((endpoint,), {"ledgerScopes": "1"} if scopes else {}))


def test_only_writable_bookies_outside_the_ensemble_take_over():
    bookies = [bookie("a"), bookie("b"), bookie("c", "ro"), bookie("d"), bookie("e")]
    for first in range(20):
        chosen = choose_replacements(PLAIN, first, ("a", "b", "x"), [2], bookies, exclude={"d"})
        assert chosen == {2: "e"}
    with pytest.raises(NotEnoughBookies, match="b"):
        choose_replacements(PLAIN, 0, ("a", "b", "x"), [2], bookies, exclude={"d", "e"})


def test_a_scoped_ledger_goes_to_bookies_with_scopes_only():
    bookies = [bookie("a"), bookie("b", scopes=False), bookie("c")]
    for first in range(20):
        assert choose_replacements(SCOPED, first, ("a", "x"), [1], bookies) == {1: "c"}
    assert {choose_replacements(PLAIN, first, ("a", "x"), [1], bookies)[1] for first in range(30)} == {"b", "c"}
    with pytest.raises(NotEnoughBookies, match="without ledger scopes: b"):
        choose_replacements(SCOPED, 0, ("a", "x"), [1], bookies, exclude={"c"})


def test_two_places_get_two_bookies():
    bookies = [bookie(name) for name in "abcde"]
    for first in range(20):
        chosen = choose_replacements(PLAIN, first, ("x", "a", "y"), [0, 2], bookies)
        assert set(chosen) == {0, 2}
        assert len({*chosen.values(), "a"}) == 3
    with pytest.raises(NotEnoughBookies):
        choose_replacements(PLAIN, 0, ("x", "a", "y"), [0, 2], bookies[:2])


def test_choice_is_stable_for_a_fragment_and_spread_over_ledgers():
    bookies = [bookie(f"b{index}") for index in range(10)]
    again = [choose_replacements(PLAIN, 0, ("x",), [0], list(bookies)) for _ in range(5)]
    assert len({each[0] for each in again}) == 1
    spread = {choose_replacements(LedgerId(0, at), 0, ("x",), [0], bookies)[0] for at in range(200)}
    assert len(spread) == 10


def test_suspect_bookies_come_last():
    bookies = [bookie("a"), bookie("b"), bookie("c")]
    for at in range(20):
        assert choose_replacements(LedgerId(0, at), 0, ("x",), [0], bookies, avoid={"a", "c"}) == {0: "b"}
        assert choose_replacements(LedgerId(0, at), 0, ("x", "b"), [0], bookies, avoid={"a", "c"})[0] in {"a", "c"}


def test_replacements_prefer_free_racks():
    racks = {"a": "/1", "b": "/2", "c": "/2", "d": "/3", "e": "/4", "x": "/3"}
    bookies = [bookie(name) for name in "abcde"]

    def chosen(candidates, exclude=()):
        return {
            choose_replacements(LedgerId(0, at), 0, ("a", "b", "x"), [2], candidates, racks=racks, exclude=exclude)[2]
            for at in range(30)
        }

    assert chosen(bookies) == {"d"}  # the rack of the one that left
    assert chosen(bookies, {"d"}) == {"e"}  # a rack that nobody else is in
    assert chosen(bookies, {"d", "e"}) == {"c"}  # rather two in one rack than a replica too few
    # Two that leave do not both go to one rack.
    both = {
        tuple(choose_replacements(LedgerId(0, at), 0, ("a", "x", "y"), [1, 2], bookies, racks=racks).values())
        for at in range(30)
    }
    assert {first for first, _ in both} == {"d"}
    assert {second for _, second in both} == {"b", "c", "e"}


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "racks"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_script_gets_each_host_once(tmp_path):
    log = tmp_path / "calls"
    tell = script(tmp_path, f'echo "$@" >> {log}\nfor host in "$@"; do echo "/rack-$host"; done')
    topology = Topology(tell, argument_count_max=2)
    bookies = [bookie("a", host="h1"), bookie("b", host="h2"), bookie("c", host="h3"), bookie("d", host="h1")]
    assert topology.racks(bookies) == {"a": "/rack-h1", "b": "/rack-h2", "c": "/rack-h3", "d": "/rack-h1"}
    assert log.read_text().split("\n") == ["h1 h2", "h3", ""]
    topology.racks([*bookies, bookie("e", host="h4"), RegisteredBookie("no-address", "rw", None)])
    assert log.read_text().split("\n")[2:] == ["h4", ""]


@pytest.mark.parametrize("text", ["exit 3", "echo /1", "echo /1 /2 /3"])
def test_failing_script_is_an_error(tmp_path, text):
    with pytest.raises(BkctlError, match="for 2 hosts"):
        Topology(script(tmp_path, text)).racks([bookie("a"), bookie("b")])


def test_missing_script_is_an_error(tmp_path):
    with pytest.raises(BkctlError, match="Network topology script"):
        Topology(str(tmp_path / "none")).racks([bookie("a")])


def test_invalid_hosts_never_reach_the_script(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = tmp_path / "topology"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{tmp_path}/asked"\nfor host; do echo "/rack-$host"; done\n')
    script.chmod(0o755)
    hostile = ["--output=/etc/passwd", "-x", "", " ", "a b", "$(id)", "a;b", "a\nb", "h" * 256, "../x", "\u00e9", "%a"]
    fine = ["bookie-1.example", "10.0.0.1", "fe80::1%eth0", "::1", "under_score"]
    bookies = [bookie(f"bad-{at}", host=host or " ") for at, host in enumerate(hostile)]
    bookies += [bookie(f"good-{at}", host=host) for at, host in enumerate(fine)]
    topology = Topology(str(script))
    expected = {f"good-{at}": f"/rack-{host}" for at, host in enumerate(fine)}
    assert topology.racks(bookies) == topology.racks(bookies) == expected
    assert sorted((tmp_path / "asked").read_text().splitlines()) == sorted(fine)
    assert len(caplog.messages) == len(hostile)  # each is said once
