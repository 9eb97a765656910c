"""A world in which one seed decides everything that a program waits for: time, threads, event loops, random numbers.

    World      virtual time, one queue of events; exactly one fiber runs at a time
    Process    what lives and dies together: an event loop, threads, a clock that may be wrong
    Fiber      one flow of control: an event loop, or a thread of the product

A fiber runs on a real thread, and hands a baton on when it waits, so the product's own threads, locks and queues work
unchanged (`World.patched` puts ours in the place of `threading`, `time`, `queue` and `random` in its modules), and
their order is the seed's. Nothing sleeps: time jumps to the next event.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import heapq
import importlib
import logging
import pkgutil
import queue
import random
import sys
import threading
import time
import types
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from bkctl.ids import random_u64
from bkctl.protocol import server
from bkctl.protocol.acceptor import Acceptor

#: 2026-01-01, the wall clock when a world begins.
EPOCH_S = 1_767_225_600
#: The name of the threads that carry fibers.
CARRIER = "simulation"
#: A turn of an event loop takes at most so long.
TURN_S = 20e-6


class Killed(BaseException):
    """The process of this fiber is dead; not an Exception, so that nothing handles it."""


class Stuck(AssertionError):
    """Nothing can happen any more, or it takes for ever."""


class Fiber:
    """One flow of control of a process; made by `Process.spawn`."""

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.run = run
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.ticket = 0
        self.is_parked = True
        self.is_started = False
        self.is_done = False
        self.was_woken = False
        self.unwinder: Fiber | None = None
        self.joiners: list[Fiber] = []


class _Carrier:
    """A real thread that carries one fiber after the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fiber: Fiber | None = None
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.thread = threading.Thread(target=self._run, daemon=True, name=CARRIER)
        self.thread.start()

    def _run(self) -> None:
        world = self.world
        while True:
            self.go.acquire()
            fiber, self.fiber = self.fiber, None
            if fiber is None:
                return
            try:
                contextvars.Context().run(fiber.run)
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - reported: it fails the run
                if fiber.process.is_alive:
                    world.fail(error)
            fiber.is_done = True
            fiber.process.fibers.pop(fiber, None)
            for joiner in fiber.joiners:
                world.wake(joiner)
            world.carriers.append(self)
            if fiber.unwinder is not None:
                world.current = fiber.unwinder
                fiber.unwinder.baton.release()
            else:
                world.hand_on()


class World:
    """Virtual time and the queue of events; `with World(seed) as world` patches the product and ends all fibers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[str] = []
        #: The directory that everything is in: it is another in each run, and so stays out of the trace.
        self.hidden_path = "\0"
        #: A running checksum over who ran when: two runs of one seed that differ anywhere differ in it.
        self.digest = 0
        self.event_count = 0
        self.failure: BaseException | None = None
        self.limit_s = float("inf")
        self.carriers: list[_Carrier] = []
        self._carrier_count = 0
        self._events: list[tuple[float, int, Any, int, bool]] = []
        self._sequence = 0
        self._hashes = 0
        #: The network of the event loops.
        self.network: Any = None
        self.processes: list[Process] = []
        self.outside = Process(self, "world", "0.0.0.0")
        self.root = Fiber(self.outside, "root", lambda: None)
        self.root.is_started = True
        self.root.is_parked = False
        self.current = self.root

    # --- log and trace -----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self.hidden_path in text:
            text = text.replace(self.hidden_path, "…")
        self.trace.append(f"{self.now:11.6f} {text}")

    def fail(self, error: BaseException) -> None:
        """End the run: `error` is raised in the fiber of the test."""
        if self.failure is None:
            self.failure = error
            self.note(f"FAILED {type(error).__name__}: {error}")
        self.wake(self.root)

    # --- time --------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run `call`, which must not wait, after `delay_s`."""
        self._sequence += 1
        heapq.heappush(self._events, (self.now + delay_s, self._sequence, call, 0, False))

    def wake(self, fiber: Fiber, delay_s: float = 0.0) -> None:
        """Let a fiber that waits go on."""
        if fiber.is_parked and not fiber.is_done:
            self._sequence += 1
            heapq.heappush(self._events, (self.now + delay_s, self._sequence, fiber, fiber.ticket, True))

    def sleep(self, delay_s: float) -> None:
        """Let `delay_s` pass for this fiber."""
        deadline = self.now + delay_s
        while self.now < deadline:
            self.park(deadline - self.now)

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait until woken or for `timeout_s`; whether it was woken."""
        me = self.current
        if not me.process.is_alive:
            raise Killed
        me.ticket += 1
        me.is_parked = True
        if timeout_s is not None:
            self._sequence += 1
            # A little later, or rounding could leave a rest of zero to wait for.
            heapq.heappush(self._events, (self.now + timeout_s + 1e-9, self._sequence, me, me.ticket, False))
        self.hand_on(me)
        if not me.process.is_alive:
            raise Killed
        if me is self.root and self.failure is not None:
            raise self.failure
        return me.was_woken

    def hand_on(self, me: Fiber | None = None) -> None:
        """Let whoever is next run; returns when it is the turn of `me` again, at once without."""
        following = self._next()
        self.current = following
        following.is_parked = False
        if following is me:
            return
        if following.is_started:
            following.baton.release()
        else:
            following.is_started = True
            carrier = self.carriers.pop() if self.carriers else _Carrier(self)
            carrier.fiber = following
            carrier.go.release()
        if me is not None:
            me.baton.acquire()

    def _next(self) -> Fiber:
        while True:
            if self.failure is not None:
                return self.root
            if not self._events or self.now > self.limit_s:
                self.failure = Stuck("nothing can happen any more" if not self._events else "it takes for ever")
                return self.root
            due, _, what, ticket, woken = heapq.heappop(self._events)
            if type(what) is Fiber:
                if what.is_done or not what.is_parked or what.ticket != ticket:
                    continue
                self.now = max(self.now, due)
                what.was_woken = woken
                self.event_count += 1
                self.digest = zlib.crc32(f"{self.now} {what.process.name} {what.name}".encode(), self.digest)
                return what
            self.now = max(self.now, due)
            try:
                what()
            except Exception as error:  # noqa: BLE001 - reported: it fails the run
                self.fail(error)

    # --- life --------------------------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """End a process here and now: whatever its fibers are doing, nothing of it has an effect any more."""
        assert self.current.process is not process
        if not process.is_alive:
            return
        process.is_alive = False
        me = self.current
        for fiber in list(process.fibers):
            if fiber.is_started:
                fiber.unwinder = me
                self.current = fiber
                fiber.baton.release()
                me.baton.acquire()
                self.current = me
            fiber.is_done = True
        process.fibers.clear()
        process.loop.bury()
        for call in process.at_death:
            call()

    def __enter__(self) -> World:
        self._patches = contextlib.ExitStack()
        log = logging.getLogger("bkctl")
        level, handler = log.level, _LogToTrace(self)
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        self._patches.callback(log.removeHandler, handler)
        self._patches.callback(log.setLevel, level)
        self._patches.enter_context(patched(self))
        return self

    def __exit__(self, *_: object) -> None:
        self.failure = None
        for process in self.processes[1:]:
            if process.is_alive:
                self.kill(process)
        for carrier in self.carriers:
            carrier.go.release()
            carrier.thread.join()
        for process in self.processes:
            process.loop.forget_tasks()
        self._patches.close()

    def hash_of(self, each: Any) -> int:
        """A number for sets, in the order of first use: an object's address would be another in each run."""
        try:
            number: int = each.simulated_hash
        except AttributeError:
            self._hashes += 1
            number = each.simulated_hash = self._hashes
        return number


class _LogToTrace(logging.Handler):
    """Writes the product's log into the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        self.world.note(f"{self.world.current.process.name} says: {record.getMessage()}")


class Process:
    """A process: its tasks live and die together. `host` is its address."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.is_alive = True
        self.fibers: dict[Fiber, None] = {}
        self.at_death: list[Callable[[], None]] = []
        #: The error of its wall clock; monotonic time is right.
        self.clock_error_s = 0.0
        self.loop = SimulatedLoop(self)
        self.loop.network = world.network
        world.processes.append(self)

    def spawn(self, run: Callable[[], None], name: str, delay_s: float = 0.0) -> Fiber:
        """Start a flow of control."""
        if not self.is_alive:
            raise Killed
        fiber = Fiber(self, name, run)
        self.fibers[fiber] = None
        self.world.wake(fiber, delay_s)
        return fiber

    def start(self, main: Callable[[], Any]) -> None:
        """Run the coroutine that `main` makes in this process's event loop, until the process dies."""

        def run() -> None:
            self.loop.call_soon(lambda: self.loop.create_task(main()))
            self.loop.run()

        self.spawn(run, "loop")


# --- the event loop --------------------------------------------------------------------------------------------------


class _Future(asyncio.Future):  # type: ignore[type-arg]
    def __hash__(self) -> int:
        return world_now().hash_of(self)


class _Task(asyncio.Task):  # type: ignore[type-arg]
    def __hash__(self) -> int:
        return world_now().hash_of(self)


def _make_task(loop: SimulatedLoop, coroutine: Any, **options: Any) -> _Task:
    task = _Task(coroutine, loop=loop, **options)
    task._log_destroy_pending = False
    loop.tasks[task] = None
    task.add_done_callback(loop.tasks.pop)
    return task


class SimulatedLoop(asyncio.BaseEventLoop):
    """asyncio's own loop, in virtual time; the network is the one of `network`, which is set from outside."""

    network: Any = None

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._selector = types.SimpleNamespace(select=self._select)
        self._clock_resolution = 1e-9
        self.process = process
        self.world = process.world
        self.fiber: Fiber | None = None
        self.tasks: dict[_Task, None] = {}
        self._is_due = False
        self.set_task_factory(_make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._complain)

    def _complain(self, _: Any, context: dict[str, Any]) -> None:
        if not self.process.is_alive or isinstance(context.get("exception"), Killed):
            return
        error = context.get("exception") or AssertionError(context["message"])
        self.world.note(f"{self.process.name}: {context['message']}")
        if error.__traceback__ is None or not isinstance(error, Exception):
            error = AssertionError(f"{self.process.name}: {context['message']}: {error!r}")
        self.world.fail(error)

    def time(self) -> float:
        return self.world.now

    def run(self) -> None:
        """Run until the process dies."""
        self.fiber = self.world.current
        self._thread_id = threading.get_ident()
        sys.set_asyncgen_hooks(None, None)
        asyncio._set_running_loop(self)
        try:
            while self.process.is_alive:
                self._run_once()
        finally:
            self._thread_id = None
            asyncio._set_running_loop(None)

    def _select(self, timeout_s: float | None) -> None:
        world = self.world
        if timeout_s == 0 or self._is_due:
            timeout_s = world.random.random() * TURN_S
            world.sleep(timeout_s)
        else:
            world.park(timeout_s)
        self._is_due = False

    def _process_events(self, event_list: object) -> None:
        pass

    def _write_to_self(self) -> None:
        self._is_due = True
        if self.fiber is not None and self.world.current is not self.fiber:
            self.world.wake(self.fiber, self.world.random.random() * TURN_S)

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle = super()._call_soon(callback, args, context)
        if self._closed:
            self._ready.clear()
        return handle

    def _check_closed(self) -> None:
        pass  # what is left of a dead process may still call, to no effect

    def bury(self) -> None:
        """The process is dead."""
        self._closed = True
        self._ready.clear()
        self._scheduled.clear()

    def forget_tasks(self) -> None:
        """Close what the process was doing when it died, so that nothing closes it later, at any time."""
        tasks, self.tasks = list(self.tasks), {}
        for task in tasks:
            with contextlib.suppress(BaseException):
                task.get_coro().close()

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            result = error = None
            try:
                result = func(*args)
            except Exception as failure:  # noqa: BLE001 - handed to the future
                error = failure
            self.call_soon_threadsafe(settle, result, error)

        if executor is None:
            self.process.spawn(run, "worker", self.world.random.random() * TURN_S)
        else:
            executor.submit(run)
        return future

    async def create_connection(self, factory: Any, host: str, port: int, **_: Any) -> Any:  # type: ignore[override]
        return await self.network.connect(self.process, factory, host, port)

    async def create_server(self, factory: Any, host: Any = None, port: int = 0, **_: Any) -> Any:  # type: ignore[override]
        return self.network.listen(self.process, factory, port)


# --- in the place of threading, queue, time and random ---------------------------------------------------------------

_world: World | None = None


def world_now() -> World:
    """The world that is patched in."""
    assert _world is not None
    return _world


class Lock:
    """threading.Lock and RLock."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._owner: Fiber | None = None
        self._depth = 0
        self._waiting: deque[Fiber] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = world_now()
        me = world.current
        if self._reentrant and self._owner is me:
            self._depth += 1
            return True
        deadline = None if timeout < 0 else world.now + timeout
        while self._owner is not None and self._owner.process.is_alive:
            if not blocking or (deadline is not None and world.now >= deadline):
                return False
            self._waiting.append(me)
            world.park(None if deadline is None else deadline - world.now)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                world_now().wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """threading.Condition."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock(reentrant=True)
        self._waiting: deque[Fiber] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        world = world_now()
        me = world.current
        self._waiting.append(me)
        self._lock.release()
        woken = False
        try:
            woken = world.park(timeout)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(me)
            self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        world = world_now()
        deadline = None if timeout is None else world.now + timeout
        while not (found := predicate()):
            if deadline is not None and world.now >= deadline:
                break
            self.wait(None if deadline is None else deadline - world.now)
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            world_now().wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    """threading.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._condition = Condition()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        world = world_now()
        deadline = None if timeout is None else world.now + timeout
        while not self._is_set:
            if deadline is not None and world.now >= deadline:
                break
            with self._condition:
                self._condition.wait(None if deadline is None else deadline - world.now)
        return self._is_set


class Thread:
    """threading.Thread."""

    def __init__(self, group: None = None, target: Any = None, name: str | None = None, args: Any = (),
                 kwargs: Any = None, *, daemon: bool | None = None) -> None:  # fmt: skip
        self.name = name or "thread"
        self.daemon = daemon
        self._call = (target, args, kwargs or {})
        self._fiber: Fiber | None = None

    def run(self) -> None:
        target, args, kwargs = self._call
        target(*args, **kwargs)

    def start(self) -> None:
        world = world_now()
        self._fiber = world.current.process.spawn(self.run, self.name, world.random.random() * TURN_S)
        self.ident = id(self._fiber)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.is_done

    def join(self, timeout: float | None = None) -> None:
        world = world_now()
        deadline = None if timeout is None else world.now + timeout
        assert self._fiber is not None
        while not self._fiber.is_done and (deadline is None or world.now < deadline):
            self._fiber.joiners.append(world.current)
            world.park(None if deadline is None else deadline - world.now)


class SimpleQueue:
    """queue.SimpleQueue and Queue, without a bound."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Fiber] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if self._waiting:
            world = world_now()
            world.wake(self._waiting.popleft(), world.random.random() * TURN_S)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        world = world_now()
        deadline = None if timeout is None else world.now + timeout
        while not self._items:
            if not block or (deadline is not None and world.now >= deadline):
                raise queue.Empty
            self._waiting.append(world.current)
            world.park(None if deadline is None else deadline - world.now)
            with contextlib.suppress(ValueError):
                self._waiting.remove(world.current)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Executor:
    """concurrent.futures.ThreadPoolExecutor."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool", **_: Any) -> None:
        self._size = self._free = max_workers or 8
        self._name = thread_name_prefix
        self._queue: deque[Callable[[], None]] = deque()

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> _Result:
        result = _Result()
        self._queue.append(lambda: result.settle(call, args, kwargs))
        if self._free:
            self._free -= 1
            world = world_now()
            world.current.process.spawn(self._work, self._name, world.random.random() * TURN_S)
        return result

    def map(self, call: Callable[..., Any], *iterables: Any) -> Iterator[Any]:
        results = [self.submit(call, *arguments) for arguments in zip(*iterables, strict=False)]
        return (each.result() for each in results)

    def _work(self) -> None:
        while self._queue:
            self._queue.popleft()()
        self._free += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._queue.clear()
        while wait and (self._queue or self._free < self._size):
            world_now().sleep(TURN_S)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _Result:
    """concurrent.futures.Future, as far as the product uses it."""

    def __init__(self) -> None:
        self._done = Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def settle(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            self._value = call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - handed to who asks
            self._error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class _Stand:
    """A module with some of its names replaced."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _stands(world: World) -> dict[int, Any]:
    """Replacements by the identity of the original."""

    def wall_s() -> float:
        return EPOCH_S + world.now + world.current.process.clock_error_s

    def monotonic() -> float:
        return world.now

    stand_time = _Stand(
        time, monotonic=monotonic, perf_counter=monotonic, time=wall_s, time_ns=lambda: int(wall_s() * 1e9),
        monotonic_ns=lambda: int(world.now * 1e9), sleep=world.sleep,
    )  # fmt: skip

    def make_random(seed: Any = None) -> random.Random:
        return random.Random(world.random.getrandbits(64) if seed is None else seed)

    stand_random = _Stand(
        random, SystemRandom=make_random, Random=make_random, random=world.random.random,
        randrange=world.random.randrange, uniform=world.random.uniform, choice=world.random.choice,
        shuffle=world.random.shuffle,
    )  # fmt: skip
    stand_threading = _Stand(
        threading, Thread=Thread, Lock=Lock, RLock=lambda: Lock(reentrant=True), Condition=Condition, Event=Event,
        get_ident=lambda: id(world.current),
    )  # fmt: skip
    stand_uuid = _Stand(uuid, uuid4=lambda: uuid.UUID(int=world.random.getrandbits(128), version=4))
    stand_queue = _Stand(queue, SimpleQueue=SimpleQueue, Queue=SimpleQueue)
    replaced = {
        time: stand_time, random: stand_random, threading: stand_threading, uuid: stand_uuid, queue: stand_queue,
        queue.SimpleQueue: SimpleQueue, queue.Queue: SimpleQueue, threading.Thread: Thread, threading.Lock: Lock,
        ThreadPoolExecutor: Executor, random_u64: lambda: world.random.getrandbits(64),
    }  # fmt: skip
    return {id(real): (real, stand) for real, stand in replaced.items()}


@contextlib.contextmanager
def _databases_die_with_their_process(world: World) -> Iterator[None]:
    """RocksDB has threads and open files of its own: close it when its process is killed, wherever it is."""
    from bkctl.files.rocksdb import Database

    real = Database._open_to_write.__func__  # type: ignore[attr-defined]

    def open_to_write(cls: type[Database], *arguments: Any, **options: Any) -> Database:
        database: Database = real(cls, *arguments, **options)

        def close() -> None:
            rocks, database._database = database._database, None
            if rocks is not None:
                rocks.close()

        world.current.process.at_death.append(close)
        return database

    with mock.patch.object(Database, "_open_to_write", classmethod(open_to_write)):
        yield


_result = concurrent.futures.Future.result


def _await_result(future: concurrent.futures.Future[Any], timeout: float | None = None) -> Any:
    """Future.result for a fiber: it waits in the world's time."""
    if threading.current_thread().name == CARRIER:
        world = world_now()
        deadline = None if timeout is None else world.now + timeout
        me = world.current
        future.add_done_callback(lambda _: world.wake(me))
        while not future.done() and (deadline is None or world.now < deadline):
            world.park(None if deadline is None else deadline - world.now)
        timeout = None if future.done() else 0
    return _result(future, timeout)


def _numbered_hash(each: Any) -> int:
    return world_now().hash_of(each)


_PACKAGES = (
    "bkctl.bookie",
    "bkctl.storage",
    "bkctl.storage.ledger",
    "bkctl.files",
    "bkctl.checks",
    "bkctl.client",
    "bkctl.protocol",
    "bkctl.metadata",
)


@functools.cache
def _modules() -> list[types.ModuleType]:
    """The product's modules that a world has to do with, imported late ones too."""
    for package in _PACKAGES[:-1]:
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            importlib.import_module(found.name)
    names = sorted(name for name in sys.modules if name.startswith((*_PACKAGES, "bkctl.ids", "bkctl.disk")))
    return [sys.modules[name] for name in names]


async def _listen(host: str, port: int, serve: Callable[[], Any], **_: Any) -> Any:
    """Acceptor.listen in the simulated network."""
    return await asyncio.get_running_loop().create_server(serve, host, port)


async def _claim_port(host: str, port: int) -> list[Any]:
    """A simulated network has no sockets: Acceptor.listen claims the port there."""
    return []


@contextlib.contextmanager
def patched(world: World) -> Iterator[None]:
    """The product's modules use the world's time, threads, queues and random numbers."""
    global _world
    assert _world is None, "one world at a time"
    stands = _stands(world)
    classes = set()
    with contextlib.ExitStack() as patches:
        patches.enter_context(_databases_die_with_their_process(world))
        # asyncio.run_coroutine_threadsafe gives one of these.
        patches.enter_context(mock.patch.object(concurrent.futures.Future, "result", _await_result))
        patches.enter_context(mock.patch.object(Acceptor, "listen", _listen))
        patches.enter_context(mock.patch.object(server, "claim_port", _claim_port))
        # Imported where it is used, so replaced at its source.
        patches.enter_context(mock.patch.object(uuid, "uuid4", stands[id(uuid)][1].uuid4))
        for module in _modules():
            name = module.__name__
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    if value.__hash__ is object.__hash__ and value.__dictoffset__:
                        classes.add(value)
                    for function in vars(value).values():
                        for option, default in (getattr(function, "__kwdefaults__", None) or {}).items():
                            if default is time.monotonic:
                                clock = {option: stands[id(time)][1].monotonic}
                                patches.enter_context(mock.patch.dict(function.__kwdefaults__, clock))
                    continue
                real, stand = stands.get(id(value), (None, None))
                if real is value and real is not None:
                    patches.enter_context(mock.patch.object(module, attribute, stand))
        for kept_in_sets in sorted(classes, key=lambda each: each.__qualname__):
            patches.enter_context(mock.patch.object(kept_in_sets, "__hash__", _numbered_hash, create=True))
        _world = world
        try:
            yield
        finally:
            _world = None
