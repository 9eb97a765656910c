"""Health findings of our bookies, from the metrics that their HTTP servers publish."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from bkctl.http.bookie_client import BookieApi
from bkctl.http.bookie_load import Question
from bkctl.http.bookie_metrics import (
    CERTIFICATE_EXPIRY,
    REFUSED_LEDGERS,
    SET_ASIDE_LEDGERS,
    UNREADABLE_LEDGERS,
    UNREGISTERED_SECONDS,
)
from bkctl.http.prometheus import parse_metrics
from bkctl.http.server_url import bookie_url

if TYPE_CHECKING:
    from bkctl.http.client import ApiClient
    from bkctl.metadata.admin.health import HealthFinding
    from bkctl.metadata.cluster import RegisteredBookie


#: A certificate that expires sooner is a finding.
CERTIFICATE_DAYS_MIN: Final = 14
_DAY_S: Final = 86_400
_NAMES: Final = (SET_ASIDE_LEDGERS, REFUSED_LEDGERS, UNREADABLE_LEDGERS, UNREGISTERED_SECONDS, CERTIFICATE_EXPIRY)


def metrics_findings(
    bookies: Iterable[RegisteredBookie],
    client_of: Callable[[str], ApiClient],
    *,
    wait_s: float,
    host_of: Callable[[str], str | None] = lambda bookie_id: None,
) -> list[HealthFinding]:
    """Ask our bookies, all at once, for ledgers that they cannot serve and for certificates that expire.

    Return the findings of each bookie with some.

    `client_of` and `host_of` as in LoadWatch. A bookie without HTTP server, or without an answer within `wait_s`
    in all, has no finding: `disk_findings` reports bookies that do not answer.
    """
    from bkctl.metadata.admin.health import HealthFinding, Severity
    from bkctl.metadata.admin.health_codes import HealthCode

    def ask(bookie: RegisteredBookie) -> Question[dict[str, int]]:
        def read() -> dict[str, int]:
            api = BookieApi(client_of(bookie_url(bookie, host_of(bookie.bookie_id))))
            found: dict[str, int] = {}
            for each in parse_metrics(api.metrics()):
                if each.name in _NAMES and math.isfinite(each.value):
                    value = math.floor(each.value) if each.name == CERTIFICATE_EXPIRY else math.ceil(each.value)
                    found[each.name] = min(value, found.get(each.name, value))
            return found

        return Question(bookie.bookie_id, read)

    deadline_s = time.monotonic() + wait_s
    # Apache's bookies register no version.
    questions = [(each.bookie_id, ask(each)) for each in bookies if each.state != "down" and each.version is not None]
    findings = []
    for bookie_id, question in questions:
        question.join(max(0.0, deadline_s - time.monotonic()))
        counts = question.answer or {}
        set_aside, refused = counts.get(SET_ASIDE_LEDGERS, 0), counts.get(REFUSED_LEDGERS, 0)
        problems = []
        if set_aside:
            ledgers = "1 ledger is" if set_aside == 1 else f"{set_aside:,} ledgers are"
            problems.append(f"{ledgers} set aside and answered with EIO: their state on disk cannot be read")
        if refused:
            ledgers = "1 ledger accepts" if refused == 1 else f"{refused:,} ledgers accept"
            problems.append(f"{ledgers} no entries: the disk refuses their index")
        if problems:
            findings.append(HealthFinding(
                HealthCode.LEDGERS_SET_ASIDE, Severity.ERROR, bookie_id, "; ".join(problems),
                "its log names them: check its disks, and have other bookies copy them "
                "('bkctl autorecovery mark LEDGER')",
                {"setAsideLedgerCount": set_aside, "refusedLedgerCount": refused},
            ))  # fmt: skip
        if lost_s := counts.get(UNREGISTERED_SECONDS, 0):
            findings.append(HealthFinding(
                HealthCode.BOOKIE_UNREGISTERED, Severity.ERROR, bookie_id,
                f"It has not found its registration in the metadata store for {lost_s:,} s",
                "look at its network and at the metadata store: without registration clients and auto-recovery take "
                "it for lost",
                {"unregisteredSeconds": lost_s},
            ))  # fmt: skip
        if unreadable := counts.get(UNREADABLE_LEDGERS, 0):
            ledgers = "1 ledger" if unreadable == 1 else f"{unreadable:,} ledgers"
            findings.append(HealthFinding(
                HealthCode.LEDGERS_UNREADABLE, Severity.ERROR, bookie_id,
                f"Entries of {ledgers} could not be read within the last day",
                "its log names them: check its disks, run 'bkctl bookie check' there, and have other bookies copy them "
                "('bkctl autorecovery mark LEDGER')",
                {"unreadableLedgerCount": unreadable},
            ))  # fmt: skip
        left_s = counts.get(CERTIFICATE_EXPIRY)
        if left_s is not None and left_s < CERTIFICATE_DAYS_MIN * _DAY_S:
            days = left_s // _DAY_S
            when = "has expired" if left_s < 0 else f"expires in {days} {'day' if days == 1 else 'days'}"
            findings.append(HealthFinding(
                HealthCode.CERTIFICATE_EXPIRES, Severity.ERROR if left_s < 0 else Severity.WARNING, bookie_id,
                f"A TLS certificate of its servers {when}",
                "replace its files; a bookie with tlsCertFilesRefreshDurationSeconds loads them, else restart it",
                {"certificateExpirySeconds": left_s},
            ))  # fmt: skip
    return findings
