"""The stream on which a node client reports what its segments hold. Nothing is decided here.

Rules
  - Every chunk becomes commands in this order: slabs, strands, slots being written, the end. After each command the
    loop sees to other RPCs.
  - What the core refuses ends the stream with that error; so does a stream that ends without its end. Either way the
    node registers again, or the core gives it up for want of progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvpool_master.convert_nodes import inventory_from_message
from kvpool_master.core.messages import InventoryEnd, Taken
from kvpool_master.rpc import Guard
from kvpool_master.shell import Shell
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BadRequest


class InventoryStream:
    """kvpool.v1.Nodes.Inventory."""

    def __init__(self, shell: Shell, guard: Guard) -> None:
        self._shell = shell
        self._guard = guard

    async def serve(self, chunks: AsyncIterator[pb.InventoryChunk], context: Any) -> pb.InventoryReply:
        """One inventory, from its first chunk to its end."""
        try:
            self._guard.admit(context, "Inventory")
            return await self._take(chunks)
        except Exception as error:
            await self._guard.abort("Inventory", context, error)

    async def _take(self, chunks: AsyncIterator[pb.InventoryChunk]) -> pb.InventoryReply:
        shell = self._shell
        reply = pb.InventoryReply()
        node = ""
        async for chunk in chunks:
            node = chunk.node_id
            for command in inventory_from_message(chunk, shell.epoch):
                shell.refuse_when_stopping()
                outcome = shell.apply(command)
                if isinstance(outcome, Taken):
                    reply.blocks_taken += outcome.taken
                    reply.blocks_surplus += outcome.surplus
                    reply.blocks_unclaimed += outcome.unclaimed
                if isinstance(command, InventoryEnd):
                    shell.sessions.reported(node)
                    shell.log.info(
                        "inventory_complete",
                        node=node,
                        taken_blocks=reply.blocks_taken,
                        surplus_blocks=reply.blocks_surplus,
                        unclaimed_blocks=reply.blocks_unclaimed,
                    )
                    return reply
                await asyncio.sleep(0)
        raise BadRequest(f"the inventory of node {node!r} broke off before its end")
