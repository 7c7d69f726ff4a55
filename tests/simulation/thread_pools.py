"""Doubles of `concurrent.futures`: thread pools whose work runs on greenlets of the process that made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from simulation.hub import Hub, Waiter


class Future:
    """concurrent.futures.Future, of one piece of work."""

    def __init__(self, hub: Hub, work: Callable[[], Any]) -> None:
        self._hub = hub
        self._work = work
        self._state = "pending"
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[Waiter] = []
        self._callbacks: list[Callable[[Any], object]] = []

    def run(self) -> None:
        """Do the work, unless it was cancelled."""
        if self._state != "pending":
            return
        self._state = "running"
        try:
            self._value = self._work()
        except Exception as error:
            self._error = error
        self._settle("finished")

    def cancel(self) -> bool:
        """See Future."""
        if self._state == "pending":
            self._settle("cancelled")
        return self._state == "cancelled"

    def done(self) -> bool:
        """See Future."""
        return self._state in ("finished", "cancelled")

    def result(self, timeout: float | None = None) -> Any:
        """See Future."""
        self.wait(timeout)
        if not self.done():
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See Future."""
        self._callbacks.append(callback)
        if self.done():
            callback(self)

    def wait(self, timeout: float | None = None) -> None:
        """Until it is done."""
        if not self.done():
            waiter = Waiter(self._hub)
            self._waiters.append(waiter)
            waiter.wait(None if timeout is None else int(timeout * 1e6))

    def _settle(self, state: str) -> None:
        self._state = state
        for waiter in self._waiters:
            waiter.fire()
        for callback in self._callbacks:
            callback(self)


class ThreadPool:
    """concurrent.futures.ThreadPoolExecutor. map() does its work in the caller, at once."""

    def __init__(self, hub: Hub, max_workers: int = 1, name: str = "pool", **given: Any) -> None:
        assert hub.thread is not None
        self._hub = hub
        self._process = hub.thread.process
        self._most = max_workers
        self._name = given.get("thread_name_prefix", name)
        self._waiting: deque[Future] = deque()
        self._running = 0
        self._closed = False
        self._idle: list[Waiter] = []

    def submit(self, work: Callable[..., Any], *given: Any, **named: Any) -> Future:
        """See Executor.submit."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._process.must_live()
        future = Future(self._hub, lambda: work(*given, **named))
        self._waiting.append(future)
        if self._running < self._most:
            self._running += 1
            self._process.spawn(self._serve, self._name)
        return future

    def map(self, work: Callable[..., Any], *columns: Iterable[Any]) -> Iterator[Any]:
        """See Executor.map."""
        return map(work, *columns)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor.shutdown."""
        self._closed = True
        if cancel_futures:
            for future in self._waiting:
                future.cancel()
        if wait and self._running:
            waiter = Waiter(self._hub)
            self._idle.append(waiter)
            waiter.wait()

    def _serve(self) -> None:
        try:
            while self._waiting:
                self._waiting.popleft().run()
        finally:
            self._running -= 1
            if not self._running:
                for waiter in self._idle:
                    waiter.fire()


def wait_for(futures: Iterable[Future]) -> None:
    """concurrent.futures.wait."""
    for future in futures:
        future.wait()
