"""A seeded generator of frames as hostile clients send them: valid, absurd, mutated, truncated, of v2 and v3.

Fields come from the protocol's own message table (the descriptor of `Request`), with values that a reader might not
expect; bytes are changed behind that. No frame is a request for a ledger of an honest client: their ids are small.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from typing import Any, Final

from support.mutation import FRAME_SIZE_BYTES_MAX, NUMBERS, mutated

from bkctl.errors import ProtocolError
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.protocol import bookkeeper_protocol_pb2 as pb
from bkctl.protocol import v2, v3
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    AuthMessage,
    BatchReadRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadLacRequest,
    ReadRequest,
    Request,
    WriteLacRequest,
)

#: Ledgers of honest clients have smaller ids, in scope 0.
HOSTILE_LEDGER_MIN: Final = 1 << 32
LEDGERS: Final = [LedgerId(scope, HOSTILE_LEDGER_MIN + number) for scope in (0, 7, (1 << 64) - 1) for number in (1, 2)]
MASTER_KEY: Final = DigestManager(LEDGERS[0], DigestType.CRC32C, b"secret").master_key
ENTRY_IDS: Final = (1 << 20, (1 << 40) - 1, 1 << 40, (1 << 62) + 1, (1 << 63) - 1)
KEY_SIZES: Final = (0, 1, 19, 20, 21, 255, 1000, 1100, 5000, 70_000)
BODY_SIZES: Final = (0, 1, 7, 8, 15, 16, 31, 32, 100, 1000, 20_000)
#: Rare, and as large as a frame may be.
HUGE_BYTES: Final = FRAME_SIZE_BYTES_MAX - 200
KINDS: Final = {"valid": 4, "fields": 6, "mutated": 6, "truncated": 1, "garbage": 1, "nested": 1}

#: The operation of each message of the table.
_OPERATIONS: Final = {
    "readRequest": v3.READ_ENTRY, "addRequest": v3.ADD_ENTRY, "authRequest": v3.AUTH, "writeLacRequest": v3.WRITE_LAC,
    "readLacRequest": v3.READ_LAC, "getBookieInfoRequest": v3.GET_BOOKIE_INFO, "startTLSRequest": v3.START_TLS,
    "forceLedgerRequest": v3.FORCE_LEDGER, "getListOfEntriesOfLedgerRequest": v3.LIST_ENTRIES,
}  # fmt: skip
_VARINT, _FIXED64, _DELIMITED, _GROUP, _END_GROUP, _FIXED32 = range(6)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


class Frames:
    """Frames of one seed; `kinds` counts what it gave."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.kinds: Counter[str] = Counter()
        self._txn_id = 0
        self._speaks_v2 = False

    # --- what a client sends ---

    def stream(self, count: int) -> bytes:
        """Return `count` frames for one connection; none of them is a request for an honest client's ledger."""
        while True:
            before = self.kinds.copy()
            self._speaks_v2 = self.chance.random() < 0.3
            data = b"".join(self.frame() for _ in range(count))
            if not reaches_honest_ledgers(data):
                return data
            self.kinds = before

    def frame(self) -> bytes:
        kind = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
        self.kinds[kind] += 1
        made: bytes = getattr(self, f"_{kind}")()
        return made

    def _valid(self) -> bytes:
        ledger = self.chance.choice(LEDGERS)
        out: list[Any] = []
        self._txn_id += 1
        if self._is_v2():
            ledger = LedgerId(0, ledger.ledger_id)
            v2.encode_request(self._request(ledger, is_v2=True), out)
        else:
            v3.encode_request(self._txn_id, self._request(ledger, is_v2=False), out)
        return b"".join(map(bytes, out))

    def _is_v2(self) -> bool:
        """Return the protocol of this connection, and now and then the other one."""
        return self._speaks_v2 != (self.chance.random() < 0.02)

    def _request(self, ledger: LedgerId, *, is_v2: bool) -> Request:
        chance = self.chance
        by = DigestManager(ledger, DigestType.CRC32C, b"secret")
        key, entry_id = by.master_key, chance.randrange(50) if chance.random() < 0.97 else chance.choice(ENTRY_IDS)
        if not is_v2 and chance.random() < 0.1:  # a new ledger with any key
            ledger, key = LedgerId(ledger.scope_id, self._new_ledger_number()), bytes(chance.choice(KEY_SIZES))
            by = DigestManager(ledger, DigestType.CRC32C, b"secret")
        payload = bytes(chance.choice(BODY_SIZES))
        body = by.seal(entry_id, entry_id - 1, 0, payload) + payload
        common: list[Request] = [
            AddRequest(ledger, entry_id, key, body, chance.random() < 0.1),
            ReadRequest(ledger, chance.choice((entry_id, LAST_ENTRY))),
            ReadRequest(ledger, entry_id, key, fence=chance.random() < 0.2),
        ]
        if is_v2:
            batch = BatchReadRequest(
                ledger, entry_id, 1, chance.choice((-1, 0, 5, 1 << 30)), chance.choice((-1, 1 << 40))
            )
            return chance.choice([*common, batch])
        return chance.choice(
            [
                *common,
                AddRequest(ledger, entry_id, key, body, deferred_sync=True),
                ReadRequest(ledger, LAST_ENTRY, previous_lac=entry_id, timeout_ms=30, piggyback=True),
                WriteLacRequest(ledger, entry_id, key, by.seal_lac(entry_id)),
                ReadLacRequest(ledger),
                ForceLedgerRequest(ledger),
                ListEntriesRequest(ledger),
                BookieInfoRequest(chance.choice((0, 1, 3, 255))),
                AuthMessage("AuthDisabledPlugin", payload),
            ]
        )

    def _fields(self) -> bytes:
        return self._v2_fields() if self._is_v2() else framed(self._v3_fields())

    def _v2_fields(self) -> bytes:
        chance = self.chance
        operation = chance.choice((1, 1, 2, 2, 3, 7, chance.randrange(256)))
        head = chance.choice((2, 2, 2, 0, 1, 3, 255)) << 24 | operation << 16 | chance.choice((0, 1, 2, 3, 4, 8, 65535))
        key = chance.choice((MASTER_KEY, MASTER_KEY, chance.randbytes(20), b""))
        ids = struct.pack(">QQ", self._ledger_number(), self._number())
        more = struct.pack(">QIQ", self._number(), self._number() & 0xFFFFFFFF, self._number())
        parts = {1: key + ids, 2: ids + key, 7: ids + more + key}.get(operation, ids + key + more)
        return framed(struct.pack(">I", head) + parts + self._bytes(BODY_SIZES))

    def _message(self, descriptor: Any) -> bytes:
        """Return a message of the table: most fields as they should be, some absurd, some missing or there twice."""
        chance = self.chance
        out = bytearray()
        for field in descriptor.fields:
            for _ in range(chance.choices((0, 1, 2), (2, 30, 1))[0]):
                out += self._field(field)
        return bytes(out)

    def _v3_fields(self) -> bytes:
        """Return a request of one operation, now and then with another one's message beside its own, or instead."""
        chance = self.chance
        header, *nested = pb.Request.DESCRIPTOR.fields
        number = chance.randrange(len(nested))
        operation = _OPERATIONS[nested[number].name]
        if chance.random() < 0.05:
            operation = self._number()
        head = self._header(operation)
        out = varint(header.number << 3 | _DELIMITED) + self._length(len(head)) + head
        chosen = [nested[number]] if chance.random() < 0.95 else chance.sample(nested, chance.choice((0, 1, 2, 5)))
        for field in chosen:
            out += self._field(field)
        if chance.random() < 0.05:  # no field of the table
            out += varint(chance.choice((15, 999, 1 << 28)) << 3 | chance.randrange(8)) + chance.randbytes(9)
        return out

    def _field(self, field: Any) -> bytes:
        chance = self.chance
        tag = lambda kind: varint(field.number << 3 | kind)  # noqa: E731
        if chance.random() < 0.005:  # another type than the table says
            return tag(_FIXED32) + chance.randbytes(4)
        if field.type in (field.TYPE_BYTES, field.TYPE_STRING):
            data = self._bytes(KEY_SIZES if field.name == "masterKey" else BODY_SIZES)
            if field.name == "masterKey" and chance.random() < 0.5:
                data = MASTER_KEY
            return tag(_DELIMITED) + self._length(len(data)) + data
        if field.type == field.TYPE_MESSAGE:
            data = self._message(field.message_type)
            return tag(_DELIMITED) + self._length(len(data)) + data
        if field.name == "ledgerId":
            return tag(_VARINT) + varint(self._ledger_number())
        return tag(_VARINT) + varint(self._number())

    def _header(self, operation: int) -> bytes:
        chance = self.chance
        version = 3 if chance.random() < 0.95 else chance.choice((0, 1, 2, 4, 255, 1 << 31))
        self._txn_id += 1
        fields = {1: version, 2: operation, 3: self._txn_id, 4: chance.choice((0, 1, 99))}
        return b"".join(varint(number << 3) + varint(value) for number, value in fields.items())

    def _length(self, size: int) -> bytes:
        return varint(size if self.chance.random() < 0.99 else self._number())

    def _ledger_number(self) -> int:
        luck = self.chance.random()
        if luck < 0.7:
            return self.chance.choice(LEDGERS).ledger_id
        if luck < 0.8:
            return self._new_ledger_number()
        return max(HOSTILE_LEDGER_MIN, self._number())

    def _new_ledger_number(self) -> int:
        return HOSTILE_LEDGER_MIN + self.chance.randrange(1 << 20)

    def _number(self) -> int:
        chance = self.chance
        return chance.choice(NUMBERS) if chance.random() < 0.5 else chance.randrange(50)

    def _bytes(self, sizes: tuple[int, ...]) -> bytes:
        size = HUGE_BYTES if self.chance.random() < 0.0005 else self.chance.choice(sizes)
        return self.chance.randbytes(min(size, 64)) + bytes(max(0, size - 64))

    def _mutated(self) -> bytes:
        frame = self._valid() if self.chance.random() < 0.7 else self._fields()
        return mutated(frame, self._valid, self.chance)

    def _truncated(self) -> bytes:
        data = self._valid() if self.chance.random() < 0.5 else self._fields()
        return data[: self.chance.randrange(len(data) + 1)]

    def _garbage(self) -> bytes:
        data = self.chance.randbytes(self.chance.choice((1, 3, 4, 20, 300)))
        return framed(data) if self.chance.random() < 0.7 else data

    def _nested(self) -> bytes:
        """Return groups in groups, or messages in messages, far deeper than the table has them."""
        depth = self.chance.choice((5, 99, 101, 5000))
        number = self.chance.choice((1, 100, 101, 500))
        if self.chance.random() < 0.5:
            ends = varint(number << 3 | _END_GROUP) * self.chance.choice((0, depth))
            return framed(varint(number << 3 | _GROUP) * depth + ends)
        data = b""
        for _ in range(min(depth, 300)):
            data = varint(number << 3 | _DELIMITED) + varint(len(data)) + data
        return framed(data)


def reaches_honest_ledgers(data: bytes) -> bool:
    """Return whether a bookie may take a part of `data`, the bytes of one connection, for a request for a small id."""
    view, at, is_v2 = memoryview(data), 0, False
    while len(data) - at >= 4:
        (size,) = struct.unpack_from(">i", data, at)
        start, at = at + 4, at + 4 + size
        if size < 0 or at > len(data):
            return False
        try:
            call = None if is_v2 else v3.decode_request(view, start, at)
            is_v2 = call is None
            request = v2.decode_request(view, start, at)[1] if call is None else call[1]
        except ProtocolError:
            return False
        ledger = getattr(request, "ledger", None)
        if ledger is not None and not ledger.is_scoped and ledger.ledger_id < HOSTILE_LEDGER_MIN:
            return True
    return False
