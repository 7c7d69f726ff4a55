"""The only timer: it ticks, says how late it is, and outlives a Tick that fails."""

from __future__ import annotations

import asyncio

from kvpool_master.core.messages import BindSlab, Done, Tick
from kvpool_master.sweeper import Sweeper
from unit.master_double import ScriptedCore, play, serving


def test_a_tick_carries_out_its_effects_and_measures_how_late_it_is() -> None:
    order = BindSlab("a", 1, 2, 4096)

    async def scene() -> None:
        async with serving(ScriptedCore({Tick: Done((order,))}), tick_ms=60_000) as calls:
            shell = calls.server.shell
            shell.sessions.registered("a", 1)
            sweeper = Sweeper(shell)
            sweeper.tick(shell.clock.precise_s() - 0.7)
            sweeper.tick(shell.clock.precise_s() + 60.0)
            assert sweeper.late.counts[sweeper.late.bounds.index(1.0)] == 1
            assert sweeper.late.counts[0] == 1
            assert await shell.sessions.open("a", 1).next() == [order]

    play(scene)


def test_a_tick_that_fails_is_counted_and_the_next_one_comes() -> None:
    ticked: list[Tick] = []
    third = asyncio.Event()

    def tick(command: Tick) -> Done:
        ticked.append(command)
        if len(ticked) == 1:
            raise AssertionError("broken index")
        if len(ticked) == 3:
            third.set()
        return Done()

    async def scene() -> None:
        async with serving(ScriptedCore({Tick: tick}), tick_ms=1) as calls:
            async with asyncio.timeout(10):
                await third.wait()
            assert "broken index" in calls.log.getvalue()
            assert "tick_failed" in calls.log.getvalue()

    play(scene)
