"""The ranges of keys that the pages of a listing ask for."""

from __future__ import annotations

from typing import Final

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
