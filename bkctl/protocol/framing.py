"""Frames on a TCP connection, for both ends: splitting what arrives, and one write per loop tick.

A decoded body is a view of the receive buffer and keeps it alive; the connection takes a new buffer instead of reusing
one in view. Source: LengthFieldBasedFrameDecoder.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final, cast

from bkctl.errors import ProtocolError
from bkctl.protocol.messages import BytesLike

#: Bytes that may wait for a slow reader before a server reads its connection no longer.
WRITE_BUFFER_BYTES_MAX: Final = 1 << 20
#: Receive buffers grow with the traffic of their connection, so a small entry keeps a small buffer alive.
_RECEIVE_BYTES_MIN: Final = 1 << 12
_RECEIVE_BYTES_MAX: Final = 1 << 18
_FRAME_LENGTH: Final = struct.Struct(">i")


class FramedProtocol(asyncio.BufferedProtocol):
    """An asyncio protocol that splits its input into frames, and collects its output into one write per loop tick."""

    def __init__(self, frame_size_bytes_max: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._body_size_max = frame_size_bytes_max - 4
        self._chunk_size = _RECEIVE_BYTES_MIN
        self._buffer = memoryview(b"")
        self._start = 0  # the first byte that is not consumed
        self._end = 0  # behind the last byte received
        self._is_viewed = False  # whether a frame's body may still be a view of the buffer
        self._halted = False  # frames wait in the buffer for _continue()
        self._out: list[BytesLike] = []
        self._out_size = 0
        self._flush_due = False
        #: True while the peer reads more slowly than it is sent to.
        self.is_congested = False
        #: True once the connection is closed.
        self.is_lost = False
        self._gone: asyncio.Future[None] = self._loop.create_future()

    # The two ends override these.

    def _frame(self, buffer: memoryview, at: int, end: int) -> None:
        """Process one frame's body. Raises ProtocolError for bytes that end the connection."""
        raise AssertionError

    def _broken(self, problem: str) -> None:
        """Close the connection, because the peer broke the protocol."""
        raise AssertionError

    def _take_frames(self, buffer: memoryview, at: int, end: int) -> int:
        """Process frames from byte `at` of the buffer on, and keep no view of it; returns the offset where it stopped.

        The frame that begins there goes to `_frame` if that is `at`.
        """
        return at

    # Receiving.

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer, start, end = self._buffer, self._start, self._end
        if len(buffer) - end >= self._chunk_size >> 3:
            return buffer[end:]
        present = end - start
        if start and self._is_reusable and not self._is_outgrown and len(buffer) - present >= self._chunk_size >> 1:
            buffer[:present] = buffer[start:end]
            self._start, self._end = 0, present
            return buffer[present:]
        size = present + self._chunk_size
        self._chunk_size = min(2 * self._chunk_size, _RECEIVE_BYTES_MAX)
        if present >= 4:
            # A large frame gets room as it arrives, not as its length claims.
            (body_size,) = _FRAME_LENGTH.unpack_from(buffer, start)
            size = max(size, min(4 + body_size, 4 * present))
        fresh = memoryview(bytearray(size))
        fresh[:present] = buffer[start:end]
        self._buffer, self._start, self._end, self._is_viewed = fresh, 0, present, False
        return fresh[present:]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        if not self._halted:
            self._parse()

    def _parse(self) -> None:
        buffer, at, end = self._buffer, self._start, self._end
        length_of, size_max = _FRAME_LENGTH.unpack_from, self._body_size_max
        take, frame = self._take_frames, self._frame
        try:
            while end - at >= 4:
                if (stop := take(buffer, at, end)) > at:
                    self._start = at = stop
                    if self._halted:
                        return
                    continue
                (size,) = length_of(buffer, at)
                if not 0 <= size <= size_max:
                    raise ProtocolError(f"a frame of {size} bytes, the limit is {size_max}")
                stop = at + 4 + size
                if stop > end:
                    break
                self._start = stop
                self._is_viewed = True
                frame(buffer, at + 4, stop)
                at = stop
                if self._halted:
                    return
        except ProtocolError as error:
            self._halted = True
            self._broken(error.message)
            return
        if at == end and self._is_reusable and not self._is_outgrown:
            self._start = self._end = 0
        elif at == end and (len(buffer) - end < self._chunk_size >> 3 or not self._is_viewed):
            # Drop an empty buffer that is used up, was for a large frame, or became too small.
            self._buffer, self._start, self._end = memoryview(b""), 0, 0

    @property
    def _is_reusable(self) -> bool:
        return not self._is_viewed and len(self._buffer) <= 2 * _RECEIVE_BYTES_MAX

    @property
    def _is_outgrown(self) -> bool:
        """True if the peer fills the buffer and a larger one is allowed: fewer, larger receives cost less."""
        return self._end == len(self._buffer) < self._chunk_size

    # Sending.

    def _queued(self, size: int) -> None:
        """Have the `size` bytes that were appended to `_out` sent."""
        self._out_size += size
        if self._out_size > WRITE_BUFFER_BYTES_MAX:
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._out and self._transport is not None and not self.is_lost:
            out = b"".join(self._out)
            self._out.clear()
            self._out_size = 0
            self._write(self._transport, out)

    def _write(self, transport: asyncio.Transport, out: bytes) -> None:
        """Send whole frames on `transport`."""
        transport.write(out)

    def pause_writing(self) -> None:
        self.is_congested = True

    def resume_writing(self) -> None:
        self.is_congested = False

    # Life.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._use(cast("asyncio.Transport", transport))

    def _use(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything that refers to this connection: it is freed at once, not by a rare collection."""
        self.is_lost = self._halted = True
        self._transport = None
        self._out.clear()
        self._buffer, self._start, self._end = memoryview(b""), 0, 0
        if not self._gone.done():
            self._gone.set_result(None)

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._gone)
