"""Settings of auto-recovery in the metadata store: the switch, the delay before a bookie counts as lost, the clocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Final

from bkctl.errors import AlreadyExists, Corrupt, UsageError
from bkctl.formats.metadata import parse_message
from bkctl.metadata.store import MetadataStore, create_if_missing, delete_if_present, watch_all
from bkctl.metadata.underreplication.layout import DISABLE, UNDERREPLICATION, UnderreplicationLayout, base_path

_DELAY: Final = f"{UNDERREPLICATION}/lostBookieRecoveryDelay"
_DELAY_S_MAX: Final = (1 << 31) - 1
_NUMBER: Final = re.compile(rb"[+-]?[0-9]{1,10}")


class AuditorCheck(Enum):
    """The auditor's periodic checks; the value is the name of the node that keeps the time of the last run."""

    ALL_LEDGERS = "checkallledgersctime"
    PLACEMENT_POLICY = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


class AutoRecoverySettings:
    """The settings of one cluster's auto-recovery. Methods raise Unreachable, as `MetadataStore`."""

    def __init__(self, store: MetadataStore, layout: UnderreplicationLayout | None = None) -> None:
        self.store = store
        self._layout = layout or UnderreplicationLayout(store)

    def is_enabled(self) -> bool:
        """Return whether auto-recovery is on."""
        return self.store.get(DISABLE) is None

    def disable(self) -> None:
        """Switch auto-recovery off. Raises AlreadyExists when it is off."""
        self._layout.prepare()
        if not create_if_missing(self.store, DISABLE, b""):
            raise AlreadyExists("Auto-recovery is disabled already")

    def enable(self) -> None:
        """Switch auto-recovery on. Raises AlreadyExists when it is on."""
        if not delete_if_present(self.store, DISABLE):
            raise AlreadyExists("Auto-recovery is enabled already")

    def lost_bookie_recovery_delay_s(self) -> int | None:
        """Return the seconds that the auditor waits before a missing bookie counts as lost.

        None: no delay is stored, and the auditor uses its default, 0. Raises Corrupt for a value that is not a number.
        """
        found = self.store.get(_DELAY)
        if found is None:
            return None
        if not _NUMBER.fullmatch(found.value):
            raise Corrupt(f"{_DELAY} in {self.store.name} is {found.value[:40]!r}, not a number of seconds")
        return int(found.value)

    def set_lost_bookie_recovery_delay_s(self, seconds: int) -> None:
        """Store the delay, 0 too: the write alone makes auditors start an audit. Raises UsageError."""
        if not 0 <= seconds <= _DELAY_S_MAX:
            raise UsageError(f"A recovery delay of {seconds} s is not between 0 and {_DELAY_S_MAX}")
        self._layout.prepare()
        self.store.put(_DELAY, b"%d" % seconds, None)

    def initialize_lost_bookie_recovery_delay_s(self, seconds: int) -> int:
        """Store the delay where none is stored; return the stored one. Source: initializeLostBookieRecoveryDelay."""
        self._layout.prepare()
        create_if_missing(self.store, _DELAY, b"%d" % seconds)
        return self.lost_bookie_recovery_delay_s() or 0

    def delay_version(self) -> int | None:
        """Return the version of the stored delay, None without one; every write gives another, equal values too."""
        found = self.store.get(_DELAY)
        return None if found is None else found.version

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` when the delay is written or auto-recovery is switched; see MetadataStore.watch."""
        return watch_all(self.store.watch(path, callback) for path in (_DELAY, DISABLE))

    def check_ctime_ms(self, check: AuditorCheck, *, scoped: bool = False) -> int | None:
        """Return the time of the check's last run in ms since 1970, None before the first run.

        `scoped`: by the auditor of the scopes ≠ 0. Raises Corrupt.
        """
        from bkctl.formats.data_formats_pb2 import CheckClockFormat

        path = f"{base_path(scoped)}/{check.value}"
        found = self.store.get(path)
        if found is None:
            return None
        message = parse_message(CheckClockFormat, found.value, f"{path} in {self.store.name}: Clock")
        return message.ctime if message.HasField("ctime") and message.ctime >= 0 else None

    def set_check_ctime_ms(self, check: AuditorCheck, ctime_ms: int, *, scoped: bool = False) -> None:
        """Store the time of the check's last run (-1: never); the next auditor waits for the interval from then.

        Source: setCheckAllLedgersCTime, setPlacementPolicyCheckCTime, setReplicasCheckCTime.
        """
        from bkctl.formats.data_formats_pb2 import CheckClockFormat

        self._layout.prepare()
        value = CheckClockFormat(ctime=ctime_ms).SerializeToString()
        self.store.put(f"{base_path(scoped)}/{check.value}", value, None)
