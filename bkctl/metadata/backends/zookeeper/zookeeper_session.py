"""Ephemerals and claims of one store: ephemerals are created again in a new session, claims are not."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

from kazoo.exceptions import NoNodeError

from bkctl.errors import AlreadyExists, BkctlError
from bkctl.metadata.backends.sessions import Ephemerals
from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection
from bkctl.metadata.backends.zookeeper.zookeeper_nodes import ZooKeeperNodes
from bkctl.metadata.backends.zookeeper.zookeeper_reads import Origin
from bkctl.metadata.store import Claim

#: A server ends a session at a tick after its timeout, and may have granted a longer timeout than requested.
_EXPIRY_SLACK_S: Final = 5.0


class ZooKeeperSession(ZooKeeperNodes):
    """Ephemerals and claims of a store, over `connection`."""

    def __init__(self, connection: ZooKeeperConnection) -> None:
        super().__init__(connection)
        expiry_s = connection.session_timeout_s + _EXPIRY_SLACK_S
        self.ephemerals = Ephemerals(
            lambda path, value: self._put_ephemeral(path, value), self.delete, lambda _: expiry_s, self._keep_session
        )

    @abstractmethod
    def _keep_session(self) -> None:
        """Start the thread that creates the ephemerals again in another session."""

    def _put_ephemeral(self, path: str, value: bytes | None) -> bool:
        """Create or update our ephemeral (None: neither); return False when another session owns the node."""
        connection = self._connection
        full = connection.full(path)
        if value is not None:
            with contextlib.suppress(AlreadyExists):
                self._create(path, value, ephemeral=True)
                return True
        try:
            found, stat = connection.run(connection.client.get_async, full)
            if stat.ephemeralOwner != connection.session_id:
                return False
            if value not in (None, found):
                connection.run(partial(connection.client.set_async, value=value), full)
        except NoNodeError:
            return value is None
        return True

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        full = self._create(path, value, ephemeral=True, sequence=numbered)
        stat = self._stat(full)
        claim = self._claim_of(full, None if stat is None else Origin(stat.czxid, stat.ephemeralOwner))
        if numbered and claim.origin is not None:
            self._delete_duplicates(full, value)
        return claim

    def claim_many(self, paths: Sequence[str], value: bytes) -> list[Claim | BkctlError]:
        created = self._change_many(
            paths,
            lambda transaction, path: transaction.create(self._connection.full(path), value, ephemeral=True),
            str,
            lambda path, repeated: self._create(path, value, ephemeral=True, repeated=repeated),
        )
        claimed = [path for path, full in zip(paths, created, strict=True) if not isinstance(full, BkctlError)]
        origins = self._origins(claimed)
        return [full if isinstance(full, BkctlError) else self._claim_of(full, next(origins)) for full in created]

    def _claim_of(self, full: str, found: Origin | None) -> _ZooKeeperClaim:
        """Return the claim on the node that we created at `full`, whose present origin is `found`.

        Our session may have ended since, and another session may have created the present node: that one is not ours.
        """
        origin = found if found is not None and found.session_id == self._connection.session_id else None
        path = full[len(self._connection.root) + 1 :]
        return _ZooKeeperClaim(self, path, full, origin)

    def _delete_duplicates(self, full: str, value: bytes) -> None:
        """Delete the nodes of requests whose answers were lost: each attempt gets a number of its own."""
        client = self._connection.client
        parent, _, name = full.rpartition("/")
        for sibling in self._connection.run(client.get_children_async, parent):
            if sibling != name and sibling[:-10] == name[:-10]:
                duplicate = f"{parent}/{sibling}"
                with contextlib.suppress(NoNodeError):
                    found, stat = self._connection.run(client.get_async, duplicate)
                    if (stat.ephemeralOwner, found) == (self._connection.session_id, value):
                        self._connection.run(client.delete_async, duplicate)

    def held_many(self, claims: Sequence[Claim]) -> list[bool]:
        origins = self._origins([claim.path for claim in claims])
        return [
            origin is not None and origin == cast(_ZooKeeperClaim, claim).origin
            for claim, origin in zip(claims, origins, strict=True)
        ]

    def release_many(self, claims: Sequence[Claim]) -> None:
        held = [claim for claim, is_held in zip(claims, self.held_many(claims), strict=True) if is_held]
        errors = self._change_many(
            held,
            lambda transaction, claim: transaction.delete(self._connection.full(claim.path)),
            lambda _: None,
            lambda claim, _: claim.release(),
            once=True,
        )
        for error in errors:
            if error is not None:
                raise error


class _ZooKeeperClaim(Claim):
    """`origin` is that of the node we created; None: the node was gone before its origin was read."""

    def __init__(self, store: ZooKeeperSession, path: str, full: str, origin: Origin | None) -> None:
        self.path = path
        self.origin = origin
        self._store, self._full = store, full

    def is_held(self) -> bool:
        stat = self._store._stat(self._full)
        return stat is not None and Origin(stat.czxid, stat.ephemeralOwner) == self.origin

    def release(self) -> None:
        connection = self._store._connection

        def delete(full: str) -> Any:
            # Checked before each attempt: an earlier one may have deleted ours, and another session claimed the place.
            if not self.is_held():
                raise NoNodeError
            return connection.client.delete_async(full)

        with contextlib.suppress(NoNodeError):
            connection.run(delete, self._full)
