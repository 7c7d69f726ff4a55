"""gate.py: loads go first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvpool_client.gate import CopyGate


def test_a_load_goes_before_a_store_that_waited_longer() -> None:
    gate = CopyGate()
    order: list[str] = []
    waiting = threading.Event()

    def enter(kind: str, way: Callable[[float], Any]) -> None:
        waiting.set()
        with way(30.0) as admitted:
            assert admitted
            order.append(kind)

    threads: list[threading.Thread] = []
    with gate.store(0.0) as admitted:
        assert admitted
        for kind, way in (("store", gate.store), ("load", gate.load)):
            waiting.clear()
            threads.append(threading.Thread(target=enter, args=(kind, way)))
            threads[-1].start()
            assert waiting.wait(30.0)
        with gate.load(0.0) as refused:
            assert not refused
        while gate._loads_waiting == 0:  # the thread is past its event, on its way to the gate
            threading.Event().wait(0.001)
    for thread in threads:
        thread.join(30.0)
    assert order == ["load", "store"]
    with gate.store(0.0) as admitted:
        assert admitted
