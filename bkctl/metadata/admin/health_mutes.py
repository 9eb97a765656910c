"""Mutes of health findings: codes that operators do not want to hear of, for a time or until further notice.

One node, `underreplication/bkctlHealthMutes`, holds all mutes of a cluster as JSON: code → since, until (milliseconds
since 1970, or null) and user. Apache's processes read only the nodes that they know below `underreplication`, and
remove that tree with the cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from bkctl.errors import Conflict, MetadataVersionConflict, NotFound
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import UNDERREPLICATION

MUTES: Final = f"{UNDERREPLICATION}/bkctlHealthMutes"
_ATTEMPTS: Final = 10


class Mute(NamedTuple):
    """A muted code. Times are in milliseconds since 1970; `until_ms` None: until it is unmuted."""

    code: str
    since_ms: int
    until_ms: int | None
    user: str


class HealthMutes:
    """The mutes of one cluster. A damaged node mutes nothing. Methods raise Unreachable."""

    def __init__(self, cluster: Cluster) -> None:
        self._store = cluster.store
        cluster.layout()

    def active(self) -> list[Mute]:
        """Return the mutes in effect, by code."""
        found = self._store.get(MUTES)
        return [] if found is None else self._parse(found.value)

    def mute(self, code: HealthCode, *, duration_s: float | None, user: str) -> Mute:
        """Mute a code for a time, or until it is unmuted; an older mute of the code is replaced."""
        now_ms = _now_ms()
        until_ms = None if duration_s is None else now_ms + round(1000 * duration_s)
        mute = Mute(code.value, now_ms, until_ms, user)
        self._change(lambda mutes: {**mutes, mute.code: mute})
        return mute

    def unmute(self, code: HealthCode) -> Mute:
        """End the mute of a code, and return it. Raises NotFound for a code that is not muted."""
        ended: list[Mute] = []

        def without(mutes: dict[str, Mute]) -> dict[str, Mute]:
            if code.value not in mutes:
                raise NotFound(f"{code.value} is not muted", hint="'bkctl cluster health mutes' lists the mutes")
            ended[:] = [mutes.pop(code.value)]
            return mutes

        self._change(without)
        return ended[0]

    def _change(self, change: Callable[[dict[str, Mute]], dict[str, Mute]]) -> None:
        for _ in range(_ATTEMPTS):
            found = self._store.get(MUTES)
            mutes = {} if found is None else {mute.code: mute for mute in self._parse(found.value)}
            value = json.dumps(
                {
                    mute.code: {"since": mute.since_ms, "until": mute.until_ms, "user": mute.user}
                    for mute in change(mutes).values()
                }
            )
            try:
                self._store.put(MUTES, value.encode(), NEW if found is None else found.version)
            except (Conflict, NotFound):  # Another command changed the mutes.
                continue
            return
        raise MetadataVersionConflict(f"{MUTES} in {self._store.name} changes all the time", hint="try again")

    @staticmethod
    def _parse(value: bytes) -> list[Mute]:
        try:
            mutes = [
                Mute(str(code), int(each["since"]), None if each["until"] is None else int(each["until"]), each["user"])
                for code, each in json.loads(value).items()
            ]
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        now_ms = _now_ms()
        return sorted(mute for mute in mutes if mute.until_ms is None or mute.until_ms > now_ms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
