from __future__ import annotations

import pytest

from bkctl.errors import BY_V2_CODE, BY_V3_CODE, EntryNotFound, LedgerFenced
from bkctl.ids import LedgerId
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    AuthMessage,
    BareResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoRequest,
    BookieInfoResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    StartTlsRequest,
    Status,
    WriteLacRequest,
    WriteLacResponse,
    error_for,
    refusal,
)

LEDGER = LedgerId(7, 1)


def test_v2_codes_match_bookie_protocol() -> None:
    assert {status.name: status.v2 for status in Status} == {
        "EOK": 0,
        "ENOLEDGER": 1,
        "ENOENTRY": 2,
        "EBADREQ": 100,
        "EIO": 101,
        "EUA": 102,
        "EBADVERSION": 103,
        "EFENCED": 104,
        "EREADONLY": 105,
        "ETOOMANYREQUESTS": 106,
        "EUNKNOWNLEDGERSTATE": 107,
    }


@pytest.mark.parametrize("status", list(Status))
def test_a_status_is_found_by_its_v2_code(status: Status) -> None:
    assert Status.from_v2(status.v2) is status


def test_an_unknown_v2_code_has_no_status() -> None:
    assert Status.from_v2(3) is None
    assert Status.from_v2(-1) is None


def test_every_failure_has_an_error_of_the_tree() -> None:
    for status in Status:
        if status is not Status.EOK:
            error = error_for(status, "Entry 3 of ledger 5", hint="look elsewhere")
            assert type(error) is BY_V3_CODE[status] is BY_V2_CODE[status.v2]
            assert str(error) == "Entry 3 of ledger 5; look elsewhere"
    assert isinstance(error_for(Status.EFENCED, ""), LedgerFenced)
    assert isinstance(error_for(Status.ENOENTRY, ""), EntryNotFound)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (AddRequest(LEDGER, 3, b"k", b"b"), AddResponse(Status.EIO, LEDGER, 3)),
        (ReadRequest(LEDGER, -1), ReadResponse(Status.EIO, LEDGER, -1)),
        (BatchReadRequest(LEDGER, 3, 9, 1, 1), BatchReadResponse(Status.EIO, LEDGER, 3, 9)),
        (WriteLacRequest(LEDGER, 3, b"k", b"b"), WriteLacResponse(Status.EIO, LEDGER)),
        (ReadLacRequest(LEDGER), ReadLacResponse(Status.EIO, LEDGER)),
        (ForceLedgerRequest(LEDGER), ForceLedgerResponse(Status.EIO, LEDGER)),
        (ListEntriesRequest(LEDGER), ListEntriesResponse(Status.EIO, LEDGER)),
        (BookieInfoRequest(3), BookieInfoResponse(Status.EIO)),
        (AuthMessage("p", b""), BareResponse(Status.EIO)),
        (StartTlsRequest(), BareResponse(Status.EIO)),
    ],
)
def test_a_refusal_is_of_the_kind_of_its_request(request_: AddRequest, expected: AddResponse) -> None:
    got = refusal(request_, Status.EIO)
    assert type(got) is type(expected)
    assert got == expected
