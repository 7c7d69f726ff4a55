"""Carries out on the node what the Master says: epochs, keys, the dead, orders. No talking to the Master here.

Rules
  - In the caller's thread, in order; only copies go on in the background.
  - Slots that peers still write are cleared as soon as that has ended; nobody waits for it here.
  - An order that cannot be is logged and not answered.
  - With their session, orders end that are not carried out yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvpool_client.copying import Copier
from kvpool_client.logs import Log
from kvpool_client.node import Node
from kvpool_client.session_messages import (
    Announce,
    AnswerWorkers,
    Bind,
    Bury,
    Clearing,
    ClearSlots,
    CopySlots,
    LearnKey,
    ObeyEpoch,
    Order,
    SetBypass,
    TellTime,
)
from kvpool_proto.errors import KVPoolError

OfNode = Announce | AnswerWorkers | Bind | Bury | ClearSlots | CopySlots | LearnKey | ObeyEpoch | SetBypass | TellTime

_Order = TypeVar("_Order", Order, Clearing)


class Orders:
    """What `node` is told, and the copies that `copier` makes for it. One thread at a time."""

    def __init__(self, node: Node, copier: Copier, log: Log) -> None:
        self._node = node
        self._copier = copier
        self._log = log
        self._clearings: list[Clearing] = []

    @property
    def waiting(self) -> bool:
        """True while slots are to be cleared that peers still write: call again() soon."""
        return bool(self._clearings)

    def again(self) -> None:
        """Clear what can be cleared by now."""
        self._clearings = self._carry_out("clear_slots", self._node.clear_slots, self._clearings)

    def end(self) -> None:
        """The session is over."""
        self._copier.cancel()
        self._clearings = []

    def perform(self, instruction: OfNode, session: int) -> None:
        """Carry out an instruction that came on this session, the outbox's number."""
        node = self._node
        match instruction:
            case Announce(handles):
                node.announce(handles)
            case ObeyEpoch(epoch):
                node.obey(epoch)
            case LearnKey(epoch, key, master_ms, former_key_ms):
                node.keyring.learn(epoch, key, master_ms, former_key_ms)
            case TellTime(epoch, master_ms):
                node.keyring.tell_time(epoch, master_ms)
            case Bury(tombstones):
                node.bury(tombstones)
            case SetBypass(bits):
                node.set_bypass(bits)
            case AnswerWorkers(ids):
                node.answer_workers(ids)
            case Bind(orders):
                self._carry_out("bind_slab", node.bind, orders)
            case ClearSlots(orders):
                self._clearings += self._carry_out("clear_slots", node.clear_slots, orders)
            case CopySlots(orders):
                self._copier.submit(orders, session)

    def _carry_out(self, name: str, do: Callable[[_Order], bool], orders: Iterable[_Order]) -> list[_Order]:
        """Answers those that have to be given again."""
        left: list[_Order] = []
        for order in orders:
            try:
                if not do(order):
                    left.append(order)
            except KVPoolError as error:
                self._log.error("order_refused", order=name, segment=order.segment, text=str(error))
        return left
