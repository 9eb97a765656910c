"""The session of a store on etcd: one lease, kept alive, that holds the store's ephemerals and claims."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

import grpc

from bkctl.errors import AlreadyExists, BkctlError, Unreachable
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
from bkctl.metadata.backends.sessions import Ephemerals
from bkctl.metadata.store import Claim, check_size

RESTORE_PAUSE_S: Final = 0.5
_EXPIRY_SLACK_S: Final = 3.0
_LEASE_REFRESHES: Final = 3  # within its time to live


class EtcdSession(EtcdNodes):
    """Ephemerals and claims under one lease; after a lost lease the ephemerals are created again under a new one."""

    def __init__(self, connection: EtcdConnection, root: str) -> None:
        super().__init__(connection, root)
        #: The lease of all ephemerals and claims; 0: none is granted.
        self.lease_id = 0
        self._ttl_s = connection.session_timeout_s
        self.ephemerals = Ephemerals(self._put_ephemeral, self.delete, self._expiry_s, self._keep)
        self._lease_lock = threading.Lock()

    def _keep(self) -> None:
        self._connection.start_thread("lease", self._keep_lease)

    def _put_ephemeral(self, path: str, value: bytes | None) -> bool:
        """Create or update our ephemeral (None: neither); return False when another lease, or none, holds the key."""
        key = self._key(path)
        if value is None:
            found = self._read(key)
            return found is None or found.lease == self.lease_id != 0
        lease_id = self._lease()
        try:
            self._create(path, value, lease_id)
        except LeaseLost:
            self._forget_lease(lease_id)
            return False
        except AlreadyExists:
            found = self._read(key)
            if found is None or found.lease != lease_id:
                return False
            if found.value != value:
                update = [put_key(key, value, ignore_lease=True)]
                self._connection.transact([at_revision(key, found.mod_revision)], update)
        return True

    def _expiry_s(self, path: str) -> float:
        """Return the seconds after which the lease that holds the key, without a keeper, is certainly over."""
        granted_s, found = self._connection.session_timeout_s, self._read(self._key(path))
        if found is not None and found.lease:
            answer, _ = self._connection.send("LeaseTimeToLive", etcdrpc.LeaseTimeToLiveRequest(ID=found.lease))
            granted_s = max(granted_s, answer.grantedTTL)
        return granted_s + _EXPIRY_SLACK_S

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        """See MetadataStore.claim. The number is the count of writes of the parent, which each claim writes once."""
        check_size(path, value, "etcd")
        while True:
            lease_id = self._lease()
            try:
                if numbered:
                    claimed, revision = self._create_numbered(path, value, lease_id)
                else:
                    claimed, revision = path, self._create(path, value, lease_id)
            except LeaseLost:
                self._forget_lease(lease_id)
                continue
            self._keep()
            return _EtcdClaim(self, claimed, revision)

    def _create_numbered(self, path: str, value: bytes, lease_id: int) -> tuple[str, int]:
        parent = path.rpartition("/")[0]
        while True:
            found = self._read(self._key(parent))
            if found is None:
                with contextlib.suppress(AlreadyExists):
                    self._create(parent, b"")
                continue
            numbered = f"{path}{int(found.version):010d}"
            key = self._key(numbered)
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
                request = etcdrpc.LeaseGrantRequest(TTL=max(1, round(self._connection.session_timeout_s)))
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

    def __init__(self, store: EtcdSession, path: str, revision: int) -> None:
        self.path = path
        self._store, self._revision = store, revision

    def is_held(self) -> bool:
        found = self._store._read(self._store._key(self.path))
        return found is not None and bool(found.mod_revision == self._revision)

    def release(self) -> None:
        key = self._store._key(self.path)
        self._store._connection.transact([at_revision(key, self._revision)], [delete_key(key)])
