"""The service of node clients: registration, the session stream, retirement. Nothing is decided here.

A session is two tasks: one hears the node (each message is a heartbeat and may carry reports), one tells it orders.
Whichever ends first ends the other. A report that the core refuses is logged and costs nothing more: a node must not
become suspect because of one stale report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvpool_master.addresses import check_data_address
from kvpool_master.convert import bypass_to_message, tombstones_to_message
from kvpool_master.convert_nodes import orders_to_message, register_from_message, reports_from_message
from kvpool_master.core.messages import (
    Heartbeat,
    ProbeAnswered,
    Registered,
    RetireNode,
    SlabBound,
    SlotsCleared,
    SlotsCopied,
)
from kvpool_master.rpc import Guard
from kvpool_master.sessions import Session
from kvpool_master.shell import Shell
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BadRequest, KVPoolError

WHY_CHARS_MAX = 200
"""Of a node client's word for what went wrong, what is logged."""


class NodesService:
    """kvpool.v1.Nodes without its streams; see SessionStream and inventory_stream.py."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def Register(self, request: pb.RegisterRequest, peer: str) -> pb.RegisterReply:
        """Offer a node's segments. peer: where the node called from."""
        shell = self._shell
        shell.refuse_when_stopping()
        check_data_address(request.data_address, peer)
        shell.meet(request.node_id, request.epoch_seen)
        # The effects may be orders to this very incarnation: it has to be known before they are carried out.
        registered: Registered = shell.ask(register_from_message(request))
        shell.obeyed_by.add(request.node_id)
        shell.sessions.registered(request.node_id, request.incarnation)
        shell.carry_out(registered.effects)
        shell.log.info(
            "node_registered",
            node=request.node_id,
            incarnation=request.incarnation,
            segments=len(request.segments),
            holds=any(offer.holds for offer in request.segments),
            epoch_seen=request.epoch_seen,
            data_address=request.data_address,
        )
        settings = shell.config.core
        return pb.RegisterReply(
            epoch=shell.epoch,
            segment_handles=registered.handles,
            heartbeat_ms=settings.heartbeat_ms,
            suspect_ms=settings.suspect_ms,
            retire_ms=settings.retire_ms,
            tombstones=tombstones_to_message(registered.tombstones),
            bypass=bypass_to_message(shell.bypass),
            capability_key=shell.grants.key,
            master_ms=shell.clock.now_ms(),
            former_key_ms=settings.lease_life_max_ms,
        )

    def Retire(self, request: pb.RetireRequest) -> pb.RetireReply:
        """The node leaves for good."""
        self._shell.apply(RetireNode(request.node_id, request.incarnation))
        self._shell.sessions.retired(request.node_id, request.incarnation)
        self._shell.log.info("node_retired", node=request.node_id, incarnation=request.incarnation)
        return pb.RetireReply()


class SessionStream:
    """kvpool.v1.Nodes.Session."""

    def __init__(self, shell: Shell, guard: Guard) -> None:
        self._shell = shell
        self._guard = guard

    async def serve(self, messages: AsyncIterator[pb.SessionUp], context: Any) -> None:
        """One session, from its first message to its end."""
        try:
            self._guard.admit(context, "Session")
            first = await anext(messages, None)
            if first is None:
                return
            if not first.node_id:
                raise BadRequest("node_id: the first message of a session names the node")
            self._shell.refuse_when_stopping()
            self._shell.apply(Heartbeat(first.node_id, first.incarnation))
            session = self._shell.sessions.open(first.node_id, first.incarnation)
            self._shell.log.info("session_opened", node=session.node, incarnation=session.incarnation)
            try:
                await self._converse(session, first, messages, context)
            finally:
                if self._shell.sessions.closed(session) and not self._shell.stopping:
                    self._shell.lost(session)
        except Exception as error:
            await self._guard.abort("Session", context, error)

    async def _converse(
        self, session: Session, first: pb.SessionUp, messages: AsyncIterator[pb.SessionUp], context: Any
    ) -> None:
        hear = asyncio.create_task(self._hear(session, first, messages, context))
        tell = asyncio.create_task(self._tell(session, context))
        try:
            done, _ = await asyncio.wait({hear, tell}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hear.cancel()
            tell.cancel()
            await asyncio.gather(hear, tell, return_exceptions=True)
        for task in done:
            task.result()

    async def _hear(
        self, session: Session, first: pb.SessionUp, messages: AsyncIterator[pb.SessionUp], context: Any
    ) -> None:
        self._reported(session, first)
        async for message in messages:
            # A session that was superseded says nothing any more: its orders were sent again on the new one.
            if session.ended:
                return
            self._guard.admit(context, "Session")  # rights may end while it lasts
            self._shell.apply(Heartbeat(session.node, session.incarnation))
            session.heard(self._shell.clock.now_ms())
            self._reported(session, message)

    def _reported(self, session: Session, message: pb.SessionUp) -> None:
        for command in reports_from_message(session.node, session.incarnation, message, self._shell.epoch):
            try:
                self._shell.apply(command)
            except KVPoolError as error:
                self._shell.log.warning(
                    "report_refused", node=session.node, report=type(command).__name__, text=str(error)
                )
            match command:
                case SlabBound():
                    self._shell.sessions.bound(command)
                case SlotsCleared():
                    self._shell.sessions.cleared(command)
                case SlotsCopied():
                    self._shell.sessions.copied(command)
                case ProbeAnswered():
                    self._shell.sessions.probed(command)
                case _:
                    pass
        for copied in message.copied:
            if copied.why:
                self._shell.log.warning(
                    "copy_short", node=session.node, blocks=copied.blocks, why=copied.why[:WHY_CHARS_MAX]
                )

    async def _tell(self, session: Session, context: Any) -> None:
        shell = self._shell
        copy_ms = shell.config.core.copy_ms
        while (orders := await session.next()) is not None:
            session.told_ms = shell.clock.now_ms()
            await context.write(orders_to_message(orders, shell.epoch, session.told_ms, shell.grants, copy_ms))
        if session.error is not None:
            raise session.error
        if session.retired:
            await context.write(pb.SessionDown(epoch=shell.epoch, master_ms=shell.clock.now_ms(), retired=True))
