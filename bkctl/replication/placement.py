"""Chooses the replacements of bookies in a fragment's ensemble.

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
#: A host name, an IPv4 or an IPv6 address; a leading `-` would be an option of the script.
_HOST: Final = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_:][A-Za-z0-9_.:-]*(?:%[A-Za-z0-9_.-]+)?", re.ASCII)

log: Final = logging.getLogger("bkctl.replication")


class Topology:
    """The racks of bookies, from the script `networkTopologyScriptFileName`: it prints a rack for each host argument.

    The script gets each host once. Not thread-safe.
    """

    def __init__(
        self, script: str, *, argument_count_max: int = SCRIPT_ARGUMENT_COUNT_MAX, timeout_s: float = SCRIPT_TIMEOUT_S
    ) -> None:
        self.script = script
        self._argument_count_max = max(argument_count_max, 1)
        self._timeout_s = timeout_s
        self._racks: dict[str, str] = {}
        #: Bookies without a valid host, which were logged once.
        self._refused: set[str] = set()

    def racks(self, bookies: Iterable[RegisteredBookie]) -> dict[str, str]:
        """Return the rack of each bookie, as `/rack` or `/region/rack`, by bookie id. Blocks.

        A bookie with an unknown or invalid host is left out; the script never gets an invalid host.
        Raise BkctlError if the script fails or prints anything else: a wrong rack would cost data.
        """
        hosts: dict[str, str] = {}
        for bookie in bookies:
            if bookie.address is None:
                continue
            if _HOST.fullmatch(bookie.address[0]):
                hosts[bookie.bookie_id] = bookie.address[0]
            elif bookie.bookie_id not in self._refused:
                self._refused.add(bookie.bookie_id)
                log.warning("Bookie %s registered no valid host: its rack is unknown", bookie.bookie_id)
        unknown = sorted({host for host in hosts.values() if host not in self._racks})
        for at in range(0, len(unknown), self._argument_count_max):
            batch = unknown[at : at + self._argument_count_max]
            self._racks.update(zip(batch, self._run(batch), strict=True))
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
            raise BkctlError(f"{what} failed: {error}") from error
        racks = done.stdout.split()
        if done.returncode or len(racks) != len(hosts):
            said = f"ended with exit code {done.returncode}" if done.returncode else f"printed {len(racks)} racks"
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
    """Return a replacement for the bookie at each of `indexes`, chosen among the registered `bookies`.

    A replacement is writable, serves ledger scopes if the ledger has one, and is neither in the ensemble nor in
    `exclude`; bookies in `avoid` come last. With `racks`, a rack without other bookies of the ensemble is preferred,
    and among these the predecessor's own. The choice is random, but the same for the same ledger, fragment and bookies:
    a second attempt after a crash gets the bookie that has part of the entries. Raise NotEnoughBookies.
    """
    indexes = sorted(indexes)
    chosen: dict[int, str] = {}
    for index in indexes:
        excluded = {*ensemble, *exclude, *chosen.values()}
        remaining = [bookie_id for at, bookie_id in enumerate(ensemble) if at not in indexes] + list(chosen.values())
        used_racks = {racks[bookie_id] for bookie_id in remaining if bookie_id in racks}
        own = racks.get(ensemble[index])
        in_free_racks = [bookie for bookie in bookies if racks.get(bookie.bookie_id) not in used_racks]
        in_own_rack = [bookie for bookie in in_free_racks if own is not None and racks.get(bookie.bookie_id) == own]
        for tier in (in_own_rack, in_free_racks, bookies) if racks else (bookies,):
            rng = random.Random(f"{ledger} {first_entry_id} {index}")
            try:
                found = choose_bookies(tier, 1, scoped=ledger.is_scoped, exclude=excluded, avoid=avoid, rng=rng)
            except NotEnoughBookies:
                if tier is bookies:
                    raise
            else:
                chosen[index] = found[0]
                break
    return chosen
