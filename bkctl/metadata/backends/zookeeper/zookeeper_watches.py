"""Watches on ZooKeeper, armed again after each event, and the thread that serves them and restores ephemerals."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from kazoo.exceptions import NoNodeError

from bkctl.errors import BkctlError
from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection
from bkctl.metadata.store import check_path

_RESTORE_PAUSE_S: Final = 0.5

#: A full path, and whether its children are watched.
_Place: TypeAlias = tuple[str, bool]


class _Watch(NamedTuple):
    path: str
    children: bool
    callback: Callable[[], None]


class ZooKeeperWatches:
    """The watches of one store. `restore` creates the ephemerals again; False: it needs another attempt."""

    def __init__(self, connection: ZooKeeperConnection, restore: Callable[[], bool]) -> None:
        self._connection = connection
        connection.on_new_session = lambda: self._events.put(None)
        self._restore = restore
        self._lock = threading.RLock()
        self._watches: dict[int, _Watch] = {}
        self._watch_id = 0
        #: Places that changed; None: restore the ephemerals.
        self._events: queue.Queue[_Place | None] = queue.Queue()
        #: kazoo keeps each callback until its node changes, also of cancelled watches, but equal ones only once.
        self._callbacks: weakref.WeakValueDictionary[_Place, Callable[[object], None]] = weakref.WeakValueDictionary()
        self._thread: threading.Thread | None = None

    def add(self, path: str, callback: Callable[[], None], children: bool) -> Callable[[], None]:
        """See MetadataStore.watch."""
        with self._lock:
            self._watch_id += 1
            watch_id = self._watch_id
            self._watches[watch_id] = _Watch(check_path(path), children, callback)
        self.start_thread()

        def cancel() -> None:
            with self._lock:
                self._watches.pop(watch_id, None)

        try:
            self._arm(watch_id)
        except BaseException:
            cancel()
            raise
        return cancel

    def _arm(self, watch_id: int) -> None:
        watch = self._watches.get(watch_id)
        if watch is None:
            return
        client = self._connection.client
        place = full, _ = self._place(watch)
        changed = self._callback(place)
        if watch.children:
            with contextlib.suppress(NoNodeError):
                self._connection.run(partial(client.get_children_async, watch=changed), full)
                return
        self._connection.run(partial(client.exists_async, watch=changed), full)

    def _place(self, watch: _Watch) -> _Place:
        return self._connection.full(watch.path), watch.children

    def _callback(self, place: _Place) -> Callable[[object], None]:
        """Return the one callback that all watches of `place` share."""

        def changed(_: object) -> None:
            self._events.put(place)

        with self._lock:
            return self._callbacks.setdefault(place, changed)

    def start_thread(self) -> None:
        """Start the thread `metadata-store`, unless it runs or the connection is closed."""
        with self._lock:
            if self._thread is None and not self._connection.is_closed:
                self._thread = threading.Thread(target=self._serve, name="metadata-store", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        restored = True
        unarmed: set[int] = set()
        while not self._connection.is_closed:
            try:
                event = self._events.get(timeout=None if restored and not unarmed else _RESTORE_PAUSE_S)
            except queue.Empty:
                event = ("", False)
            if self._connection.is_closed:
                return
            if event is None or not restored:
                restored = self._restore()
            with self._lock:
                changed = {watch_id for watch_id, watch in self._watches.items() if self._place(watch) == event}
            for watch_id in changed | unarmed:
                unarmed.discard(watch_id)
                try:
                    self._arm(watch_id)
                    if watch := self._watches.get(watch_id):
                        watch.callback()
                except BkctlError:
                    unarmed.add(watch_id)

    def close(self) -> None:
        """End every watch, after the connection is closed."""
        with self._lock:
            self._watches.clear()
        self._events.put(None)
