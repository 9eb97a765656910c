"""Endpoints of auto-recovery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from starlette.responses import Response

from bkctl.errors import BkctlError, Conflict, NotFound, UsageError
from bkctl.http.endpoints import (
    BATCH_COUNT,
    BOOLEAN,
    LIMIT_MAX,
    PREFIX,
    SCOPES,
    STRING,
    TEXT,
    ApiCall,
    Body,
    Endpoints,
    Value,
    ValueKind,
    json_answer,
    list_of,
    map_of,
    object_of,
    scope_of,
    text_answer,
)
from bkctl.http.service import next_of
from bkctl.ids import LedgerId, check_bookie_id, to_signed
from bkctl.metadata.admin.auto_recovery import MarkFilter
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.underreplication import AutoRecoveryState

T = TypeVar("T")

ENDPOINTS: Final = Endpoints(of_bookie=False)

DELAY_S_MAX: Final = (1 << 31) - 1


_ENABLED: Final = object_of(enabled=BOOLEAN)
_BUSY: Final = "Another background request is running"


async def _ask(call: ApiCall, question: Callable[[AutoRecoveryState], T]) -> T:
    """Return the result of a function of auto-recovery's state, called in a thread."""
    cluster = await call.service.cluster()
    return await asyncio.to_thread(question, AutoRecoveryState(cluster.store))


@ENDPOINTS.get(f"{PREFIX}/autorecovery/status", "Whether auto-recovery is on.", answer=_ENABLED)
async def recovery_status(call: ApiCall) -> Response:
    return json_answer({"enabled": await _ask(call, lambda state: state.settings.is_enabled())})


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/status", "Switch auto-recovery on or off.",
    values=(Value("enabled", "true or false.", ValueKind.BOOLEAN, required=True),), answer=_ENABLED,
)  # fmt: skip
async def switch_recovery(call: ApiCall) -> Response:
    wanted = call.values["enabled"]

    def switch(state: AutoRecoveryState) -> bool:
        if state.settings.is_enabled() != wanted:
            (state.settings.enable if wanted else state.settings.disable)()
        return state.settings.is_enabled()

    return json_answer({"enabled": await _ask(call, switch)})


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/bookie", "Copy all that lost bookies hold to others, in every scope; in the background.",
    body=Body((
        Value("bookie_src", "The lost bookies.", ValueKind.TEXTS, required=True),
        Value("delete_cookie", "Delete their cookies once they hold nothing.", ValueKind.BOOLEAN),
    )),
    answer=TEXT, errors={409: "One of the bookies is registered", 503: _BUSY},
)  # fmt: skip
async def recover_bookie(call: ApiCall) -> Response:
    """Recover all of the bookies.

    Source: RecoveryBookieService, which recovers only the first one, and a running one as well: that closes its open
    ledgers under their writers.
    """
    bookies = [check_bookie_id(each) for each in call.body["bookie_src"]]
    if not bookies:
        raise UsageError("bookie_src names no bookie", hint='send {"bookie_src": ["HOST:PORT"]}')
    delete_cookie = call.body.get("delete_cookie", False)
    cluster = await call.service.cluster()
    for bookie_id in bookies:
        await _check_stopped(cluster, bookie_id)
    call.service.recover_in_background(bookies, delete_cookie=delete_cookie)
    return text_answer("Success send recovery request command.")


async def _check_stopped(cluster: Cluster, bookie_id: str) -> None:
    found = await asyncio.to_thread(cluster.bookies.get, bookie_id)
    if found is not None and found.state != "down":
        raise Conflict(
            f"Bookie {bookie_id} is registered ({found.state})",
            hint="stop it first, or move its ledgers with 'bkctl bookies drain'",
        )


@ENDPOINTS.get(
    f"{PREFIX}/autorecovery/list_under_replicated_ledger", "Ledgers that are marked under-replicated.",
    values=(
        Value("missingreplica", "Only ledgers that lack entries on this bookie."),
        Value("excludingmissingreplica", "Only ledgers that lack no entries on this bookie."),
        Value("printmissingreplica", "With the bookies that lack entries.", ValueKind.FLAG),
        SCOPES,
    ),
    answer={"oneOf": [list_of({"type": ["integer", "string"]}), map_of(list_of(STRING))]},
    errors={404: "No ledger is under-replicated"},
)  # fmt: skip
async def list_underreplicated(call: ApiCall) -> Response:
    """List the marked ledgers. Source: ListUnderReplicatedLedgerService."""
    missing, excluded = (call.values.get(name, "").strip() for name in ("missingreplica", "excludingmissingreplica"))
    marks = await _ask(call, lambda state: state.marks.list(scope_of(call)))

    chosen = MarkFilter([missing] if missing else (), [excluded] if excluded else ())
    found: dict[LedgerId, tuple[str, ...]] = {}
    while batch := await next_of(marks, BATCH_COUNT):
        for ledger, mark in batch:
            if not isinstance(mark, BkctlError):
                found |= {ledger: mark.missing_replicas} if chosen.matches(mark) else {}
            elif not missing and not excluded:
                found[ledger] = ()
        if len(found) > LIMIT_MAX:
            raise UsageError(f"More than {LIMIT_MAX} ledgers are under-replicated", hint="ask for one bookie's")
    if not found:
        raise NotFound("No under replicated ledgers found")
    if "printmissingreplica" in call.values:
        return json_answer({str(ledger): replicas for ledger, replicas in found.items()})
    return json_answer([str(each) if each.is_scoped else to_signed(each.ledger_id) for each in found])


@ENDPOINTS.get(
    f"{PREFIX}/autorecovery/who_is_auditor", "The auditor.", answer=TEXT, errors={404: "No auditor is elected"}
)
async def who_is_auditor(call: ApiCall) -> Response:
    auditor = await _ask(call, lambda state: state.election.auditor())
    if auditor is None:
        raise NotFound("No auditor elected", hint="start auto-recovery on some bookie")
    return text_answer(f"Auditor: {auditor}")


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/trigger_audit", "Have the auditor look for lost bookies now.", answer=TEXT,
    errors={404: "No auditor is elected", 409: "Auto-recovery is disabled"},
)  # fmt: skip
async def trigger_audit(call: ApiCall) -> Response:
    await _ask(call, lambda state: state.trigger_audit())
    return text_answer("Success trigger audit.")


@ENDPOINTS.get(
    f"{PREFIX}/autorecovery/lost_bookie_recovery_delay", "Seconds that the auditor waits for a lost bookie to return.",
    answer=TEXT, errors={404: "No delay is stored: the auditor's default applies"},
)  # fmt: skip
async def recovery_delay(call: ApiCall) -> Response:
    delay_s = await _ask(call, lambda state: state.settings.lost_bookie_recovery_delay_s())
    if delay_s is None:
        raise NotFound("No lostBookieRecoveryDelay is stored", hint="the auditor's default applies: 0 seconds")
    return text_answer(f"lostBookieRecoveryDelay value: {delay_s}")


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/lost_bookie_recovery_delay", "Set the seconds that the auditor waits for a lost bookie.",
    body=Body((Value("delay_seconds", "Seconds.", ValueKind.INTEGER, required=True, most=DELAY_S_MAX),)), answer=TEXT,
)  # fmt: skip
async def set_recovery_delay(call: ApiCall) -> Response:
    delay_s = call.body["delay_seconds"]
    await _ask(call, lambda state: state.settings.set_lost_bookie_recovery_delay_s(delay_s))
    return text_answer(f"Success set lostBookieRecoveryDelay to {delay_s}")


@ENDPOINTS.put(
    f"{PREFIX}/autorecovery/decommission", "Decommission a stopped bookie, in every scope; in the background.",
    body=Body((
        Value("bookie_src", "The bookie.", required=True),
        Value("delete_cookie", "Delete its cookie once it holds nothing.", ValueKind.BOOLEAN),
    )),
    answer=TEXT, errors={409: "The bookie is registered, or auto-recovery is disabled", 503: _BUSY},
)  # fmt: skip
async def decommission(call: ApiCall) -> Response:
    """Start a decommission. Source: DecommissionService."""
    bookie_id = check_bookie_id(call.body["bookie_src"])
    await _check_stopped(await call.service.cluster(), bookie_id)
    if not await _ask(call, lambda state: state.settings.is_enabled()):
        raise Conflict("Auto-recovery is disabled", hint="enable it first")
    call.service.decommission_in_background(bookie_id, delete_cookie=call.body.get("delete_cookie", False))
    return text_answer(f"Success send decommission Bookie command {bookie_id}")
