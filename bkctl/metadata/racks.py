"""The racks of bookies: the metadata store's, and those that a script prints.

Pulsar keeps group → bookie → rack and host name in the store, in JSON.
Source: Pulsar's BookieRackAffinityMapping, BookiesRackConfiguration, BookieInfo; BookKeeper's ScriptBasedMapping.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from bkctl.errors import BkctlError, Conflict, Corrupt, MetadataVersionConflict, NotFound, Unauthorized, UsageError
from bkctl.ids import check_bookie_id
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.store import NEW, RACKS, MetadataStore

GROUP_DEFAULT: Final = "default"
_ATTEMPTS: Final = 10
#: The largest age of the metadata store's racks that placement uses.
RACKS_AGE_S: Final = 10.0
#: Source: CommonConfigurationKeys.NET_TOPOLOGY_SCRIPT_NUMBER_ARGS_DEFAULT.
SCRIPT_ARGUMENT_COUNT_MAX: Final = 100
SCRIPT_TIMEOUT_S: Final = 30.0
#: A host name, an IPv4 or an IPv6 address; a leading `-` would be an option of the script.
_HOST: Final = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_:][A-Za-z0-9_.:-]*(?:%[A-Za-z0-9_.-]+)?", re.ASCII)

log: Final = logging.getLogger("bkctl.racks")


class BookieRack(NamedTuple):
    """The rack of a bookie, `/rack` or `/region/rack`, None where it is empty; `group` is Pulsar's isolation group."""

    bookie_id: str
    rack: str | None
    group: str
    hostname: str | None


class BookieRacks:
    """The racks that the metadata store of one cluster names. Methods raise Unreachable, and Corrupt for another node.

    Fields that bkctl does not know are kept.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._store = cluster.store
        cluster.layout()

    def all(self) -> list[BookieRack]:
        """Return the racks of all bookies that have one, by group and bookie id."""
        return read_racks(self._store)

    def set(
        self,
        bookie_ids: Iterable[str],
        rack: str,
        *,
        group: str = GROUP_DEFAULT,
        hostname: str | None = None,
        dry_run: bool = False,
    ) -> list[BookieRack]:
        """Put bookies into a rack and a group, and out of other groups; return them. Raises UsageError, Conflict.

        Without `hostname`, each bookie keeps its own. Source: BookiesRackConfiguration.updateBookie.
        """
        names = [check_bookie_id(name) for name in dict.fromkeys(bookie_ids)]
        checked = check_rack(rack)

        def change(groups: dict[str, dict[str, Any]]) -> list[BookieRack]:
            made = []
            for name in names:
                former = [bookies.pop(name) for bookies in groups.values() if name in bookies]
                info = {"hostname": None, **(former[0] if former else {}), "rack": checked}
                if hostname is not None:
                    info["hostname"] = hostname
                groups.setdefault(group, {})[name] = info
                made.append(_bookie_rack(group, name, info))
            return made

        return self._change(change, dry_run)

    def unset(self, bookie_ids: Iterable[str], *, dry_run: bool = False) -> list[BookieRack]:
        """Remove the racks of bookies, and return those that had one. Raises Conflict.

        Source: BookiesRackConfiguration.removeBookie.
        """
        names = list(dict.fromkeys(bookie_ids))

        def change(groups: dict[str, dict[str, Any]]) -> list[BookieRack]:
            removed = []
            for name in names:
                group = next((group for group, bookies in groups.items() if name in bookies), None)
                if group is not None:
                    removed.append(_bookie_rack(group, name, groups[group].pop(name)))
            return removed

        return self._change(change, dry_run)

    def _change(
        self, change: Callable[[dict[str, dict[str, Any]]], list[BookieRack]], dry_run: bool
    ) -> list[BookieRack]:
        for _ in range(_ATTEMPTS):
            found = self._store.get(RACKS)
            groups = {} if found is None else _parse(self._store, found.value)
            changed = change(groups)
            if dry_run or groups == ({} if found is None else _parse(self._store, found.value)):
                return changed
            value = json.dumps(groups, separators=(",", ":")).encode()
            try:
                self._store.put(RACKS, value, NEW if found is None else found.version)
            except (Conflict, NotFound):  # Another client changed the racks.
                continue
            return changed
        raise MetadataVersionConflict(
            f"The racks of bookies beside {self._store.name} change all the time", hint="try again"
        )


def read_racks(store: MetadataStore) -> list[BookieRack]:
    """Return the racks in a cluster's metadata store, by group and bookie id. Raises Unreachable, Corrupt."""
    found = store.get(RACKS)
    groups = {} if found is None else _parse(store, found.value)
    return [
        _bookie_rack(group, bookie_id, info)
        for group, bookies in sorted(groups.items())
        for bookie_id, info in sorted(bookies.items())
    ]


def _parse(store: MetadataStore, value: bytes) -> dict[str, dict[str, Any]]:
    try:
        groups = json.loads(value) if value else {}
    except (ValueError, RecursionError):
        groups = None
    if not isinstance(groups, dict) or not all(
        isinstance(bookies, dict) and all(isinstance(info, dict) for info in bookies.values())
        for bookies in groups.values()
    ):
        raise Corrupt(
            f"The node `bookies` beside {store.name} does not hold racks of bookies: it is not JSON of group → "
            "bookie → rack"
        )
    return groups


def racks_of(racks: Iterable[BookieRack], bookies: Iterable[RegisteredBookie]) -> dict[str, str]:
    """Return the rack of each bookie that has one, by bookie id.

    A bookie is found by its id, else by its registered address or host, which other bookies on that host share.
    """
    known: dict[str, str] = {}
    for each in racks:
        if each.rack is not None:
            known[each.bookie_id] = each.rack
            known.setdefault(each.bookie_id.rpartition(":")[0] or each.bookie_id, each.rack)
    found = {}
    for bookie in bookies:
        host, port = bookie.address or ("", 0)
        rack = known.get(bookie.bookie_id) or known.get(f"{host}:{port}") or known.get(host)
        if rack is not None:
            found[bookie.bookie_id] = rack
    return found


class Topology:
    """The racks of bookies, from the script `networkTopologyScriptFileName`: it prints a rack for each host argument.

    The script gets each host once. Not thread-safe.
    """

    def __init__(self, script: str) -> None:
        self.script = script
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
        for at in range(0, len(unknown), SCRIPT_ARGUMENT_COUNT_MAX):
            batch = unknown[at : at + SCRIPT_ARGUMENT_COUNT_MAX]
            self._racks.update(zip(batch, self._run(batch), strict=True))
        return {bookie_id: self._racks[host] for bookie_id, host in hosts.items()}

    def _run(self, hosts: Sequence[str]) -> list[str]:
        what = f"Network topology script {self.script}"
        try:
            done = subprocess.run(
                [self.script, *hosts],
                capture_output=True,
                text=True,
                timeout=SCRIPT_TIMEOUT_S,
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


class KnownRacks:
    """The racks of a cluster's bookies, for placement; the metadata store's are at most RACKS_AGE_S old. Thread-safe.

    `script` prints racks, which count first. With `must_be_known`, racks that cannot be read are an error.
    """

    def __init__(self, store: MetadataStore, script: str | None = None, *, must_be_known: bool = False) -> None:
        self._store = store
        self._topology = Topology(script) if script else None
        self._must_be_known = must_be_known
        self._lock = threading.Lock()
        self._stored: list[BookieRack] = []
        self._read_at_s = float("-inf")
        self._problem: str | None = None

    def racks(self, bookies: Iterable[RegisteredBookie]) -> dict[str, str]:
        """Return the rack of each bookie that has one, by bookie id. Blocks.

        Raises Unreachable, and BkctlError if the script fails. Other racks than Pulsar's at its node, or ones that the
        user must not read, are logged, and the racks read before count, unless racks must be known.
        """
        bookies = list(bookies)
        with self._lock:
            if time.monotonic() - self._read_at_s > RACKS_AGE_S:
                self._read()
            found = racks_of(self._stored, bookies)
            if self._topology is not None:
                found.update(self._topology.racks(bookies))
            return found

    def groups(self) -> dict[str, set[str]]:
        """Return the ids of the bookies in each of Pulsar's groups, as `racks` read them last."""
        found: dict[str, set[str]] = {}
        for each in self._stored:
            found.setdefault(each.group, set()).add(each.bookie_id)
        return found

    def _read(self) -> None:
        try:
            self._stored, self._problem = read_racks(self._store), None
        except (Corrupt, Unauthorized) as error:
            if self._must_be_known:
                raise
            if self._problem != error.message:
                self._problem = error.message
                log.warning("Racks of bookies are unknown: %s", error)
        self._read_at_s = time.monotonic()


def check_rack(text: str) -> str:
    """Return a rack as `/rack` or `/region/rack`. Raises UsageError for another form."""
    rack = "/" + text.strip().removeprefix("/")
    if not all(part and part.isprintable() and not part.isspace() for part in rack[1:].split("/")):
        raise UsageError(f"Not a rack: {text!r}", hint="write it as /rack or /region/rack")
    return rack


def _bookie_rack(group: str, bookie_id: str, info: dict[str, Any]) -> BookieRack:
    """Return the rack as placement uses it, None for an empty one. Source: BookieRackAffinityMapping.getRack."""
    rack, hostname = (value if isinstance(value := info.get(name), str) else None for name in ("rack", "hostname"))
    rack = (rack or "").strip().removeprefix("/")
    return BookieRack(bookie_id, f"/{rack}" if rack else None, group, hostname)
