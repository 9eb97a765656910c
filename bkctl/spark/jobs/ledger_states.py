"""The state of ledgers (alive, dead, unknown) according to the metadata store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from bkctl.errors import Unreachable
from bkctl.ids import LedgerId
from bkctl.metadata.liveness import Liveness
from bkctl.model import LedgerLiveness
from bkctl.spark.jobs.bookies import open_store
from bkctl.spark.jobs.frames import QUALIFIED_NAME
from bkctl.spark.schemas import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATES: Final = f"{QUALIFIED_NAME} string, state string, problem string, problemType string"
#: Ledgers in one question to the metadata store.
_QUESTION_ROWS: Final = 10_000


def ledger_states(ledgers: DataFrame, connection: Mapping[str, str]) -> DataFrame:
    """Return `state` (alive, dead, unknown) of each ledger in the column ledgerQualifiedName.

    `problem` says why a state is unknown, and `problemType` is the class of that error. The rows of `ledgers` must come
    from files: files are read before the store is asked, so a ledger created later never counts as dead. A store that
    cannot be reached fails the job (Unreachable).
    """

    def states_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with open_store(connection) as cluster:
            liveness = Liveness(cluster.ledgers)
            for batch in batches:
                for part in range(0, batch.num_rows, _QUESTION_ROWS):
                    yield _states(liveness, batch.column(0).slice(part, _QUESTION_ROWS).to_pylist())

    return ledgers.select(QUALIFIED_NAME).dropna().distinct().mapInArrow(states_of, _STATES)


def _states(liveness: Liveness, names: list[str]) -> pa.RecordBatch:
    by_name = {name: LedgerId.from_value(int(name, 16)) for name in names}
    states = liveness.states(by_name.values())
    for problem in liveness.problems:
        if isinstance(problem, Unreachable):
            raise problem
    reason = next(({"problem": str(each), "problemType": type(each).__name__} for each in liveness.problems), {})
    rows = []
    for name, ledger in by_name.items():
        unknown = states[ledger] is LedgerLiveness.UNKNOWN
        rows.append({QUALIFIED_NAME: name, "state": states[ledger].value, **(reason if unknown else {})})
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(_STATES))
