"""This process's tie to the node client: mapped segments, the worker's number, complaints about bad blocks.

Rules
  - A node client that is away or new costs one Hello, then nothing for HELLO_PAUSE_MS.
  - Handles mean something within one epoch only: a segment is found by (epoch, handle).
  - An attachment keeps its mappings, and with them the worker's lock, for as long as somebody holds it: a store holds
    the one under whose number it reserved until its last copy is done.
  - A new mapping has no page tables: the first copy through it ran at 1.8 instead of 8 GB/s. So each is read through
    once, a byte in every 64 KiB (the kernel maps that much around a fault), by a thread of its own: 0.1 s a GiB.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from kvpool_client.clock import Clock
from kvpool_client.local_socket import LocalClient
from kvpool_client.segment import AttachedSegment
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import KVPoolError, NodeUnreachable, SegmentElsewhere

HELLO_PAUSE_MS: Final = 500
_FAULT_BYTES: Final = 64 << 10
_WARM_BYTES: Final = 256 << 20
"""Read in one go, after which the thread looks whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """What one Hello brought. segments: by handle."""

    node_id: str
    epoch: int
    worker_id: int
    segments: dict[int, AttachedSegment]

    def holds(self, epoch: int, handles: Set[int]) -> bool:
        """Are these segments mapped, by their handles of that epoch?"""
        return self.epoch == epoch and self.segments.keys() >= handles


class NodeLink:
    """Thread safe. Methods may wait for the node client, for about twice the timeout of `client`."""

    def __init__(self, client: LocalClient, name: str, clock: Clock) -> None:
        self._client = client
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._next_hello_ms = 0
        self._warming: threading.Thread | None = None

    def attachment(self) -> Attachment:
        """The present attachment, made first if there is none. Raises NodeUnreachable."""
        with self._lock:
            found = self._attachment or self._hello()
        if found is None:
            raise NodeUnreachable("the node client does not answer")
        return found

    def holding(self, epoch: int, handles: Set[int]) -> Attachment:
        """An attachment that holds these segments, after a new Hello if need be.

        Raises SegmentElsewhere if there is none now, NodeUnreachable if there was never any.
        """
        found = self.attachment()
        if not found.holds(epoch, handles):
            with self._lock:
                found = self._hello() or found
            if not found.holds(epoch, handles):
                raise SegmentElsewhere(f"segments {sorted(handles)} of epoch {epoch} are not all mapped here")
        return found

    def report_bad(self, block: pb.BadBlock, segment: int, slot: int, slot_bytes: int) -> bool:
        """Let the node client look at a block again. True: it found it bad, too."""
        try:
            return self._client.report_bad(block, segment, slot, slot_bytes)
        except KVPoolError:
            return False  # whoever meets the block next reports it again

    def report_use(self, use: pb.LocalUse) -> None:
        """Tell the node client what this worker did, for its metrics; what cannot be told is lost to them."""
        if use.namespaces and self._attachment is not None:
            with contextlib.suppress(KVPoolError):
                self._client.report_use(use)

    def close(self) -> None:
        """End the connection and let the segments go; they are unmapped when the last copy is done."""
        with self._lock:
            self._attachment = None
            self._next_hello_ms = 1 << 62
            warming, self._warming = self._warming, None
        if warming is not None:
            warming.join()
        self._client.close()

    def _hello(self) -> Attachment | None:
        """A new attachment, which stays until the next one; the old one is kept if there is no answer."""
        now_ms = self._clock.now_ms()
        if now_ms < self._next_hello_ms:
            return self._attachment
        try:
            welcome = self._client.hello(self._name)
        except (KVPoolError, OSError):  # OSError: no room for the mapping, say
            self._next_hello_ms = self._clock.now_ms() + HELLO_PAUSE_MS
            return self._attachment
        self._next_hello_ms = self._clock.now_ms() + HELLO_PAUSE_MS
        segments = {segment.handle: segment for segment in welcome.segments}
        self._attachment = Attachment(welcome.node_id, welcome.epoch, welcome.worker_id, segments)
        self._warming = threading.Thread(target=self._warm, args=(self._attachment,), name="kvpool-warm", daemon=True)
        self._warming.start()
        return self._attachment

    def _warm(self, attachment: Attachment) -> None:
        for segment in attachment.segments.values():
            for start in range(0, len(segment.memory), _WARM_BYTES):
                if self._attachment is not attachment:
                    return
                segment.memory[start : start + _WARM_BYTES : _FAULT_BYTES].max()
