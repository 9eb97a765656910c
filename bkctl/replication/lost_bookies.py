"""Decides when the auditor acts upon the loss of bookies, with the lost-bookie recovery delay."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum


class Decision(Enum):
    """The consequence of a change."""

    NOTHING = "nothing"
    #: Look for lost bookies now.
    AUDIT = "audit"
    #: Look for lost bookies once the delay is over, counted from now.
    AUDIT_LATER = "audit later"
    #: Drop the audit that was put off.
    CANCEL = "cancel"


class LostBookies:
    """Tracks lost bookies and the delay. It has no clock: the caller waits.

    A single lost bookie is given the delay to restart; if several are lost, the audit begins at once. Source:
    Auditor.submitAuditTask, submitLostBookieRecoveryDelayChangedEvent.
    """

    def __init__(self, known: Iterable[str], delay_s: int) -> None:
        self._known = set(known)
        self._delay_s = delay_s
        #: Lost bookies whose delay runs.
        self.waiting: set[str] = set()
        #: The numbers of audits that were put off, and of those that were dropped.
        self.delayed_count = 0
        self.cancelled_count = 0

    @property
    def is_pending(self) -> bool:
        """True while an audit waits for the delay."""
        return bool(self.waiting)

    def bookies_changed(self, available: Collection[str], delay_s: int) -> Decision:
        """Decide for the bookies that are available now, with a delay of `delay_s`."""
        was_pending = self.is_pending
        back = self.waiting & set(available)
        self.waiting -= back
        self._known |= set(available)
        gone = self._known - set(available)
        self._known -= gone
        self.waiting |= gone
        if not self.waiting:
            if was_pending:
                self.cancelled_count += 1
            return Decision.CANCEL if was_pending else Decision.NOTHING
        if not gone:
            return Decision.NOTHING
        if delay_s == 0 or len(self.waiting) > 1:
            self.cancelled_count += was_pending
            self.waiting.clear()
            return Decision.AUDIT
        self.delayed_count += 1
        return Decision.AUDIT_LATER

    def delay_written(self, delay_s: int) -> Decision:
        """Decide after an operator wrote the delay; 0, or the previous value, requests an audit now."""
        before, self._delay_s = self._delay_s, delay_s
        was_pending = self.is_pending
        self.cancelled_count += was_pending
        if delay_s in (0, before):
            self.waiting.clear()
            return Decision.AUDIT
        self.delayed_count += was_pending
        return Decision.AUDIT_LATER if was_pending else Decision.NOTHING

    def delay_over(self) -> None:
        """Forget the waiting bookies: the audit that was put off begins."""
        self.waiting.clear()
