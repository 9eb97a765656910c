"""The session of a store on etcd: one lease, kept alive, that holds the store's ephemerals and claims."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from bkctl.errors import AlreadyExists, BkctlError, Unreachable
from bkctl.metadata.backends.ephemerals import Ephemerals
from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.backends.etcd.etcd_connection import (
    REQUIRE_LEADER,
    EtcdConnection,
    LeaseLost,
    is_stale_token,
    status_of,
)
from bkctl.metadata.backends.etcd.requests import (
    EtcdNodes,
    at_revision,
    delete_key,
    first_key,
    get_key,
    is_absent,
    put_key,
)
from bkctl.metadata.store import Claim

RESTORE_PAUSE_S: Final = 0.5
_POLL_S: Final = 0.1
_EXPIRY_SLACK_S: Final = 3.0
_LEASE_REFRESHES: Final = 3  # within its time to live
#: As the lease that holds an ephemeral: the key was deleted meanwhile.
_DELETED: Final = -1


class EtcdSession:
    """Ephemerals and claims under one lease; after a lost lease the ephemerals are created again under a new one.

    `note_owner` is MetadataStore's; `delete` deletes a node by its path.
    """

    def __init__(
        self,
        connection: EtcdConnection,
        nodes: EtcdNodes,
        *,
        name: str,
        timeout_s: float,
        note_owner: Callable[..., None],
        delete: Callable[[str], None],
    ) -> None:
        #: The lease of all ephemerals and claims; 0: none is granted.
        self.lease_id = 0
        self._connection = connection
        self._nodes = nodes
        self._name = name
        self._timeout_s = timeout_s
        self.ephemerals = Ephemerals(lambda path, value: self._put(path, value) is None, note_owner, delete)
        self._ttl_s = timeout_s
        self._lease_lock = threading.Lock()

    def hold(self, path: str, value: bytes | None, wait_s: float | None) -> None:
        """See MetadataStore.ephemeral."""
        begin = time.monotonic()
        with self.ephemerals.adding(path, value):
            while (holder := self._put(path, value)) is not None:
                if wait_s is None:
                    wait_s = self._expiry_s(holder)
                if time.monotonic() - begin >= wait_s:
                    raise AlreadyExists(f"{path} is held by another session in {self._name}")
                self._connection.closed.wait(_POLL_S)
        self._connection.start_thread("lease", self._keep_lease)

    def _put(self, path: str, value: bytes | None) -> int | None:
        """Create or update our ephemeral (None: neither).

        Returns None, else the lease that holds the key (0: none, or _DELETED).
        """
        key = self._nodes.key(path)
        if value is None:
            found = self._nodes.read(key)
            return None if found is None or found.lease == self.lease_id != 0 else int(found.lease)
        lease_id = self._lease()
        try:
            self._nodes.create(path, value, lease_id)
        except LeaseLost:
            self._forget_lease(lease_id)
            return _DELETED
        except AlreadyExists:
            found = self._nodes.read(key)
            if found is None:
                return _DELETED
            if found.lease != lease_id:
                return int(found.lease)
            if found.value != value:
                update = [put_key(key, value, ignore_lease=True)]
                self._connection.transact([at_revision(key, found.mod_revision)], update)
        return None

    def _expiry_s(self, lease_id: int) -> float:
        """Return the seconds after which a lease without a keeper is certainly over."""
        granted_s = self._timeout_s
        if lease_id > 0:
            answer, _ = self._connection.send("LeaseTimeToLive", etcdrpc.LeaseTimeToLiveRequest(ID=lease_id))
            granted_s = max(granted_s, answer.grantedTTL)
        return granted_s + _EXPIRY_SLACK_S

    def claim(self, path: str, value: bytes, numbered: bool) -> Claim:
        """See MetadataStore.claim. The number is the count of writes of the parent, which each claim writes once."""
        while True:
            lease_id = self._lease()
            try:
                if numbered:
                    claimed, revision = self._create_numbered(path, value, lease_id)
                else:
                    claimed, revision = path, self._nodes.create(path, value, lease_id)
            except LeaseLost:
                self._forget_lease(lease_id)
                continue
            self._connection.start_thread("lease", self._keep_lease)
            return _EtcdClaim(self._connection, self._nodes, claimed, revision)

    def _create_numbered(self, path: str, value: bytes, lease_id: int) -> tuple[str, int]:
        parent = path.rpartition("/")[0]
        while True:
            found = self._nodes.read(self._nodes.key(parent))
            if found is None:
                with contextlib.suppress(AlreadyExists):
                    self._nodes.create(parent, b"")
                continue
            numbered = f"{path}{int(found.version):010d}"
            key = self._nodes.key(numbered)
            answer, _ = self._connection.transact(
                [at_revision(found.key, found.mod_revision), is_absent(key)],
                [put_key(found.key, b"", ignore_value=True), put_key(key, value, lease=lease_id)],
                [get_key(key)],
            )
            if answer.succeeded:
                return numbered, int(answer.header.revision)
            # After a lost answer the repeated request finds the node that the first one created.
            there = first_key(answer.responses[0])
            if there is not None and (there.value, there.lease) == (value, lease_id):
                return numbered, int(there.mod_revision)

    # the lease

    def _lease(self) -> int:
        """Return the lease, granted where there is none."""
        with self._lease_lock:
            if not self.lease_id:
                request = etcdrpc.LeaseGrantRequest(TTL=max(1, round(self._timeout_s)))
                answer, _ = self._connection.send("LeaseGrant", request)
                self.lease_id, self._ttl_s = int(answer.ID), float(answer.TTL)
            return self.lease_id

    def _forget_lease(self, lease_id: int) -> None:
        with self._lease_lock:
            if self.lease_id == lease_id:
                self.lease_id = 0

    def _keep_lease(self) -> None:
        """Keep the lease alive, and create the ephemerals again after its end (thread `metadata-store-lease`)."""
        restored_under = 0  # the lease that holds all ephemerals
        wait_s = self._ttl_s / _LEASE_REFRESHES
        while not self._connection.closed.wait(wait_s):
            wait_s = self._ttl_s / _LEASE_REFRESHES
            lease_id = self.lease_id
            try:
                if lease_id and not self._refresh(lease_id, wait_s):
                    self._forget_lease(lease_id)
                if restored_under == 0 or restored_under != self.lease_id:
                    done = self.ephemerals.restore()
                    restored_under = self.lease_id if done else 0
                    wait_s = wait_s if done else RESTORE_PAUSE_S
            except (BkctlError, grpc.RpcError, ValueError):
                wait_s = min(wait_s, RESTORE_PAUSE_S)

    def _refresh(self, lease_id: int, limit_s: float) -> bool:
        """Give the lease its whole time to live again; return whether it still exists."""
        client = self._connection.client()
        requests = iter((etcdrpc.LeaseKeepAliveRequest(ID=lease_id),))
        try:
            metadata = (*self._connection.metadata(client, limit_s), *REQUIRE_LEADER)
            answers: Any = client.leasestub.LeaseKeepAlive(requests, timeout=limit_s, metadata=metadata)
            answer = next(answers, None)
            answers.cancel()
        except grpc.RpcError as error:
            if is_stale_token(*status_of(error)):
                self._connection.forget_token()
            self._connection.fail_over(client)
            raise
        if answer is None:
            raise Unreachable(f"etcd at {self._connection.address} did not answer")
        return bool(answer.TTL > 0)


class _EtcdClaim(Claim):
    """A key created at `revision`; a claimed key is never written again."""

    def __init__(self, connection: EtcdConnection, nodes: EtcdNodes, path: str, revision: int) -> None:
        self.path = path
        self._connection = connection
        self._nodes = nodes
        self._revision = revision

    def is_held(self) -> bool:
        found = self._nodes.read(self._nodes.key(self.path))
        return found is not None and bool(found.mod_revision == self._revision)

    def release(self) -> None:
        key = self._nodes.key(self.path)
        self._connection.transact([at_revision(key, self._revision)], [delete_key(key)])
