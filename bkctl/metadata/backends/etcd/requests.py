"""Requests to etcd and their answers: operations, comparisons, and pages of a listing."""

from __future__ import annotations

from typing import Any, Final

from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.store import Versioned


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


#: Bytes behind the parent's key that count as a number: the name of a ledger has 36.
_DIGITS: Final = 40
#: Pages that a range holds by the distances of the keys on the last one.
_PAGES: Final = 8
_FIRST_GROWTH_BITS: Final = 8


class PageRange:
    """The width of the next page of the keys below the node at `key`.

    etcd visits every key of a range to count it, also those behind the limit, so pages that reach to the end of a
    directory take it a time quadratic in the number of keys. A range is as wide as some pages were, and widens where
    there are fewer keys; `width` is a distance of keys as numbers, 0 without one: to the end.
    """

    def __init__(self, key: bytes, width: int = 0) -> None:
        self.key, self.width = key, width
        self.prefix, self.end = key + b"/", key + b"0"
        self._growth_bits = _FIRST_GROWTH_BITS

    def end_from(self, start: bytes) -> bytes:
        """Return the end of a range that begins at the key `start`."""
        number = self._number(start) + self.width
        if not self.width or number >> 8 * _DIGITS:
            return self.end
        return self.prefix + number.to_bytes(_DIGITS, "big")

    def was_full(self, first: bytes, last: bytes) -> None:
        """Note that a page held the keys from `first` to `last`, and that more follow in its range."""
        self.width = _PAGES * (self._number(last) - self._number(first)) or self.width
        self._growth_bits = _FIRST_GROWTH_BITS

    def was_short(self) -> None:
        """Note that a range held less than a page."""
        self.width <<= self._growth_bits
        self._growth_bits *= 2

    def _number(self, key: bytes) -> int:
        return int.from_bytes(key[len(self.prefix) :][:_DIGITS].ljust(_DIGITS, b"\0"), "big")
