"""The way of every RPC: may it, its deadline, its errors, its time. What it does is a plain function of the request.

The few that wait for somebody else are coroutine functions of the request and the seconds that are left of its time.
Those that have to know who asks declare a second parameter `peer`: gRPC's word for the other end of the connection.

Rules
  - Who asks is admitted before anything else is looked at (auth.py); a stream's handler asks for that itself.
  - A request whose deadline has passed is dropped undone.
  - A KVPoolError becomes its status with google.rpc.ErrorInfo. Anything else is a bug of ours: INTERNAL to the
    caller, one traceback in the log, and the Master goes on.
  - Plain functions do not await, so a request is carried out whole or not at all.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from kvpool_master.auth import Auth
from kvpool_master.clock import Clock
from kvpool_master.logs import Log
from kvpool_master.metrics import RpcTimes
from kvpool_proto.errors import DeadlinePassed, KVPoolError
from kvpool_proto.status import CODES, trailing_metadata

Handler = Callable[[Any, Any], Awaitable[Any]]


class Guard:
    """Makes gRPC handlers of plain functions; its own cost is about 2 us a call."""

    def __init__(self, clock: Clock, log: Log, times: RpcTimes, auth: Auth | None = None) -> None:
        self._clock = clock
        self._log = log
        self._times = times
        self._auth = auth

    def admit(self, context: Any, method: str, request: Any = None) -> None:
        """Return if the caller may make this call; see Auth.admit()."""
        if self._auth is not None:
            self._auth.admit(context, method, request)

    def service(self, descriptor: ServiceDescriptor, functions: object) -> Any:
        """A servicer for the generated add_*_to_server: each unary method of the service by the function of its name.

        A method that `functions` lacks is an AttributeError here, at start, not at its first call.
        """
        unary = [method.name for method in descriptor.methods if not method.client_streaming]
        return SimpleNamespace(**{name: self._unary(name, getattr(functions, name)) for name in unary})

    def _unary(self, method: str, function: Callable[..., Any]) -> Handler:
        observe, precise_s = self._times.observe, self._clock.precise_s
        waits = inspect.iscoroutinefunction(function)
        asks_who = "peer" in inspect.signature(function).parameters

        async def handle(request: Any, context: Any) -> Any:
            """Reply as the function does; an error, also a deadline that has passed, ends the RPC."""
            started_s = precise_s()
            code = "OK"
            try:
                self.admit(context, method, request)
                remaining_s = context.time_remaining()
                if remaining_s is not None and remaining_s <= 0:
                    raise DeadlinePassed(f"{method} arrived after its deadline; nothing was done")
                if waits:
                    return await function(request, remaining_s)
                return function(request, context.peer()) if asks_who else function(request)
            except Exception as error:
                code = error.code if isinstance(error, KVPoolError) else "INTERNAL"
                await self.abort(method, context, error)
            finally:
                observe(method, code, precise_s() - started_s)

        return handle

    async def abort(self, method: str, context: Any, error: Exception) -> NoReturn:
        """End the RPC with the error's status. Always raises."""
        if isinstance(error, KVPoolError):
            self._log.debug("rpc_refused", method=method, reason=error.reason, text=str(error))
            await context.abort(CODES[error.code], str(error), trailing_metadata(error))
        else:
            trace = "".join(traceback.format_exception(error))
            self._log.error("rpc_failed", method=method, error=repr(error), traceback=trace)
            await context.abort(grpc.StatusCode.INTERNAL, f"{method} failed in the Master: {error!r}; see its log")
        raise AssertionError("abort() returned")
