"""Group commits without a journal thread."""

from __future__ import annotations

from bkctl.storage.bookie_storage import BookieStorage


def flush_journals(storage: BookieStorage) -> None:
    """Commit and settle the batches of all journals in the calling thread. Raises OSError."""
    for number in range(len(storage.journals)):
        batch = storage.take_batch(number)
        if batch is None:
            continue
        error = None
        try:
            storage.commit(number, batch)
        except OSError as failure:
            error = failure
        storage.settle(number, batch, error)
        if error is not None:
            raise error
