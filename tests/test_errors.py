"""The error tree: every class has a documented exit code, and no two claim one wire status."""

from __future__ import annotations

import pickle

import pytest

from bkctl import errors


def classes(base: type[errors.BkctlError] = errors.BkctlError) -> list[type[errors.BkctlError]]:
    """The product's errors; a class that a test made may still be in memory."""
    children = [child for child in base.__subclasses__() if child.__module__.startswith("bkctl.")]
    return [base] + [found for child in children for found in classes(child)]


def test_every_error_has_a_documented_exit_code_and_a_docstring() -> None:
    for error in classes():
        assert error.exit_code in errors.EXIT_CODES, error
        assert error.__doc__, error


def test_wire_codes_map_to_the_classes_that_name_them() -> None:
    assert errors.BY_V2_CODE[104] is errors.LedgerFenced
    assert errors.BY_V3_CODE[402] is errors.LedgerNotFound
    assert len(errors.BY_V2_CODE) == len(errors.BY_V3_CODE)


def test_two_classes_that_claim_one_status_code_fail_at_import() -> None:
    with pytest.raises(TypeError, match="both claim status code 104"):
        type("Usurper", (errors.BkctlError,), {"v2_code": 104})


def test_the_hint_follows_the_message() -> None:
    assert str(errors.NotFound("Ledger 5 does not exist", hint="see 'bkctl ledger list'")) == (
        "Ledger 5 does not exist; see 'bkctl ledger list'"
    )


@pytest.mark.parametrize(
    "error",
    [
        errors.NotFound("Ledger 5 does not exist", hint="see 'bkctl ledger list'"),
        errors.CorruptRecord("Record has length -9", offset=1024, where="0.log", hint="run 'bkctl entrylog verify'"),
        errors.TruncatedRecord("an entry", offset=7, needed=36, present=3, where="0.log"),
        errors.MetadataVersionConflict("Ledger 5 changed", may_be_applied=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: errors.BkctlError) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is type(error)
        assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))


def test_on_error_undoes_after_an_error_alone_and_lets_the_first_one_through() -> None:
    undone: list[str] = []

    def undo(error: Exception | None = None) -> None:
        undone.append("undone")
        if error is not None:
            raise error

    with errors.on_error(undo):
        pass
    assert not undone
    with pytest.raises(KeyboardInterrupt), errors.on_error(undo):
        raise KeyboardInterrupt
    with pytest.raises(errors.NotFound), errors.on_error(lambda: undo(OSError()), OSError):
        raise errors.NotFound("first")
    with pytest.raises(ValueError, match="second"), errors.on_error(lambda: undo(ValueError("second")), OSError):
        raise errors.NotFound("first")
    assert len(undone) == 3
