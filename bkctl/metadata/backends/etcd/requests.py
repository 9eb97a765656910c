"""Requests to etcd, and their answers: operations and comparisons of a transaction, keys of a response."""

from __future__ import annotations

from typing import Any

from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.store import Versioned


def transaction(success: list[Any]) -> Any:
    """Return a transaction that compares nothing."""
    return etcdrpc.TxnRequest(success=success)


def nested(compare: list[Any], success: list[Any]) -> Any:
    """Return the operation that is a transaction of its own: `success` where all of `compare` hold, else nothing."""
    return etcdrpc.RequestOp(request_txn=etcdrpc.TxnRequest(compare=compare, success=success))


def get_key(key: bytes, **options: Any) -> Any:
    """Return the operation that reads a key, or with `range_end` a range of keys."""
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key, **options))


def put_key(key: bytes, value: bytes, **options: Any) -> Any:
    """Return the operation that writes a key."""
    return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=value, **options))


def delete_key(key: bytes) -> Any:
    """Return the operation that deletes a key."""
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))


def is_absent(key: bytes) -> Any:
    """Return the comparison: the key does not exist."""
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.EQUAL, create_revision=0)


def is_present(key: bytes) -> Any:
    """Return the comparison: the key exists."""
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.GREATER, create_revision=0)


def has_no_children(key: bytes) -> Any:
    """Return the comparison: the node at `key` has no child."""
    return has_no_keys(key + b"/", key + b"0")


def has_no_keys(start: bytes, end: bytes) -> Any:
    """Return the comparison: no key is from `start` to before `end`. It takes etcd a time linear in such keys."""
    compare = is_absent(start)
    compare.range_end = end
    return compare


def at_revision(key: bytes, revision: int) -> Any:
    """Return the comparison: the last write of the key was at `revision`."""
    # The mod revision of a missing key is 0, so ask for -1 instead: no key has it.
    asked = revision if revision > 0 else -1
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.MOD, result=etcdrpc.Compare.EQUAL, mod_revision=asked)


def first_key(response: Any) -> Any:
    """Return the first key of a read operation's answer, None without one."""
    kvs = response.response_range.kvs
    return kvs[0] if kvs else None


def versioned(kv: Any) -> Versioned[bytes] | None:
    """Return the value of a key with its mod revision as version."""
    return None if kv is None else Versioned(kv.value, kv.mod_revision, None)
