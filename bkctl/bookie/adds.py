"""Adds of entries, one by one and in runs of one ledger. Source: WriteEntryProcessor, WriteEntryProcessorV3."""

from __future__ import annotations

import functools
from typing import Final

from bkctl.bookie.commit_dispatcher import CommitDispatcher
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.bookie.waiting_requests import WaitingRequests
from bkctl.ids import LedgerId
from bkctl.protocol.add_runs import AddRun, AnswerAdds
from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import AddRequest, AddResponse, Status
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

    def add_run(self, adds: AddRun, answer: AnswerAdds) -> None:
        """Serve a run of plain adds: `answer` is called once for all of them.

        Raises ReadOnlyBookie and TooManyRequests.
        """
        if self._state.read_only:
            raise self._state.refuse_writes()
        if self._commits.is_behind:
            self._commits.check_pending()
        ledger, master_key, entry_ids, records, size, last_add_confirmed, _ = adds
        if self._waiting and ledger in self._waiting:
            self._waiting[ledger].append(functools.partial(self._add_run_later, adds, answer))
            return
        try:
            self._storage.add_records(ledger, master_key, entry_ids, records, size, last_add_confirmed, answer)
        except NeedsDisk as need:
            self._requests.once_read(need, functools.partial(self._add_run_later, adds, answer))
        except Exception as error:  # noqa: BLE001 - answered, logged and counted
            answer(self._requests.status_after(AddRequest.__name__, error))
        else:
            self._commits.flush_soon()

    def _add_run_later(self, adds: AddRun, answer: AnswerAdds, error: BaseException | None) -> None:
        """Serve a run of adds that waited for its ledger."""
        try:
            if error is not None:
                raise error
            self.add_run(adds, answer)
        except Exception as failure:  # noqa: BLE001 - answered, logged and counted
            answer(self._requests.status_after(AddRequest.__name__, failure))


def _answer_add(respond: Responder, ledger: LedgerId, entry_id: int, status: Status) -> None:
    respond(AddResponse(status, ledger, entry_id))
