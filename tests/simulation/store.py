"""A metadata store in memory, for the processes of a world: each call takes time, may fail, and may be cut off.

What a call does happens at one moment of it. When a call times out, what it asked for may have happened, or not. The
ephemerals of a session outlive a dead process until the session is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from simulation.runtime import EPOCH_S, Process, World

from bkctl.errors import AlreadyExists, Conflict, MetadataVersionConflict, NotFound, TimedOut
from bkctl.metadata.store import NEW, Claim, MetadataStore, Versioned, check_path

T = TypeVar("T")

HOST = "store"
SESSION_TIMEOUT_S = 4.0
TIMEOUT_S = 3.0


class _Node:
    def __init__(self, value: bytes, version: int, ctime_ms: int, owner: Session | None) -> None:
        self.value = value
        self.version = version
        self.ctime_ms = ctime_ms
        self.owner = owner


class Tree:
    """The stored values. `observers` receive each change: path, old value, new value (None: there is none)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.nodes: dict[str, _Node] = {}
        self.children: dict[str, set[str]] = {"": set()}
        self.sequences: dict[str, int] = {}
        self.watches: list[tuple[str, bool, Session, Callable[[], None]]] = []
        self.observers: list[Callable[[str, bytes | None, bytes | None], None]] = []
        #: Hosts that do not reach the store.
        self.cut: set[str] = set()
        #: The probability that a call fails.
        self.failure_rate = 0.0

    def set(self, path: str, value: bytes, owner: Session | None = None) -> int:
        node = self.nodes.get(path)
        old = None if node is None else node.value
        if node is None:
            self._make_parents(path)
            node = self.nodes[path] = _Node(value, 0, int((EPOCH_S + self.world.now) * 1000), owner)
            self._changed(path, children=False)
            self._changed(_parent(path), children=True)
        else:
            node.value, node.version = value, node.version + 1
            self._changed(path, children=False)
        for observer in self.observers:
            observer(path, old, value)
        return node.version

    def _make_parents(self, path: str) -> None:
        self.children.setdefault(path, set())
        if path:
            parent = _parent(path)
            if parent not in self.nodes:
                self.set(parent, b"")
            self.children[parent].add(path.rpartition("/")[2])

    def remove(self, path: str) -> None:
        node = self.nodes.pop(path)
        del self.children[path]
        self.children[_parent(path)].discard(path.rpartition("/")[2])
        self._changed(path, children=False)
        self._changed(_parent(path), children=True)
        for observer in self.observers:
            observer(path, node.value, None)

    def _changed(self, path: str, *, children: bool) -> None:
        for watched, wants_children, session, callback in self.watches:
            if watched == path and wants_children == children and session.process.is_alive:
                delay_s = self.world.random.random() * 0.01
                session.process.spawn(lambda call=callback: _tell(self.world, call), "watch", delay_s)  # type: ignore[misc]

    def expire(self, session: Session) -> None:
        """End a session: its ephemerals are gone."""
        for path in [path for path, node in self.nodes.items() if node.owner is session]:
            self.remove(path)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _tell(world: World, callback: Callable[[], None]) -> None:
    while True:
        try:
            callback()
            return
        except TimedOut:
            world.sleep(0.1)


class Session(MetadataStore):
    """One process's store object."""

    def __init__(self, tree: Tree, process: Process) -> None:
        self.name = "the simulated store"
        self.tree = tree
        self.process = process
        self.is_closed = False
        self._ephemerals: dict[str, bytes] = {}
        process.at_death.append(self._die)

    def _die(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.tree.world.at(SESSION_TIMEOUT_S, lambda: self.tree.expire(self))

    def lose(self) -> None:
        """Lose the session, and get another one after a while."""
        self.tree.expire(self)
        delay_s = 0.1 + self.tree.world.random.random() * 3

        def again() -> None:
            if self.process.is_alive and not self.is_closed:
                for path, value in self._ephemerals.items():
                    if path not in self.tree.nodes:
                        self.tree.set(path, value, self)

        self.tree.world.at(delay_s, again)

    def _call(self, what: Callable[[], T]) -> T:
        tree, world = self.tree, self.tree.world
        random = world.random
        delay_s = 0.0005 + random.random() * 0.004
        if random.random() < 0.02:
            delay_s += random.random() * 0.5
        fails = random.random() < tree.failure_rate
        world.sleep(delay_s / 2)
        if self.process.host in tree.cut:
            world.sleep(TIMEOUT_S)
            if self.process.host in tree.cut:
                raise TimedOut(f"{self.name} does not answer")
        if fails and random.random() < 0.5:
            world.sleep(TIMEOUT_S)
            raise TimedOut(f"{self.name} does not answer")
        result = what()
        if fails:
            world.sleep(TIMEOUT_S)
            raise TimedOut(f"{self.name} does not answer")
        world.sleep(delay_s / 2)
        return result

    def get(self, path: str) -> Versioned[bytes] | None:
        check_path(path)

        def call() -> Versioned[bytes] | None:
            node = self.tree.nodes.get(path)
            return None if node is None else Versioned(node.value, node.version, node.ctime_ms)

        return self._call(call)

    def put(self, path: str, value: bytes, expected: int | None) -> int:
        check_path(path)

        def call() -> int:
            node = self.tree.nodes.get(path)
            if expected == NEW and node is not None:
                raise AlreadyExists(f"{path} exists")
            if expected is not None and expected != NEW:
                if node is None:
                    raise NotFound(f"No {path}")
                if node.version != expected:
                    raise MetadataVersionConflict(f"{path} has version {node.version}, not {expected}")
            return self.tree.set(path, value)

        return self._call(call)

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        def call() -> None:
            if any(path in self.tree.nodes for path, _ in nodes):
                raise AlreadyExists("one of them exists")
            for path, value in nodes:
                if path not in self.tree.nodes:
                    self.tree.set(path, value)

        self._call(call)

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        def call() -> None:
            self._ephemerals.pop(path, None)
            node = self.tree.nodes.get(path)
            if node is None:
                raise NotFound(f"No {path}")
            if expected is not None and node.version != expected:
                raise MetadataVersionConflict(f"{path} has version {node.version}, not {expected}")
            if self.tree.children[path]:
                raise Conflict(f"{path} has children")
            self.tree.remove(path)
            parent = path
            for _ in range(prune):
                parent = _parent(parent)
                if not parent or self.tree.children.get(parent, {""}):
                    break
                self.tree.remove(parent)

        self._call(call)

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        def call() -> list[str] | None:
            if path not in self.tree.nodes:
                return None
            return sorted(name for name in self.tree.children[path] if name > after)[:limit]

        return self._call(call)

    def sequence(self, path: str) -> int:
        def call() -> int:
            number = self.tree.sequences.get(path, 0)
            self.tree.sequences[path] = number + 1
            return number

        return self._call(call)

    def sequence_position(self, path: str) -> int:
        return self._call(lambda: self.tree.sequences.get(path, 0))

    def ephemeral(
        self, path: str, value: bytes | None, *, wait_s: float | None = None, needs: str | None = None
    ) -> None:
        world = self.tree.world
        deadline = world.now + (2 * SESSION_TIMEOUT_S if wait_s is None else wait_s)

        def call() -> bool:
            node = self.tree.nodes.get(path)
            if node is not None and node.owner is not self:
                return False
            if value is not None:
                self.tree.set(path, value, self)
                self._ephemerals[path] = value
            return True

        while not self._call(call):
            if world.now >= deadline:
                raise AlreadyExists(f"{path} is another's")
            world.sleep(0.2)

    def usurped_s(self, path: str) -> float:
        return 0.0

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        def call() -> Claim:
            place = path
            if numbered:
                number = self.tree.sequences.get(path, 0)
                self.tree.sequences[path] = number + 1
                place = f"{path}{number:010d}"
            if place in self.tree.nodes:
                raise AlreadyExists(f"{place} is another's")
            self.tree.set(place, value, self)
            return Claim(self, place, self.tree.nodes[place])

        return self._call(call)

    def held_many(self, claims: Sequence[Claim]) -> list[bool]:
        return [self._call(partial(self._is_held, claim)) for claim in claims]

    def _is_held(self, claim: Claim) -> bool:
        return self.tree.nodes.get(claim.path) is claim.mark

    def release_many(self, claims: Sequence[Claim]) -> None:
        def call(claim: Claim) -> None:
            if self._is_held(claim):
                self.tree.remove(claim.path)

        for claim in claims:
            self._call(partial(call, claim))

    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        entry: Any = (path, children, self, callback)
        self._call(lambda: self.tree.watches.append(entry))

        def cancel() -> None:
            if entry in self.tree.watches:
                self.tree.watches.remove(entry)

        return cancel

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.tree.watches = [each for each in self.tree.watches if each[2] is not self]
            self.tree.expire(self)
