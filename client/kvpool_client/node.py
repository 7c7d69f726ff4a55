"""This node: its segments, who maps them, and what the Master last said of them.

Rules
  - One lock guards what the Master said (epoch, handles, incarnation) and every change of a segment.
  - Workers are let in only while handles are known; they come in with the epoch and handles of one moment.
  - An order to bind a slab as it is bound already changes nothing and is only confirmed again: the order may have
    crossed our first answer, and what workers wrote since must stay.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvpool_client.blockcheck import block_is_bad
from kvpool_client.clock import Clock, new_incarnation
from kvpool_client.logs import Log
from kvpool_client.outbox import Outbox
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.session import Order
from kvpool_client.use import UseTotals
from kvpool_client.workers import Workers
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError, UnknownSegment, Unreachable


class Node:
    """Thread-safe. `segments` stay the caller's to close."""

    def __init__(
        self, node_id: str, incarnation: int, segments: Sequence[OwnedSegment], workers_max: int, clock: Clock, log: Log
    ) -> None:
        self.node_id = node_id
        self.segments = tuple(segments)
        self.workers = Workers(self.segments, workers_max)
        self.outbox = Outbox()
        self.use = UseTotals()
        self.blocks_checked_total = 0
        self.blocks_bad_total = 0
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._incarnation = incarnation
        self._epoch = 0
        self._handles: tuple[int, ...] = ()

    @property
    def incarnation(self) -> int:
        """This life of the node's contents."""
        return self._incarnation

    @property
    def epoch(self) -> int:
        """The highest epoch obeyed."""
        return self._epoch

    def offers(self) -> list[pb.SegmentOffer]:
        """The segments as the Master is told of them."""
        return [
            pb.SegmentOffer(
                index=plan.index, size_bytes=plan.size_bytes, slab_bytes=plan.slab_bytes, numa_node=plan.numa_node
            )
            for plan in (segment.plan for segment in self.segments)
        ]

    # -- what the Master wants -------------------------------------------------------------------------

    def announce(self, handles: tuple[int, ...]) -> None:
        """Let workers in under these handles."""
        with self._lock:
            self._handles = handles

    def obey(self, epoch: int) -> None:
        """Write the epoch to every superblock."""
        with self._lock:
            self._epoch = epoch
            self._identify()

    def clear(self) -> int:
        """Turn workers away, forget all contents; answers the new incarnation."""
        with self._lock:
            self._handles = ()
            self.outbox.forget()
            self._incarnation = new_incarnation(self._clock, self._incarnation)
            self._identify()
            for segment in self.segments:
                segment.unbind_all()
            return self._incarnation

    def bind(self, order: Order) -> None:
        """Carry out an order; the Master will be told. Raises UnknownSegment, ProtocolError: nothing was done then."""
        with self._lock:
            segment = self._segment(order.segment)
            generation, slot_bytes, _ = segment.bound_to(order.slab)
            if slot_bytes != order.slot_bytes:
                generation = segment.bind_slab(order.slab, order.slot_bytes)
        self.outbox.slab_bound(
            pb.SlabBound(segment=order.segment, slab=order.slab, slot_bytes=order.slot_bytes, generation=generation)
        )

    # -- what workers want -----------------------------------------------------------------------------

    def welcome(self, name: str) -> tuple[pb.LocalWelcome, list[int]]:
        """Let a worker in; answers what to tell it and the descriptors to send, which the caller closes.

        Raises Unreachable while the Master has not taken this node in, LimitReached, OSError.
        """
        with self._lock:
            if not self._handles:
                raise Unreachable("the node client is not registered at the Master yet")
            welcome = pb.LocalWelcome(node_id=self.node_id, incarnation=self._incarnation, epoch=self._epoch)
            for handle, segment in zip(self._handles, self.segments, strict=True):
                plan = segment.plan
                welcome.segments.add(
                    handle=handle, index=plan.index, size_bytes=plan.size_bytes, slab_bytes=plan.slab_bytes
                )
            attached = self.workers.attach(name)
        welcome.worker_id = attached.worker_id
        self._log.info("worker_attached", name=name, worker_id=attached.worker_id)
        return welcome, attached.fds

    def report_bad(self, complaint: pb.LocalBadBlock) -> bool:
        """Look at a slot that a worker complains about; if it is bad (True), the Master will be told.

        Raises UnknownSegment, ProtocolError.
        """
        block = complaint.block
        if not block.chain or len(block.namespace_id) != 16:
            raise ProtocolError("a bad block has a chain and a namespace id of 16 bytes")
        with self._lock:
            segment = self._segment(complaint.segment)
        bad = block_is_bad(segment, block, complaint.slot, complaint.slot_bytes)
        self.blocks_checked_total += 1
        self.blocks_bad_total += bad
        if bad:
            self._log.warning(
                "block_bad", namespace=block.namespace_id, stamp=block.stamp, segment=segment.plan.index,
                slot=complaint.slot
            )  # fmt: skip
            self.outbox.block_bad(block)
        return bad

    def used(self, use: pb.LocalUse) -> None:
        """Take in what a worker did with the pool."""
        self.use.add(use)

    def poll_workers(self) -> None:
        """Find the workers that are gone; the Master will be told."""
        for worker_id, name in self.workers.poll():
            self._log.info("worker_gone", name=name, worker_id=worker_id)
            self.outbox.worker_gone(worker_id)

    def _segment(self, handle: int) -> OwnedSegment:
        try:
            return self.segments[self._handles.index(handle)]
        except ValueError:
            raise UnknownSegment(f"segment handle {handle}: this node has {list(self._handles)}") from None

    def _identify(self) -> None:
        for segment in self.segments:
            segment.identify(self._incarnation, self._epoch)
