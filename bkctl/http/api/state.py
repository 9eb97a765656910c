"""Endpoints of a bookie's state: running, read-only, disks, sanity."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from bkctl.client.trials import SANITY_ENTRY_COUNT, sanity_test
from bkctl.errors import BkctlError
from bkctl.http.endpoints import (
    BOOLEAN,
    INTEGER,
    PREFIX,
    TEXT,
    ApiCall,
    Body,
    Endpoints,
    Value,
    ValueKind,
    json_answer,
    object_of,
    text_answer,
)
from bkctl.http.service import ServiceUnavailable

if TYPE_CHECKING:
    from bkctl.bookie.bookie import Bookie


ENDPOINTS: Final = Endpoints(of_bookie=True)

#: The longest sanity test. Source: SanityTestCommand.
SANITY_TIMEOUT_S: Final = 30.0
#: The longest wait for another sanity test. Source: BookieSanityService.
SANITY_WAIT_S: Final = 5.0


@ENDPOINTS.get(
    f"{PREFIX}/bookie/state", "The state of the bookie: running, writable, stopping.",
    answer=object_of(running=BOOLEAN, readOnly=BOOLEAN, shuttingDown=BOOLEAN, availableForHighPriorityWrites=BOOLEAN),
    probe=True,
)  # fmt: skip
async def state(call: ApiCall) -> Response:
    return json_answer(await call.service.bookie.ask(lambda bookie: bookie.state()))


_READ_ONLY: Final = object_of(readOnly=BOOLEAN)


@ENDPOINTS.get(f"{PREFIX}/bookie/state/readonly", "Whether the bookie is read-only.", answer=_READ_ONLY)
async def read_only(call: ApiCall) -> Response:
    return json_answer({"readOnly": await call.service.bookie.ask(lambda bookie: bookie.read_only)})


@ENDPOINTS.put(
    f"{PREFIX}/bookie/state/readonly", "Make the bookie read-only, or writable again.",
    body=Body((Value("readOnly", "true or false.", ValueKind.BOOLEAN, required=True),)), answer=_READ_ONLY,
)  # fmt: skip
async def set_read_only(call: ApiCall) -> Response:
    """Switch read-only mode; answer 400 if it is forced or disabled. Source: BookieStateReadOnlyService."""
    wanted = call.body["readOnly"]

    async def switch(bookie: Bookie) -> bool:
        if bookie.read_only != wanted:
            await bookie.set_read_only(wanted)
        return bookie.read_only

    return json_answer({"readOnly": await call.service.bookie.do(switch)})


@ENDPOINTS.get(
    f"{PREFIX}/bookie/is_ready", "Whether the bookie serves.",
    answer=TEXT, errors={503: "The bookie is starting or stopping, or not registered for zkTimeout"}, probe=True,
)  # fmt: skip
async def is_ready(call: ApiCall) -> Response:
    found, is_lost = await call.service.bookie.ask(lambda bookie: (bookie.state(), bookie.registration.is_over))
    if found["running"] and not found["shuttingDown"] and is_lost:
        raise ServiceUnavailable("Bookie has lost its registration in the metadata store")
    if not found["running"] or found["shuttingDown"]:
        raise ServiceUnavailable("Bookie is not fully started yet")
    return text_answer("OK")


@ENDPOINTS.get(
    f"{PREFIX}/bookie/info", "Free and total bytes of the ledger disks.",
    answer=object_of(freeSpace=INTEGER, totalSpace=INTEGER),
)  # fmt: skip
async def info(call: ApiCall) -> Response:
    directories, files = await call.service.bookie.ask(
        lambda bookie: (list(bookie.storage.ledger_directories), bookie.files)
    )
    usages = await asyncio.to_thread(lambda: list(map(files.disk_usage, directories)))
    disks = {usage.device: usage for usage in usages}.values()
    return json_answer({"freeSpace": sum(each.free for each in disks), "totalSpace": sum(each.total for each in disks)})


@ENDPOINTS.get(
    f"{PREFIX}/bookie/sanity", "Write, read and delete a ledger on this bookie alone.",
    answer=object_of(passed=BOOLEAN, readOnly=BOOLEAN), timeout_s=SANITY_WAIT_S + SANITY_TIMEOUT_S + 5,
    acts=True,
)  # fmt: skip
async def sanity(call: ApiCall) -> Response:
    """Run a sanity test; a failed one is an answer too. Source: BookieSanityService, SanityTestCommand."""
    service = call.service
    if await service.bookie.ask(lambda bookie: bookie.read_only):
        return json_answer({"passed": False, "readOnly": True})
    try:
        async with asyncio.timeout(SANITY_WAIT_S):
            await service.sanity.acquire()
    except TimeoutError as error:
        raise ServiceUnavailable("Another sanity test is running", hint="try again later") from error
    try:
        client = await service.bookkeeper_of_one(service.bookie.bookie_id)
        async with asyncio.timeout(SANITY_TIMEOUT_S), client:
            await sanity_test(client, ledger_scope_id=0, entry_count=SANITY_ENTRY_COUNT)
        passed = True
    except (BkctlError, TimeoutError):
        passed = False
    finally:
        service.sanity.release()
    return json_answer({"passed": passed, "readOnly": False})
