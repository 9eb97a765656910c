"""Values that commands take, and nouns in their number."""

import pytest

from bkctl.commands.kit.texts import counted
from bkctl.commands.kit.values import refuse_both
from bkctl.errors import UsageError


@pytest.mark.parametrize("value", [0, 1, True, "x", ["x"]])
def test_two_values_that_exclude_each_other_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"^--from and --last are given"):
        refuse_both("--from", value, "--last", 5)


@pytest.mark.parametrize("value", [None, False, "", []])
def test_a_value_that_is_not_given_is_not_refused(value: object) -> None:
    refuse_both("--from", value, "--last", 5)
    refuse_both("--from", 5, "--last", value)


def test_counts_have_the_noun_in_its_number() -> None:
    assert [counted(count, "entry") for count in (0, 1, 2_000)] == ["0 entries", "1 entry", "2,000 entries"]
    assert [counted(count, "log") for count in (1, 2)] == ["1 log", "2 logs"]
    assert [counted(count, "day") for count in (1, 5)] == ["1 day", "5 days"]
    assert counted(2, "ledger was", "ledgers were") == "2 ledgers were"
