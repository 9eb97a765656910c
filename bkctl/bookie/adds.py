"""Adds of entries, one by one and in runs of one ledger. Source: WriteEntryProcessor, WriteEntryProcessorV3."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from bkctl.bookie.commit_dispatcher import CommitDispatcher
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.bookie.waiting_requests import WaitingRequests
from bkctl.ids import LedgerId
from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import AddRequest, AddResponse, Status
from bkctl.protocol.runs import AddRun, AnswerAdds
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.ledger.ledger_storage import NeedsDisk

_EOK: Final = Status.EOK


class AddHandler:
    """Puts entries into the storage's current batches; group commit answers them."""

    def __init__(
        self, storage: BookieStorage, state: BookieStateManager, commits: CommitDispatcher, requests: WaitingRequests
    ) -> None:
        self._storage = storage
        self._state = state
        self._commits = commits
        self._requests = requests
        self._waiting = requests.by_ledger

    def add(self, request: AddRequest, respond: Responder) -> None:
        """Serve one add. Raises ReadOnlyBookie, TooManyRequests and the errors of `BookieStorage.add`."""
        ledger, entry_id, master_key, body, recovery_add, high_priority, deferred_sync = request
        state = self._state
        if state.read_only and not (high_priority and state.takes_high_priority_writes):
            raise state.refuse_writes()
        assert not isinstance(body, tuple)
        if self._commits.is_behind and not high_priority:
            self._commits.check_pending()
        answer = functools.partial(_answer_add, respond, ledger, entry_id)
        if deferred_sync and not recovery_add:  # as Apache's recoveryAddEntry, which acknowledges nothing unsynced
            self._storage.add(ledger, entry_id, master_key, body, None, recovery_add)
            self._storage.when_written(ledger, lambda error: answer(_EOK if error is None else Status.EIO))
        else:
            self._storage.add(ledger, entry_id, master_key, body, answer, recovery_add)
        self._commits.flush_soon()

    def add_runs(self, runs: Sequence[AddRun], answer: AnswerAdds) -> None:
        """Serve runs of plain adds; each gets one answer, together with others where they share a journal.

        Raises ReadOnlyBookie and TooManyRequests.
        """
        if self._state.read_only:
            raise self._state.refuse_writes()
        if self._commits.is_behind:
            self._commits.check_pending()
        count = len(self._storage.journals)
        if count == 1 or len(runs) == 1:
            self._add_to_journal(runs, answer)
            return
        for journal in range(count):
            self._add_to_journal([run for run in runs if run.ledger.value % count == journal], answer)

    def _add_to_journal(self, runs: Sequence[AddRun], answer: AnswerAdds) -> None:
        """Add the entries of ledgers that share a journal, for which one token stands in its batch."""
        add_records, waiting = self._storage.add_records, self._waiting
        added: list[AddRun] = []
        token = functools.partial(answer, added)
        for run in runs:
            ledger, master_key, entry_ids, records, size, last_add_confirmed, _ = run
            if waiting and ledger in waiting:
                waiting[ledger].append(functools.partial(self._add_run_later, run, answer))
                continue
            try:
                add_records(ledger, master_key, entry_ids, records, size, last_add_confirmed, token)
            except NeedsDisk as need:
                self._requests.once_read(need, functools.partial(self._add_run_later, run, answer))
            except Exception as error:  # noqa: BLE001 - answered, logged and counted
                answer((run,), self._requests.status_after(AddRequest.__name__, error))
            else:
                added.append(run)
        if added:
            self._commits.flush_soon()

    def _add_run_later(self, run: AddRun, answer: AnswerAdds, error: BaseException | None) -> None:
        try:
            if error is not None:
                raise error
            self.add_runs((run,), answer)
        except Exception as failure:  # noqa: BLE001 - answered, logged and counted
            answer((run,), self._requests.status_after(AddRequest.__name__, failure))


def _answer_add(respond: Responder, ledger: LedgerId, entry_id: int, status: Status) -> None:
    respond(AddResponse(status, ledger, entry_id))
