"""Doubles of `threading` and `queue`: what kvpool_client asks of them, on the hub's greenlets. Pools: thread_pools.py.

A lock that is taken is a point where the thread may lose the processor. Order is first come, first served.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from simulation.hub import Hub, Waiter


class Lock:
    """threading.Lock."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._held = False
        self._waiting: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See threading.Lock."""
        self._hub.breathe()
        if self._held:
            if not blocking:
                return False
            waiter = Waiter(self._hub)
            self._waiting.append(waiter)
            return waiter.wait(None if timeout < 0 else int(timeout * 1e6))
        self._held = True
        return True

    def release(self) -> None:
        """See threading.Lock."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done:
                waiter.fire()  # it holds the lock from now on
                return
        self._held = False

    def locked(self) -> bool:
        """See threading.Lock."""
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """threading.Condition."""

    def __init__(self, hub: Hub, lock: Lock | None = None) -> None:
        self._hub = hub
        self._lock = lock or Lock(hub)
        self._waiting: deque[Waiter] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See threading.Condition."""
        waiter = Waiter(self._hub)
        self._waiting.append(waiter)
        self._lock.release()
        came = waiter.wait(None if timeout is None else int(timeout * 1e6))
        self._lock.acquire()
        return came

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """See threading.Condition."""
        end_us = None if timeout is None else self._hub.now_us + int(timeout * 1e6)
        result = predicate()
        while not result:
            left_us = None if end_us is None else end_us - self._hub.now_us
            if left_us is not None and left_us <= 0:
                break
            self.wait(None if left_us is None else left_us / 1e6)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        """See threading.Condition."""
        while n and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done:
                waiter.fire()
                n -= 1

    def notify_all(self) -> None:
        """See threading.Condition."""
        self.notify(len(self._waiting))


class Event:
    """threading.Event."""

    def __init__(self, hub: Hub) -> None:
        self._changed = Condition(hub)
        self._set = False

    def is_set(self) -> bool:
        """See threading.Event."""
        return self._set

    def set(self) -> None:
        """See threading.Event."""
        self._set = True
        self._changed.notify_all()

    def clear(self) -> None:
        """See threading.Event."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See threading.Event."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._set, timeout))


class Thread:
    """threading.Thread, in the process of the thread that makes it."""

    def __init__(
        self, hub: Hub, target: Callable[..., object], name: str = "thread", args: Iterable[Any] = (), **_: object
    ) -> None:
        assert hub.thread is not None
        self._hub = hub
        self._process = hub.thread.process
        self._work = lambda: target(*args)
        self._name = name
        self._started: Any = None

    def start(self) -> None:
        """See threading.Thread."""
        self._process.must_live()
        self._started = self._process.spawn(self._work, self._name)

    def is_alive(self) -> bool:
        """See threading.Thread."""
        return self._started is not None and not self._started.finished

    def join(self, timeout: float | None = None) -> None:
        """See threading.Thread."""
        if self.is_alive():
            waiter = Waiter(self._hub)
            self._started.waiters.append(waiter)
            waiter.wait(None if timeout is None else int(timeout * 1e6))


class Queue:
    """queue.Queue."""

    def __init__(self, hub: Hub, maxsize: int = 0) -> None:
        self._changed = Condition(hub)
        self._items: deque[Any] = deque()
        self._maxsize = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """See queue.Queue."""
        with self._changed:
            room = lambda: not self._maxsize or len(self._items) < self._maxsize  # noqa: E731
            if not self._changed.wait_for(room, timeout if block else 0):
                raise queue.Full
            self._items.append(item)
            self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See queue.Queue."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout if block else 0):
                raise queue.Empty
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def put_nowait(self, item: Any) -> None:
        """See queue.Queue."""
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        """See queue.Queue."""
        return self.get(block=False)

    def empty(self) -> bool:
        """See queue.Queue."""
        return not self._items


class Semaphore:
    """threading.Semaphore."""

    def __init__(self, hub: Hub, value: int = 1) -> None:
        self._changed = Condition(hub)
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """See threading.Semaphore."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._value, timeout if blocking else 0):
                return False
            self._value -= 1
            return True

    def release(self) -> None:
        """See threading.Semaphore."""
        with self._changed:
            self._value += 1
            self._changed.notify()


def threading_double(hub: Hub) -> SimpleNamespace:
    """Stands in for the module `threading`."""
    return SimpleNamespace(
        Lock=lambda: Lock(hub),
        RLock=lambda: Lock(hub),
        Condition=lambda lock=None: Condition(hub, lock),
        Event=lambda: Event(hub),
        Semaphore=lambda value=1: Semaphore(hub, value),
        get_ident=lambda: id(hub.thread),
        Thread=lambda *args, **given: Thread(hub, *args, **given),
    )


def queue_double(hub: Hub) -> SimpleNamespace:
    """Stands in for the module `queue`."""
    return SimpleNamespace(Queue=lambda maxsize=0: Queue(hub, maxsize), Empty=queue.Empty, Full=queue.Full)
