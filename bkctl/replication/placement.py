"""Which bookie takes the place of another in a fragment's ensemble.

Source: RackawareEnsemblePlacementPolicyImpl.replaceBookie, BookKeeperAdmin.getReplacementBookiesByIndexes,
ScriptBasedMapping.
"""

from __future__ import annotations

import logging
import random
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from bkctl.client.ensemble import choose_bookies
from bkctl.errors import BkctlError, NotEnoughBookies

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie

#: Source: CommonConfigurationKeys.NET_TOPOLOGY_SCRIPT_NUMBER_ARGS_DEFAULT.
SCRIPT_ARGUMENT_COUNT_MAX: Final = 100
SCRIPT_TIMEOUT_S: Final = 30.0
#: A host name, an IPv4 or an IPv6 address. None begins with `-`, which would be an option of the script.
_HOST: Final = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_:][A-Za-z0-9_.:-]*(?:%[A-Za-z0-9_.-]+)?", re.ASCII)

log: Final = logging.getLogger("bkctl.replication")


class Topology:
    """The racks of bookies, as `networkTopologyScriptFileName` tells them: called with hosts, it prints a rack each.

    Each host is asked for once. Not for several threads at once.
    """

    def __init__(
        self, script: str, *, argument_count_max: int = SCRIPT_ARGUMENT_COUNT_MAX, timeout_s: float = SCRIPT_TIMEOUT_S
    ) -> None:
        self.script = script
        self._argument_count_max = max(argument_count_max, 1)
        self._timeout_s = timeout_s
        self._racks: dict[str, str] = {}
        #: Bookies that were left out once, and said so.
        self._refused: set[str] = set()

    def racks(self, bookies: Iterable[RegisteredBookie]) -> dict[str, str]:
        """Bookie id → rack, as `/rack` or `/region/rack`; a bookie whose host is not known is left out. Blocks.

        So is a bookie that registered something else than a host: the script gets none of it.
        Raises BkctlError when the script fails or prints something else: a rack that is guessed wrong costs data.
        """
        hosts: dict[str, str] = {}
        for each in bookies:
            if each.address is None:
                continue
            if _HOST.fullmatch(each.address[0]):
                hosts[each.bookie_id] = each.address[0]
            elif each.bookie_id not in self._refused:
                self._refused.add(each.bookie_id)
                log.warning("Bookie %s registered no host: its rack is unknown", each.bookie_id)
        unknown = sorted({host for host in hosts.values() if host not in self._racks})
        for at in range(0, len(unknown), self._argument_count_max):
            some = unknown[at : at + self._argument_count_max]
            self._racks.update(zip(some, self._run(some), strict=True))
        return {bookie_id: self._racks[host] for bookie_id, host in hosts.items()}

    def _run(self, hosts: Sequence[str]) -> list[str]:
        what = f"Network topology script {self.script}"
        try:
            done = subprocess.run(
                [self.script, *hosts],
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
            raise BkctlError(f"{what} does not tell the racks: {error}") from error
        racks = done.stdout.split()
        if done.returncode or len(racks) != len(hosts):
            said = f"ended with {done.returncode}" if done.returncode else f"told {len(racks)} racks"
            raise BkctlError(f"{what} {said} for {len(hosts)} hosts", hint="it must print one rack for each argument")
        return racks


def choose_replacements(
    ledger: LedgerId,
    first_entry_id: int,
    ensemble: Sequence[str],
    indexes: Iterable[int],
    bookies: Sequence[RegisteredBookie],
    *,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
    racks: Mapping[str, str] = {},
) -> dict[int, str]:
    """Ensemble index → the bookie that takes it over, for each of `indexes`; `bookies` are the registered ones.

    It is writable, serves scopes where the ledger has one, stands nowhere in the ensemble nor in `exclude`; those in
    `avoid` come last. With `racks` it is, as long as there is one, in a rack that no other bookie of the ensemble is
    in, its predecessor's own before others. Chosen at random, but the same for the same ledger, fragment and bookies:
    who begins again after a crash comes to the bookie that has a part of the entries already.
    Raises NotEnoughBookies.
    """
    indexes = sorted(indexes)
    chosen: dict[int, str] = {}
    for index in indexes:
        taken = {*ensemble, *exclude, *chosen.values()}
        others = [each for at, each in enumerate(ensemble) if at not in indexes] + list(chosen.values())
        held = {racks[each] for each in others if each in racks}
        own = racks.get(ensemble[index])
        fitting = [each for each in bookies if racks.get(each.bookie_id) not in held]
        same = [each for each in fitting if own is not None and racks.get(each.bookie_id) == own]
        for tier in (same, fitting, bookies) if racks else (bookies,):
            rng = random.Random(f"{ledger} {first_entry_id} {index}")
            try:
                found = choose_bookies(tier, 1, scoped=ledger.is_scoped, exclude=taken, avoid=avoid, rng=rng)
            except NotEnoughBookies:
                if tier is bookies:
                    raise
            else:
                chosen[index] = found[0]
                break
    return chosen
