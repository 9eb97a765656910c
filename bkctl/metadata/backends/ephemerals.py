"""Ephemerals that outlive a session: remembered while they are held, and created again in the next session."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from bkctl.errors import BkctlError, NotFound


class Ephemerals:
    """The ephemerals of one store.

    `put(path, value)` creates or updates one and returns False when another session owns the node; `note_owner` is
    MetadataStore's; `delete(path)` deletes a node.
    """

    def __init__(
        self, put: Callable[[str, bytes], bool], note_owner: Callable[..., None], delete: Callable[[str], None]
    ) -> None:
        self._put = put
        self._note_owner = note_owner
        self._delete = delete
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def adding(self, path: str, value: bytes | None) -> Iterator[None]:
        """Remember the ephemeral (none without `value`); forget a new one when the block, which creates it, fails."""
        if value is None:
            yield
            return
        with self._lock:
            before = self._values.get(path)
            self._values[path] = value
        try:
            yield
        except BaseException:
            if before is None:
                self.forget(path)
            raise

    def forget(self, path: str) -> None:
        """Do not create the ephemeral at `path` again."""
        with self._lock:
            self._values.pop(path, None)

    def clear(self) -> None:
        """Do not create any ephemeral again."""
        with self._lock:
            self._values.clear()

    def restore(self) -> bool:
        """Create every ephemeral in a new session; return False when some need another attempt."""
        done = True
        for path, value in list(self._values.items()):
            try:
                is_ours = self._put(path, value)
                self._note_owner(path, is_ours=is_ours)
                done = is_ours and done
                if path not in self._values:  # Deleted meanwhile: it must not come back.
                    self._delete(path)
            except NotFound:
                continue
            except BkctlError:
                done = False
        return done
