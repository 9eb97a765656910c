"""A network whose delays, cuts and resets the seed decides. A connection keeps its order, or ends.

What is sent while a direction is cut waits, as TCP's retransmissions would have it, and arrives when the cut is over;
the other direction may go on. A process that is killed resets its connections; a machine that dies says nothing: who
speaks to it finds out by its own timeouts, or when the machine is back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from simulation.runtime import Process, World

#: The longest wait of a connection attempt without a listener, if its caller waits.
CONNECT_S_MAX = 60.0


class Network:
    """Hosts, who listens, and which directions are cut."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._listeners: dict[tuple[str, int], Server] = {}
        self._links: list[Link] = []
        #: (from host, to host) that nothing passes.
        self.cut: set[tuple[str, str]] = set()
        #: Extra delay of a host's messages.
        self.slow: dict[str, float] = {}

    def delay_s(self, source: str, target: str) -> float:
        """Return the delay of a message: mostly little, sometimes much more."""
        random = self.world.random
        delay = 0.0001 + random.random() * 0.001
        if random.random() < 0.02:
            delay += random.random() * 0.2
        return delay + self.slow.get(source, 0.0) + self.slow.get(target, 0.0)

    def listen(self, process: Process, factory: Any, port: int) -> Server:
        key = (process.host, port)
        if key in self._listeners:
            raise OSError(98, "Address already in use")
        server = self._listeners[key] = Server(self, key, process, factory)
        process.at_death.append(server.close)
        return server

    def forget(self, server: Server) -> None:
        if self._listeners.get(server.key) is server:
            del self._listeners[server.key]

    async def connect(self, process: Process, factory: Any, host: str, port: int) -> Any:
        world = self.world
        loop = process.loop
        made: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            if (process.host, host) in self.cut or (host, process.host) in self.cut:
                world.at(0.5, arrive)  # the next attempt of TCP
                return
            server = self._listeners.get((host, port))
            if server is None:
                loop.call_soon_threadsafe(fail)
                return
            link = Link(self, process, server.process)
            self._links.append(link)
            server.process.loop.call_soon_threadsafe(link.ends[1].begin, server.factory)
            world.at(self.delay_s(host, process.host), lambda: loop.call_soon_threadsafe(answered, link))

        def fail() -> None:
            if not made.done():
                made.set_exception(ConnectionRefusedError(111, "Connection refused"))

        def answered(link: Link) -> None:
            if made.done():
                link.ends[0].abort()
            elif link.is_broken:
                made.set_exception(ConnectionResetError(104, "Connection reset by peer"))
            else:
                made.set_result((link.ends[0], link.ends[0].begin(factory)))

        world.at(self.delay_s(process.host, host), arrive)
        async with asyncio.timeout(CONNECT_S_MAX):
            return await made

    def part(self, source: str, target: str) -> None:
        """Let nothing pass from `source` to `target`."""
        self.cut.add((source, target))

    def heal(self) -> None:
        """Let everything pass, some connections having had enough meanwhile."""
        cut, self.cut = self.cut, set()
        for link in list(self._links):
            hosts = [end.process.host for end in link.ends]
            if (hosts[0], hosts[1]) in cut or (hosts[1], hosts[0]) in cut:
                if self.world.random.random() < 0.3:
                    link.reset()
                else:
                    for end in link.ends:
                        end.pump()

    def process_ended(self, process: Process, *, silently: bool) -> None:
        """The process is dead; its peers see that unless its machine went too."""
        for link in list(self._links):
            if any(end.process is process for end in link.ends):
                if silently:
                    link.is_silent = True
                else:
                    link.reset()

    def machine_is_back(self, host: str) -> None:
        """A machine that died answers again: with resets, to those who still think that they are connected."""
        for link in list(self._links):
            if link.is_silent and any(end.process.host == host for end in link.ends):
                link.reset()

    def drop(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)


class Server:
    """asyncio.Server."""

    def __init__(self, network: Network, key: tuple[str, int], process: Process, factory: Any) -> None:
        self.network = network
        self.key = key
        self.process = process
        self.factory = factory

    def close(self) -> None:
        self.network.forget(self)

    async def wait_closed(self) -> None:
        pass


class Link:
    """One connection: two ends."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network = network
        self.is_broken = False
        self.is_silent = False
        self.ends = (Transport(self, client), Transport(self, server))
        self.ends[0].peer, self.ends[1].peer = self.ends[1], self.ends[0]

    def reset(self) -> None:
        """Break it: both ends find out."""
        if not self.is_broken:
            self.is_broken = True
            self.network.drop(self)
            for end in self.ends:
                delay_s = self.network.delay_s(end.process.host, end.peer.process.host)
                end.lose_after(delay_s, ConnectionResetError(104, "Connection reset by peer"))


class Transport(asyncio.Transport):
    """One end of a connection."""

    peer: Transport

    def __init__(self, link: Link, process: Process) -> None:
        super().__init__()
        self.link = link
        self.process = process
        self.world = process.world
        self._protocol: Any = None
        self._out: deque[bytes] = deque()  # under way
        self._out_size = 0
        self._held = 0  # of them, held up by a cut
        self._arrived: deque[bytes | None] = deque()  # None: the peer closed
        self._due = 0.0
        self._high = 1 << 16
        self._is_paused = False
        self._is_reading = True
        self._is_closing = False
        self._is_lost = False

    def begin(self, factory: Callable[[], Any]) -> Any:
        """Give it its protocol, in the process's loop."""
        self._protocol = factory()
        self._protocol.connection_made(self)
        self._take()
        return self._protocol

    # asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name in ("peername", "sockname"):
            return ((self.peer if name == "peername" else self).process.host, 0)
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 1 << 16

    def write(self, data: Any) -> None:
        if self._is_closing or self._is_lost or not data:
            return
        self._out.append(bytes(data))
        self._out_size += len(data)
        if self._out_size > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()
        self._send()

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.process.loop.call_soon(self._take)

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._out.append(b"")
            self._send()
            self.process.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._is_closing = True
        self.link.network.drop(self.link)
        self.link.is_broken = True
        self.process.loop.call_soon(self._lose, None)
        delay_s = self.link.network.delay_s(self.process.host, self.peer.process.host)
        self.peer.lose_after(delay_s, ConnectionResetError(104, "Connection reset by peer"))

    # The wire.

    def pump(self) -> None:
        """Let go on what a cut held up."""
        held, self._held = self._held, 0
        for _ in range(held):
            self._send()

    def _send(self) -> None:
        network, peer = self.link.network, self.peer
        if (self.process.host, peer.process.host) in network.cut:
            self._held += 1
            return
        self._due = max(self._due, self.world.now + network.delay_s(self.process.host, peer.process.host))
        self.world.at(self._due - self.world.now, self._deliver)

    def _deliver(self) -> None:
        """Bring the first of what is under way to the peer."""
        peer = self.peer
        if self.link.is_broken or self.link.is_silent or not peer.process.is_alive:
            return
        if (self.process.host, peer.process.host) in self.link.network.cut:
            self._held += 1
            return
        data = self._out.popleft()
        peer.process.loop.call_soon_threadsafe(peer.arrive, data)
        if data:
            self.process.loop.call_soon_threadsafe(self._acknowledged, len(data))

    def _acknowledged(self, size: int) -> None:
        self._out_size -= size
        if self._is_paused and self._out_size <= self._high // 4 and not self._is_lost:
            self._is_paused = False
            self._protocol.resume_writing()

    def arrive(self, data: bytes) -> None:
        self._arrived.append(data or None)
        self._take()

    def _take(self) -> None:
        """Give the protocol what arrived, in pieces of any size."""
        while self._arrived and self._is_reading and not self._is_lost and self._protocol is not None:
            data = self._arrived.popleft()
            if data is None:
                self._protocol.eof_received()
                self.close()
                return
            random = self.world.random
            if len(data) > 1 and random.random() < 0.2:
                at = random.randrange(1, len(data))
                self._arrived.appendleft(data[at:])
                data = data[:at]
            while data:
                buffer = self._protocol.get_buffer(-1)
                size = min(len(buffer), len(data))
                buffer[:size] = data[:size]
                data = data[size:]
                self._protocol.buffer_updated(size)

    def lose_after(self, delay_s: float, error: Exception | None) -> None:
        self.world.at(delay_s, lambda: self.process.loop.call_soon_threadsafe(self._lose, error))

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost and self._protocol is not None:
            self._is_lost = self._is_closing = True
            self._protocol.connection_lost(error)
            if self.peer._is_lost:
                self.link.network.drop(self.link)
