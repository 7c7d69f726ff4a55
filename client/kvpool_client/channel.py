"""The way to the Master: plain where that was asked for, else a channel to a certificate that was vetted.

gRPC's Python interface knows no revocation lists. So a handshake of our own looks at the Master's certificate first,
and the channel is made to trust that one certificate: whatever gRPC connects to later, by itself, is the same.

Rules
  - Vetting happens on a thread of its own: a call waits for it within its deadline, and for nothing else.
  - It is done before the first call, when files were replaced, and when the Master was not reached: it may have another
    certificate by now. After new files no call begins before it was vetted again.
  - A Master whose certificate is refused loses its connections. Else the former channel stays until there is a next
    one, so that its running calls end.
  - A token goes with every call.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final

import grpc

from kvpool_client.clock import Clock
from kvpool_proto.security import SecurityError
from kvpool_proto.tls import Loaded, Tls

VET_TIMEOUT_S: Final = 3.0
VET_PAUSE_MS: Final = 1_000
"""From one attempt to the next."""

_NOT_REFUSED: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""TLS's words for a connection that broke off."""
_Metadata = tuple[tuple[str, str], ...]


def open_channel(target: str, tls: Tls | None, options: tuple[tuple[str, int], ...], clock: Clock) -> Any:
    """A grpc.Channel to "host:port", or what the stubs take for one. tls None: plain text. Connects when first used."""
    return grpc.insecure_channel(target, options=options) if tls is None else VettedChannel(target, tls, options, clock)


def generation_of(channel: Any) -> int:
    """Rises when a channel of open_channel() got other connections, and sees to it if it is time for that."""
    return channel.look() if isinstance(channel, VettedChannel) else 0


class NotVetted(grpc.RpcError):
    """Raised by calls, as gRPC's own errors are: the Master's certificate was refused, or could not be seen yet."""

    def code(self) -> grpc.StatusCode:
        """See grpc.Call."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """See grpc.Call."""
        return str(self)

    def trailing_metadata(self) -> tuple[Any, ...]:
        """See grpc.Call."""
        return ()


class VettedChannel:
    """What the generated stubs need of grpc.Channel. Thread safe."""

    def __init__(self, target: str, tls: Tls, options: tuple[tuple[str, int], ...], clock: Clock) -> None:
        host, _, port = target.rpartition(":")
        self._address = host.removeprefix("[").removesuffix("]"), int(port)
        self._target = target
        self._tls = tls
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._vetted: tuple[Loaded, bytes] | None = None
        """The files, and the certificate that the present channel trusts."""
        self._channels: list[Any] = []  # the former, the present
        self._generation = 0
        self._metadata: _Metadata = ()
        self._doubted = False
        self._refusal = "no attempt yet"
        self._next_vet_ms = 0
        self._vetting: threading.Event | None = None
        """Set when the attempt under way has ended."""
        self._closed = threading.Event()

    def unary_unary(self, path: str, *serializers: Any, **given: Any) -> VettedCall:
        """See grpc.Channel."""
        return VettedCall(self, lambda channel: channel.unary_unary(path, *serializers, **given))

    def stream_unary(self, path: str, *serializers: Any, **given: Any) -> VettedCall:
        """See grpc.Channel."""
        return VettedCall(self, lambda channel: channel.stream_unary(path, *serializers, **given))

    def stream_stream(self, path: str, *serializers: Any, **given: Any) -> VettedCall:
        """See grpc.Channel."""
        return VettedCall(self, lambda channel: channel.stream_stream(path, *serializers, **given))

    def close(self) -> None:
        """End it; calls under way are cancelled, later ones raise ValueError as gRPC's do."""
        with self._lock:
            self._closed.set()
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def current(self, timeout_s: float, *, persist: bool = False) -> tuple[Any, _Metadata]:
        """The channel to use now, and what to send along. Raises NotVetted, ValueError when closed.

        It waits timeout_s for an attempt to vet, with persist for all that fit.
        """
        end_ms = self._clock.now_ms() + int(timeout_s * 1000)
        while True:
            vetting = self._seen_to()
            if vetting is not None:
                vetting.wait(max(0, end_ms - self._clock.now_ms()) / 1000)
            with self._lock:
                if self._closed.is_set():
                    raise ValueError("Cannot invoke RPC on closed channel!")
                if not self._stale():
                    return self._channels[-1], self._metadata
                refusal, pause_ms = self._refusal, self._next_vet_ms - self._clock.now_ms()
            left_ms = end_ms - self._clock.now_ms()
            if not persist or left_ms <= pause_ms:
                raise NotVetted(f"the Master at {self._target}: {refusal}")
            self._closed.wait(max(0, pause_ms) / 1000)

    def look(self) -> int:
        """Begin to vet, if it is time for that; a number that rises with each channel that is made."""
        self._seen_to()
        return self._generation

    def doubt(self) -> None:
        """The Master was not reached: look at its certificate again."""
        with self._lock:
            self._doubted = True

    def now_ms(self) -> int:
        """By the channel's clock."""
        return self._clock.now_ms()

    def _stale(self) -> bool:
        """Is there no channel that may be used? Under the lock."""
        return self._vetted is None or self._tls.changed_since(self._vetted[0])

    def _seen_to(self) -> threading.Event | None:
        """Begin an attempt if one is due. Answers the end of the one under way if nothing may be done before it."""
        with self._lock:
            stale = self._stale()
            now_ms = self._clock.now_ms()
            due = (stale or self._doubted) and now_ms >= self._next_vet_ms
            if due and self._vetting is None and not self._closed.is_set():
                self._next_vet_ms = now_ms + VET_PAUSE_MS
                self._vetting = threading.Event()
                threading.Thread(target=self._attempt, args=(self._vetting,), name="vet-master", daemon=True).start()
            return self._vetting if stale else None

    def _attempt(self, ended: threading.Event) -> None:
        dropped: list[Any] = []
        try:
            loaded = self._tls.current()
            dropped = self._trust(loaded, self._see(loaded))
        except (OSError, SecurityError) as error:
            refused = isinstance(error, (SecurityError, ssl.SSLError)) and not isinstance(error, _NOT_REFUSED)
            with self._lock:
                self._refusal = getattr(error, "verify_message", "") or str(error)
                if refused:
                    self._vetted = None
                    dropped, self._channels = self._channels, []
        finally:
            with self._lock:
                self._vetting = None
            ended.set()
        for channel in dropped:
            channel.close()

    def _see(self, loaded: Loaded) -> bytes:
        """The Master's certificate, PEM, once both sides have taken the other's. Raises OSError."""
        with socket.create_connection(self._address, VET_TIMEOUT_S) as plain:
            plain.settimeout(VET_TIMEOUT_S)
            with loaded.client.wrap_socket(plain, server_hostname=self._address[0]) as sock:
                if not sock.recv(1):  # the start of HTTP/2, or TLS's word on our certificate
                    raise ConnectionError("it broke off: does it take our certificate?")
                certificate = sock.getpeercert(True)
        assert certificate is not None
        return ssl.DER_cert_to_PEM_cert(certificate).encode()

    def _trust(self, loaded: Loaded, certificate: bytes) -> list[Any]:
        """Use a channel to that certificate from now on; answers the channels to close."""
        with self._lock:
            self._doubted = False
            former, self._vetted = self._vetted, (loaded, certificate)
            if self._closed.is_set() or (former is not None and _same(former, self._vetted)):
                return []
            credentials = grpc.ssl_channel_credentials(certificate, loaded.key, loaded.cert)
            self._channels.append(grpc.secure_channel(self._target, credentials, options=self._options))
            self._generation += 1
            self._metadata = (("authorization", f"Bearer {loaded.token}"),) if loaded.token else ()
            dropped, self._channels = self._channels[:-2], self._channels[-2:]
            return dropped


def _same(former: tuple[Loaded, bytes], now: tuple[Loaded, bytes]) -> bool:
    """Would the same connections be made? A new revocation list alone changes none that is taken under it."""
    (old, trusted), (new, certificate) = former, now
    return trusted == certificate and (old.key, old.cert, old.token) == (new.key, new.cert, new.token)


class VettedCall:
    """A method of the stubs: it finds its channel at each call."""

    def __init__(self, owner: VettedChannel, make: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._make = make
        self._made: tuple[Any, Any] = (None, None)  # the channel, the method on it

    def __call__(
        self, request: Any, timeout: float | None = None, *, wait_for_ready: bool = False, **given: Any
    ) -> Any:
        """As gRPC's. One without a timeout, a stream, does not wait to be vetted. Raises NotVetted."""
        began_ms = self._owner.now_ms()
        method, metadata = self._bound(timeout or 0.0, persist=wait_for_ready)
        if timeout is not None:
            timeout = max(0.0, timeout - (self._owner.now_ms() - began_ms) / 1000)
        try:
            return method(request, timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready, **given)
        except grpc.RpcError as error:
            self._ended(error, wait_for_ready)
            raise

    def future(self, request: Any, timeout: float | None = None, *, wait_for_ready: bool = False, **given: Any) -> Any:
        """As gRPC's; it does not wait to be vetted. Raises NotVetted."""
        method, metadata = self._bound(0.0, persist=False)

        def ended(call: Any) -> None:
            """Look at how it ended."""
            self._ended(call, wait_for_ready)

        future = method.future(request, timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready, **given)
        future.add_done_callback(ended)
        return future

    def _bound(self, timeout_s: float, *, persist: bool) -> tuple[Any, _Metadata]:
        channel, metadata = self._owner.current(timeout_s, persist=persist)
        made_on, method = self._made
        if made_on is not channel:
            method = self._make(channel)
            self._made = (channel, method)
        return method, metadata

    def _ended(self, call: Any, waited: bool) -> None:
        """A call that waited to be connected, in vain, ends by its deadline."""
        code = call.code()
        if code is grpc.StatusCode.UNAVAILABLE or (waited and code is grpc.StatusCode.DEADLINE_EXCEEDED):
            self._owner.doubt()
