"""This process's tie to the node client: mapped segments, the worker's number, complaints about bad blocks.

Rules
  - A node client that does not answer, or lets nobody in, opens the breaker (breaker.py): until a probe in the
    background is answered nobody waits for it. A caller waits for one Hello at most, be it another thread's.
  - Handles mean something within one epoch only: a segment is found by (epoch, handle).
  - What is mapped stays good when the node client restarts in place: same epoch, same handles, same number. When it
    has heard of a new Master, everything is mapped anew; hits of the epoch before are read through the new mapping
    where it is the same file. A Hello that brings nothing new changes nothing, and the next one waits longer.
  - A switch that is on (bypass.py) keeps this process from noticing that its file is nobody's any more: then it asks.
  - An attachment keeps its mappings, and with them the worker's lock, for as long as somebody holds it: a store holds
    the one under whose number it reserved until its last copy is done.
  - A new mapping has no page tables: the first copy through it ran at 1.8 instead of 8 GB/s. So each is read through
    once, a byte in every 64 KiB (the kernel maps that much around a fault), by a thread of its own: 0.1 s a GiB.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from kvpool_client.breaker import Backoff, Breaker
from kvpool_client.clock import Clock
from kvpool_client.local_socket import LocalClient, Welcome
from kvpool_client.segment import AttachedSegment
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import KVPoolError, NodeUnreachable, SegmentElsewhere, Unreachable

HELLO_PAUSE_MAX_MS: Final = 2_000
LOOK_MS: Final = 1_000
_FAULT_BYTES: Final = 64 << 10
_WARM_BYTES: Final = 256 << 20
"""Read in one go, after which the thread looks whether it is still wanted."""

Segments = Mapping[int, AttachedSegment]
"""By handle."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """What one Hello brought. segments: by epoch; beside its own at most the epoch before."""

    node_id: str
    epoch: int
    worker_id: int
    segments: Mapping[int, Segments]

    def holds(self, epoch: int, handles: Set[int]) -> bool:
        """Are these segments mapped, by their handles of that epoch?"""
        return self.segments.get(epoch, {}).keys() >= handles


NOWHERE: Final = Attachment("", 0, 0, {})
"""Of a process without a node client."""


class NodeLink:
    """Thread safe. Methods may wait for the node client, for about the timeout of `client`.

    submit: queues what nobody waits for; False: dropped.
    """

    def __init__(
        self,
        client: LocalClient,
        name: str,
        clock: Clock,
        submit: Callable[[Callable[[], object]], bool],
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._name = name
        self._clock = clock
        self._submit = submit
        self._spread = spread
        self._changed = threading.Condition()
        self._breaker = Breaker()
        self._pause = Backoff(max_ms=HELLO_PAUSE_MAX_MS)
        self._next_hello_ms = 0
        self._next_look_ms = clock.now_ms() + LOOK_MS
        self._greeting = self._closed = False
        self._attachment: Attachment | None = None
        self._warming: threading.Thread | None = None

    @property
    def breaks(self) -> int:
        """How often the node client was given up until a probe is answered."""
        return self._breaker.opened

    @property
    def present(self) -> Attachment:
        """What is mapped now, NOWHERE if nothing is. Waits for nobody."""
        return self._attachment or NOWHERE

    def bypass(self) -> int:
        """The calls that the node client turns off, BYPASS_ bits; none while nothing is mapped. Waits for nobody.

        While something is off, or nothing is mapped, a Hello in the background looks now and then for other files.
        """
        attached = self._attachment
        bits = 0
        if attached is not None:
            for segment in attached.segments[attached.epoch].values():
                bits |= segment.bypass()
        if (bits or attached is None) and not self._closed:
            now_ms = self._clock.now_ms()
            if now_ms >= self._next_look_ms:
                self._next_look_ms = now_ms + LOOK_MS
                self._submit(self._attach)
        return bits

    def attachment(self, epoch: int = 0) -> Attachment:
        """The present attachment, of `epoch` at least, after a Hello if need be.

        Raises NodeUnreachable if there is none, SegmentElsewhere while the node client has not heard of the epoch.
        """
        found = self._attachment
        if found is None or found.epoch < epoch:
            found = self._attach()
        if found.epoch < epoch:
            raise SegmentElsewhere(f"the node client obeys epoch {found.epoch}, the Master's is {epoch}")
        return found

    def holding(self, epoch: int, handles: Set[int]) -> Attachment:
        """An attachment that holds these segments, after a Hello if need be.

        Raises SegmentElsewhere if there is none now, NodeUnreachable if there was never any.
        """
        found = self._attachment or self._attach()
        if not found.holds(epoch, handles) and found.epoch <= epoch:
            found = self._attach()
        if not found.holds(epoch, handles):
            raise SegmentElsewhere(f"segments {sorted(handles)} of epoch {epoch} are not all mapped here")
        return found

    def report_bad(self, block: pb.BadBlock, epoch: int, segment: int, slot: int, slot_bytes: int) -> bool:
        """Let the node client look at a block again. True: it found it bad, too."""
        return bool(self._ask(lambda: self._client.report_bad(block, epoch, segment, slot, slot_bytes)))

    def report_use(self, take: Callable[[], pb.LocalUse]) -> None:
        """Tell the node client what this worker did, for its metrics; what it does not answer is lost to them."""

        def tell() -> None:
            """Take only what can be sent now."""
            use = take()
            if use.namespaces:
                self._client.report_use(use)

        if self._attachment is not None:
            self._ask(tell)

    def close(self) -> None:
        """End the connection and let the segments go; they are unmapped when the last copy is done."""
        with self._changed:
            self._closed = True
            self._attachment = None
            warming, self._warming = self._warming, None
        if warming is not None:
            warming.join()
        self._client.close()

    def _attach(self) -> Attachment:
        """The attachment after a Hello: this caller's if one may be said now, or the one under way."""
        with self._changed:
            mine = not self._greeting and self._may_go() and self._clock.now_ms() >= self._next_hello_ms
            if mine:
                self._greeting = True
            elif not self._breaker.open:
                self._changed.wait_for(lambda: not self._greeting)
        if mine:
            self._hello(probe=False)
        found = self._attachment
        if found is None:
            raise NodeUnreachable("the node client does not answer")
        return found

    def _hello(self, *, probe: bool) -> None:
        """Say Hello and take what it brings; self._greeting is this caller's."""
        welcome: Welcome | None = None
        try:
            with contextlib.suppress(KVPoolError, OSError):  # OSError: no room for the mapping, say
                welcome = self._client.hello(self._name)
        finally:
            with self._changed:
                self._note(welcome is None, probe=probe)
                if welcome is not None and not self._closed:
                    self._take(welcome)
                self._greeting = False
                self._changed.notify_all()

    def _take(self, welcome: Welcome) -> None:
        """Make the welcome the present attachment, unless it says what is known."""
        former = self._attachment
        mine: Segments = {segment.handle: segment for segment in welcome.segments}
        segments: dict[int, Segments] = {welcome.epoch: mine}
        if former is not None:
            known = _found_again(former.segments[former.epoch], mine)
            if former.epoch == welcome.epoch:
                self._next_hello_ms = self._clock.now_ms() + self._pause.next_ms(self._spread())
                if all(known.get(handle) is segment for handle, segment in mine.items()):
                    return
                segments[welcome.epoch] = {**known, **mine}
            else:
                self._pause.reset()
                segments[former.epoch] = known
        self._attachment = Attachment(welcome.node_id, welcome.epoch, welcome.worker_id, segments)
        thread = threading.Thread(target=self._warm, args=(self._attachment,), name="kvpool-warm", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread: the copies will warm it
            thread.start()
            self._warming = thread

    def _ask(self, call: Callable[[], bool | None]) -> bool | None:
        """What the node client answers; None: nothing."""
        with self._changed:
            if not self._may_go():
                return None
        try:
            answer = call()
        except KVPoolError as error:
            with self._changed:
                self._note(isinstance(error, Unreachable), probe=False)
            return None  # whoever meets the block next reports it again
        with self._changed:
            self._note(False, probe=False)
        return answer

    def _may_go(self) -> bool:
        """May the node client be asked? When it did not answer lately, it is probed instead, now and then."""
        if self._closed:
            return False
        if self._breaker.take_probe(self._clock.now_ms()) and not self._submit(self._probe):
            self._note(True, probe=True)
        return not self._breaker.open

    def _probe(self) -> None:
        """Ask for what is missing: a first attachment, or just an answer."""
        with self._changed:
            if self._closed:
                return
            greet = self._attachment is None and not self._greeting
            self._greeting = self._greeting or greet
        if greet:
            self._hello(probe=True)
            return
        try:
            self._client.ping()
        except KVPoolError as error:
            silent = isinstance(error, Unreachable)
        else:
            silent = False
        with self._changed:
            self._note(silent, probe=True)

    def _note(self, silent: bool, *, probe: bool) -> None:
        if silent:
            self._breaker.silent(self._clock.now_ms(), self._spread(), probe=probe)
        else:
            self._breaker.answered()

    def _warm(self, attachment: Attachment) -> None:
        for segment in attachment.segments[attachment.epoch].values():
            for start in range(0, len(segment.memory), _WARM_BYTES):
                if self._attachment is not attachment:
                    return
                segment.memory[start : start + _WARM_BYTES : _FAULT_BYTES].max()


class NoNode:
    """NodeLink for a process on a host that gives no DRAM, or for a scheduler: all blocks lie elsewhere."""

    breaks = 0
    present = NOWHERE

    def bypass(self) -> int:
        """Nothing is turned off here."""
        return 0

    def attachment(self, epoch: int = 0) -> Attachment:
        """NOWHERE, in every epoch."""
        return NOWHERE

    def holding(self, epoch: int, handles: Set[int]) -> Attachment:
        """Raises SegmentElsewhere."""
        raise SegmentElsewhere("this process maps no segments")

    def report_bad(self, block: pb.BadBlock, epoch: int, segment: int, slot: int, slot_bytes: int) -> bool:
        """Nobody is there to look."""
        return False

    def report_use(self, take: Callable[[], pb.LocalUse]) -> None:
        """Nobody is there to hear it."""

    def close(self) -> None:
        """There is nothing to let go of."""


Link = NodeLink | NoNode


def _found_again(former: Segments, present: Segments) -> dict[int, AttachedSegment]:
    """Former handles of files that are mapped anew, each with the present mapping of its file."""
    contents = {number: segment for segment in present.values() if (number := _contents(segment))}
    found = {handle: contents.get(_contents(segment)) for handle, segment in former.items()}
    return {handle: segment for handle, segment in found.items() if segment is not None}


def _contents(segment: AttachedSegment) -> int:
    """The random number that tells the file from all others, as it says itself now; 0: it is spoiled."""
    try:
        return segment.superblock.contents
    except KVPoolError:
        return 0
