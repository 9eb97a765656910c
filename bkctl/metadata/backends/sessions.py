"""Parts of sessions that the stores share: ephemerals that outlive one, watches of stores without events, processes."""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from bkctl.errors import AlreadyExists, BkctlError, NotFound
from bkctl.metadata.store import MetadataStore, check_size

_POLL_S: Final = 0.1


class SessionStore(MetadataStore):
    """A store that remembers its ephemerals while they are held, and creates them again in the next session."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        #: Path → the node without which it is not created again.
        self._needed: dict[str, str | None] = {}
        #: Path → time (monotonic clock) since which another owner holds it, or the node that it needs is gone.
        self._usurped_since_s: dict[str, float] = {}

    @abstractmethod
    def _put_ephemeral(self, path: str, value: bytes | None) -> bool:
        """Create or update our ephemeral (None: neither); return False when another session owns the node."""

    @abstractmethod
    def _expiry_s(self, path: str) -> float:
        """Return the time after which the session of a dead owner of the node is over."""

    @abstractmethod
    def _keep_session(self) -> None:
        """Start the thread that keeps the session, unless it runs."""

    def ephemeral(
        self, path: str, value: bytes | None, *, wait_s: float | None = None, needs: str | None = None
    ) -> None:
        check_size(path, value or b"")
        began_s, is_new = time.monotonic(), path not in self._held
        if value is not None:
            self._held[path], self._needed[path] = value, needs
        try:
            while not self._put_ephemeral(path, value):
                if wait_s is None:
                    wait_s = self._expiry_s(path)
                if time.monotonic() - began_s >= wait_s:
                    raise AlreadyExists(f"{path} is held by another session in {self.name}")
                time.sleep(_POLL_S)
        except BaseException:
            if is_new:
                self._held.pop(path, None)
            raise
        self._keep_session()

    def _restore_ephemerals(self) -> bool:
        """Create every ephemeral in a new session; return False when some need another attempt."""
        done = True
        for path, value in list(self._held.items()):
            try:
                needed = self._needed.get(path)
                if (needed is None or self.get(needed) is not None) and self._put_ephemeral(path, value):
                    self._usurped_since_s.pop(path, None)
                else:
                    self._usurped_since_s.setdefault(path, time.monotonic())
                    done = False
                if path not in self._held:  # Deleted meanwhile: it must not come back.
                    self.delete(path)
            except NotFound:
                continue
            except BkctlError:
                done = False
        return done

    def usurped_s(self, path: str) -> float:
        since_s = self._usurped_since_s.get(path)
        return 0.0 if since_s is None else max(time.monotonic() - since_s, 0.001)


@dataclass(eq=False)
class PolledWatch:
    """A callback for a node, or its children, that was last seen in the state `seen` (None: missing)."""

    path: str
    children: bool
    callback: Callable[[], None]
    seen: object = None


class PolledWatches:
    """Watches of a store whose nodes are read again and again: `states` gives the present state of each."""

    def __init__(self, states: Callable[[list[PolledWatch]], Iterable[object]]) -> None:
        self._states = states
        self._watches: dict[PolledWatch, None] = {}  # in their order

    def __len__(self) -> int:
        return len(self._watches)

    def add(self, path: str, callback: Callable[[], None], children: bool) -> Callable[[], None]:
        """See MetadataStore.watch."""
        watch = PolledWatch(path, children, callback)
        (watch.seen,) = self._states([watch])
        self._watches[watch] = None
        return lambda: self._watches.pop(watch, None)

    def poll(self) -> bool:
        """Call the callbacks of changed nodes; return False when one failed, and must be called again."""
        done = True
        watches = list(self._watches)
        for watch, state in zip(watches, self._states(watches), strict=True):
            if state == watch.seen or watch not in self._watches:
                continue
            try:
                watch.callback()
                watch.seen = state
            except BkctlError:
                done = False
        return done

    def clear(self) -> None:
        """End every watch."""
        self._watches.clear()


def process_identity() -> tuple[int, str, str, str]:
    """Return this process's id, start time, id namespace and boot id; "" where the system does not tell."""
    pid = os.getpid()
    namespace = boot_id = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return pid, process_start(pid) or "", namespace, boot_id


def process_start(pid: int) -> str | None:
    """Return the start of process `pid` in ticks since boot; "" when it ended, None when the system does not tell.

    Source: proc(5), stat.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")


def may_live(pid: int) -> bool:
    """Return whether process `pid` may exist: `hidepid` hides the processes of other users from /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
