"""The racks of bookies in the metadata store, as Pulsar keeps them: group → bookie → rack and host name, in JSON.

Source: Pulsar's BookieRackAffinityMapping, BookiesRackConfiguration, BookieInfo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from bkctl.errors import Conflict, Corrupt, MetadataVersionConflict, NotFound, UsageError
from bkctl.ids import check_bookie_id
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.store import NEW, RACKS

GROUP_DEFAULT: Final = "default"
_ATTEMPTS: Final = 10


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
        found = self._store.get(RACKS)
        groups = {} if found is None else self._parse(found.value)
        return [
            _bookie_rack(group, bookie_id, info)
            for group, bookies in sorted(groups.items())
            for bookie_id, info in sorted(bookies.items())
        ]

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
        """Remove the racks of bookies, all or none, and return them. Raises NotFound, Conflict.

        Source: BookiesRackConfiguration.removeBookie.
        """
        names = list(dict.fromkeys(bookie_ids))

        def change(groups: dict[str, dict[str, Any]]) -> list[BookieRack]:
            removed = []
            for name in names:
                group = next((group for group, bookies in groups.items() if name in bookies), None)
                if group is None:
                    raise NotFound(f"Bookie {name} has no rack", hint="'bkctl bookies racks list' shows the racks")
                removed.append(_bookie_rack(group, name, groups[group].pop(name)))
            return removed

        return self._change(change, dry_run)

    def _change(
        self, change: Callable[[dict[str, dict[str, Any]]], list[BookieRack]], dry_run: bool
    ) -> list[BookieRack]:
        for _ in range(_ATTEMPTS):
            found = self._store.get(RACKS)
            groups = {} if found is None else self._parse(found.value)
            changed = change(groups)
            if dry_run or (found is not None and self._parse(found.value) == groups):
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

    def _parse(self, value: bytes) -> dict[str, dict[str, Any]]:
        try:
            groups = json.loads(value) if value else {}
        except (ValueError, RecursionError) as error:
            raise self._corrupt() from error
        if not isinstance(groups, dict) or not all(
            isinstance(bookies, dict) and all(isinstance(info, dict) for info in bookies.values())
            for bookies in groups.values()
        ):
            raise self._corrupt()
        return groups

    def _corrupt(self) -> Corrupt:
        return Corrupt(
            f"The node `bookies` beside {self._store.name} does not hold racks of bookies: it is not JSON of group → "
            "bookie → rack"
        )


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


def check_rack(text: str) -> str:
    """Return a rack as `/rack` or `/region/rack`. Raises UsageError for another form."""
    rack = "/" + text.strip().removeprefix("/")
    if not all(part and part.isprintable() and not part.isspace() for part in rack[1:].split("/")):
        raise UsageError(f"Not a rack: {text!r}", hint="write it as /rack or /region/rack")
    return rack


def _bookie_rack(group: str, bookie_id: str, info: dict[str, Any]) -> BookieRack:
    return BookieRack(bookie_id, _rack(info), group, _text(info, "hostname"))


def _rack(info: dict[str, Any]) -> str | None:
    """Return the rack as placement uses it, None for an empty one. Source: BookieRackAffinityMapping.getRack."""
    rack = (_text(info, "rack") or "").strip()
    if rack in ("", "/"):
        return None
    return rack if rack.startswith("/") else f"/{rack}"


def _text(info: dict[str, Any], name: str) -> str | None:
    value = info.get(name)
    return value if isinstance(value, str) else None
