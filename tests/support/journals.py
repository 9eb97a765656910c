"""Group commits without a journal thread."""

from __future__ import annotations

from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.journal_writer import JournalBatch, JournalCommits


def commit_batch(commits: JournalCommits) -> OSError | None:
    """Commit the batch of a journal in the calling thread, and report the outcome to its callers; return the error."""
    batch = commits.take_batch()
    error = None
    if batch is not None:
        try:
            commits.commit(batch)
        except OSError as failure:
            error = failure
        settle(commits, batch, error)
    return error


def settle(commits: JournalCommits, batch: JournalBatch, error: OSError | None) -> None:
    """Report the outcome of `commit` to the callers that wait for it."""
    for call in commits.settle(batch, error):
        call(error)


def flush_journals(storage: BookieStorage) -> None:
    """Commit and settle the batches of all journals in the calling thread. Raises OSError."""
    for commits in storage.commits:
        if (error := commit_batch(commits)) is not None:
            raise error
