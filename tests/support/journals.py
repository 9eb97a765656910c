"""Group commits without a journal thread."""

from __future__ import annotations

from bkctl.storage.bookie_storage import BookieStorage


def flush_journals(storage: BookieStorage) -> None:
    """Commit and settle the batches of all journals in the calling thread. Raises OSError."""
    for commits in storage.commits:
        batch = commits.take_batch()
        if batch is None:
            continue
        error = None
        try:
            commits.commit(batch)
        except OSError as failure:
            error = failure
        commits.settle(batch, error)
        if error is not None:
            raise error
