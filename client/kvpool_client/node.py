"""This node: its segments, who maps them, what the Master last said of them, and what peers may do with them.

Rules
  - One lock guards what the Master said (epoch, handles) and every change of a segment.
  - Workers are let in only while handles are known; they come in with the epoch and handles of one moment. A new
    epoch makes handles unknown until the Master says new ones. To the data port the former epoch's handles keep their
    meaning: what its capabilities still allow is for the keyring to say.
  - Slots are cleared when nothing is written under their stamps through the data port any more, nor will be; waiting
    for that is never done here, nor under the lock.
  - The incarnation and what the segments hold stay as they are, whatever the Master does.
  - An order to bind a slab as it is bound already changes nothing and is only confirmed again: the order may have
    crossed our first answer, and what workers wrote since must stay.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from kvpool_client.blockcheck import block_is_bad
from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.logs import Log
from kvpool_client.outbox import Outbox
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.peer.keyring import Keyring
from kvpool_client.peer.writes import PeerWrites
from kvpool_client.session_messages import Clearing, Order, Tombstones
from kvpool_client.use import UseTotals
from kvpool_client.workers import Workers
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError, UnknownSegment, Unreachable


class Node:
    """Thread-safe. `segments` stay the caller's to close.

    incarnation: above those of former lives. It and the highest epoch that any segment has seen are written to every
    superblock. data_address: at which peers reach the data port; empty: there is none.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: int,
        segments: Sequence[OwnedSegment],
        workers_max: int,
        log: Log,
        clock: Clock = SYSTEM,
    ) -> None:
        self.node_id = node_id
        self.data_address = ""
        self.keyring = Keyring(clock)
        self.writes = PeerWrites()
        self.segments = tuple(segments)
        self.workers = Workers(self.segments, workers_max)
        self.outbox = Outbox()
        self.use = UseTotals()
        self.blocks_checked_total = 0
        self.blocks_bad_total = 0
        self.slots_cleared_total = 0
        self.bypass = self.segments[0].bypass()  # as a former life left it
        self._log = log
        self._lock = threading.Lock()
        self._incarnation = incarnation
        self._epoch = max(segment.epoch_seen for segment in self.segments)
        self._handles: tuple[int, ...] = ()
        self._named: Mapping[tuple[int, int], OwnedSegment] = {}
        """By epoch and handle, of this epoch and the one before in which handles were known; replaced as a whole."""
        self._dead: dict[bytes, int] = {}
        self._identify()

    @property
    def incarnation(self) -> int:
        """This life of the node client."""
        return self._incarnation

    @property
    def epoch(self) -> int:
        """The highest epoch obeyed, by this life of the node client or a former one; 0: none."""
        return self._epoch

    @property
    def handles(self) -> tuple[int, ...]:
        """What the Master calls the segments, in their order; empty: it has not said."""
        return self._handles

    @property
    def dead(self) -> dict[bytes, int]:
        """The newest dead stamp of each namespace that was purged, as far as the Master has said; a copy."""
        with self._lock:
            return self._dead.copy()

    def segment_of(self, epoch: int, handle: int) -> OwnedSegment:
        """What that epoch, the present one or the one before, calls so. Takes no lock. Raises UnknownSegment."""
        segment = self._named.get((epoch, handle))
        if segment is None:
            raise UnknownSegment(f"segment handle {handle} of epoch {epoch} is none of this node")
        return segment

    def offers(self) -> list[pb.SegmentOffer]:
        """The segments as the Master is told of them."""
        with self._lock:
            return [
                pb.SegmentOffer(
                    index=segment.plan.index,
                    size_bytes=segment.plan.size_bytes,
                    slab_bytes=segment.plan.slab_bytes,
                    numa_node=segment.plan.numa_node,
                    contents=segment.contents,
                    holds=segment.holds,
                )
                for segment in self.segments
            ]

    # -- what the Master wants -------------------------------------------------------------------------

    def announce(self, handles: tuple[int, ...]) -> None:
        """Let workers in under these handles."""
        with self._lock:
            self._handles = handles
            former = max((epoch for epoch, _ in self._named if epoch != self._epoch), default=0)
            self._named = {name: segment for name, segment in self._named.items() if name[0] == former} | {
                (self._epoch, handle): segment for handle, segment in zip(handles, self.segments, strict=True)
            }

    def obey(self, epoch: int) -> None:
        """Write the epoch to every superblock; the handles of the former one mean nothing any more."""
        with self._lock:
            self._epoch = epoch
            self._handles = ()
            self._identify()

    def set_bypass(self, bits: int) -> None:
        """Write the switch to every superblock, where workers see it at their next call. bits: see bypass.py."""
        with self._lock:
            if bits != self.bypass:
                self._log.warning("bypass", bits=bits)
            self.bypass = bits
            for segment in self.segments:
                segment.set_bypass(bits)

    def bury(self, tombstones: Tombstones) -> None:
        """Clear what is dead. What was buried before is not looked for again: inventories leave it out anyway."""
        for namespace, stamp in tombstones:
            with self._lock:
                if stamp <= self._dead.get(namespace, -1):
                    continue
                self._dead[namespace] = stamp
                slots = sum(segment.bury(namespace, stamp) for segment in self.segments)
                self.slots_cleared_total += slots
            self._log.info("buried", namespace=namespace, stamp=stamp, slots=slots)

    def bind(self, order: Order) -> bool:
        """Carry out an order; the Master will be told: True. Raises UnknownSegment, ProtocolError: nothing was done."""
        with self._lock:
            segment = self._segment(order.segment)
            generation, slot_bytes, _ = segment.bound_to(order.slab)
            if slot_bytes != order.slot_bytes:
                generation = segment.bind_slab(order.slab, order.slot_bytes)
        self.outbox.slab_bound(
            pb.SlabBound(segment=order.segment, slab=order.slab, slot_bytes=order.slot_bytes, generation=generation)
        )
        return True

    def clear_slots(self, order: Clearing) -> bool:
        """Carry out an order; the Master will be told. False: peers still write under its stamps; give it again soon.

        Raises UnknownSegment, ProtocolError. Nothing was done then, but that peers' writes under these stamps end.
        """
        if not self.writes.fence({stamp for _, _, stamp in order.runs}, 0):
            return False
        with self._lock:
            cleared = self._segment(order.segment).clear_slots(order.slot_bytes, order.runs)
            self.slots_cleared_total += cleared
        self.outbox.slots_cleared(order.number)
        return True

    def answer_workers(self, ids: Iterable[int]) -> None:
        """Which of these workers are gone? The Master will be told. 0 is none."""
        for worker_id in self.workers.gone_of(ids):
            if worker_id:
                self.outbox.worker_gone(worker_id)

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

        A handle of another epoch means nothing (False). Raises UnknownSegment, ProtocolError.
        """
        block = complaint.block
        if not block.chain or len(block.namespace_id) != 16:
            raise ProtocolError("a bad block has a chain and a namespace id of 16 bytes")
        with self._lock:
            if complaint.epoch != self._epoch:
                return False
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
