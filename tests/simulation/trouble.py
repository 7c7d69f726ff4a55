"""What goes wrong: kills, stops longer than every deadline, clean stops, cuts, broken streams, drains, set clocks.

Each kind is a method of Trouble; a profile says how often each is drawn. Who was killed is started again soon, or late.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from simulation.hub import MS, Process

if TYPE_CHECKING:
    from simulation.world import World

Profile = dict[str, int]
ALL: Final[Profile] = {
    "kill_worker": 12,
    "stop_worker": 14,
    "kill_node": 10,
    "stop_node": 6,
    "leave_node": 4,
    "discard_node": 2,
    "lose_node": 2,
    "drain_node": 8,
    "cut_peers": 10,
    "stall_port": 5,
    "reset_peers": 5,
    "kill_master": 10,
    "leave_master": 4,
    "stop_master": 6,
    "lose_state": 2,
    "cut_off": 7,
    "break_streams": 7,
    "set_clock": 7,
    "wake_in_the_past": 3,
}
SECOND_US: Final = 1_000 * MS
NAP_PERMILLE: Final = 1.5
"""How often a process is stopped in the middle of a copy; more often while the Master is away or new."""
NAPS_MORE: Final = 10
BEFORE_MARKS_PERMILLE: Final = 3
"""How often the worst moment for a writer is chosen."""


class Trouble:
    """Brings trouble to a world until calm() is called."""

    def __init__(self, world: World, profile: Profile) -> None:
        self._world = world
        self._hub = world.hub
        self._rng = world.hub.rng
        self._profile = profile
        self._calm = False

    def start(self, period_us: int) -> None:
        """Something goes wrong about every period_us."""
        if not self._calm and self._profile:
            self._hub.at(int(self._rng.expovariate(1 / period_us)), lambda: self._strike(period_us))

    def calm(self) -> None:
        """Nothing goes wrong any more."""
        self._calm = True

    def interrupt(self) -> None:
        """The running thread is in the middle of a copy: it may lose the processor, or its process be stopped."""
        thread = self._hub.thread
        assert thread is not None
        master = self._world.master
        fresh = master is None or self._hub.now_us - master.born_us < 2 * SECOND_US < self._hub.now_us
        often = NAP_PERMILLE * (NAPS_MORE if fresh else 1)
        kind = "stop_node" if thread.process.name in self._world.machines else "stop_worker"
        if not self._calm and kind in self._profile and self._hub.chance(often):
            self._world.checkers.seen.add(f"trouble: {kind} while copying")
            self._stop(thread.process)
            self._hub.sleep(0)
        self._hub.breathe()

    def before_marks(self) -> None:
        """A writer has looked and is about to mark: the Master may die now, and the writer sleep through the graces."""
        thread = self._hub.thread
        assert thread is not None
        if not self._calm and "kill_master" in self._profile and self._hub.chance(BEFORE_MARKS_PERMILLE):
            self._world.checkers.seen.add("trouble: killed before marks")
            self.kill_master()
            thread.process.stop()
            self._hub.at(int(SECOND_US * self._rng.choice((3.5, 4.5, 5.5, 7))), thread.process.go_on)
            self._hub.sleep(0)

    def _strike(self, period_us: int) -> None:
        if not self._calm:
            name = self._rng.choices(list(self._profile), list(self._profile.values()))[0]
            self._world.checkers.seen.add(f"trouble: {name}")
            getattr(self, name)()
            self.start(period_us)

    def _while_us(self) -> int:
        """How long something lasts: mostly short, at times longer than every deadline."""
        return int(SECOND_US * self._rng.choice((0.05, 0.3, 1.2, 2.5, 4, 5, 6.5, 9, 14, 30)))

    def _stop(self, process: Process) -> None:
        process.stop()
        self._hub.at(self._while_us(), process.go_on)

    def kill_worker(self) -> None:
        """SIGKILL to a worker."""
        workers = self._world.live_workers()
        if workers:
            self._rng.choice(workers).process.end("SIGKILL")

    def stop_worker(self) -> None:
        """SIGSTOP to a worker, SIGCONT later."""
        workers = self._world.live_workers()
        if workers:
            self._stop(self._rng.choice(workers).process)

    def kill_node(self) -> None:
        """SIGKILL to a node client."""
        self._world.nodes[self._rng.choice(self._world.machines)].process.end("SIGKILL")

    def stop_node(self) -> None:
        """SIGSTOP to a node client."""
        self._stop(self._world.nodes[self._rng.choice(self._world.machines)].process)

    def leave_node(self) -> None:
        """A clean stop that keeps the segment file."""
        self._world.nodes[self._rng.choice(self._world.machines)].stop_cleanly(discard=False)

    def discard_node(self) -> None:
        """A clean stop that removes the segment file."""
        name = self._rng.choice(self._world.machines)
        self._world.discard(name)

    def lose_node(self) -> None:
        """A machine breaks down: its processes end, its memory is lost."""
        name = self._rng.choice(self._world.machines)
        for worker in self._world.live_workers():
            if worker.machine == name:
                worker.process.end("its machine broke down")
        self._world.lose(name)

    def drain_node(self) -> None:
        """An operator drains a node, mostly to take it away once it is drained; some time later it is undrained."""
        name = self._rng.choice(self._world.machines)
        self._world.operator.drain(name, then_remove=self._rng.random() < 0.7)
        after_us = int(SECOND_US * self._rng.choice((0.5, 5, 13, 17)))
        self._hub.at(after_us, lambda: self._world.operator.undrain(name))

    def cut_peers(self) -> None:
        """Two machines do not reach each other for a while, or one not the other; both reach the Master."""
        one, other = self._rng.sample(self._world.machines, 2)
        ways = [(one, other), (other, one)][: self._rng.choice((1, 2, 2))]
        self._cut_ways(ways, self._while_us())

    def stall_port(self) -> None:
        """Nobody's bytes get to a machine's data port any more, for a while; its own get out."""
        name = self._rng.choice(self._world.machines)
        self._cut_ways([(other, name) for other in self._world.machines if other != name], self._while_us())

    def _cut_ways(self, ways: list[tuple[str, str]], while_us: int) -> None:
        for way in ways:
            self._world.wires.cut_way(*way)
            self._hub.at(while_us, lambda way=way: self._world.wires.mend_way(*way))

    def reset_peers(self) -> None:
        """A machine's connections with other machines break."""
        self._world.wires.reset(self._rng.choice(self._world.machines))

    def kill_master(self) -> None:
        """SIGKILL to the Master."""
        if self._world.master is not None:
            self._world.master.process.end("SIGKILL")

    def leave_master(self) -> None:
        """A clean stop of the Master."""
        if self._world.master is not None:
            self._world.master.stop_cleanly()

    def stop_master(self) -> None:
        """SIGSTOP to the Master."""
        if self._world.master is not None:
            self._stop(self._world.master.process)

    def lose_state(self) -> None:
        """The Master dies, and its state directory with it: purges that some node has not heard of are forgotten."""
        self.kill_master()
        self._world.checkers.dead.clear()
        shutil.rmtree(self._world.state_dir, ignore_errors=True)
        self._hub.note("the state directory is lost")

    def wake_in_the_past(self) -> None:
        """The Master's machine breaks down, and comes up with its clock at the second that is the present epoch."""
        if self._world.core is not None:
            self._world.wake_wall_s = self._world.core.epoch + 0.5
            self.kill_master()

    def cut_off(self) -> None:
        """A machine does not reach the Master for a while."""
        machine = self._rng.choice(self._world.machines)
        self._world.network.cut_off(machine)
        self._hub.at(self._while_us(), lambda: self._world.network.mend(machine))

    def break_streams(self) -> None:
        """A machine's connections break."""
        self._world.network.break_streams(self._rng.choice(self._world.machines), "connection reset")

    def set_clock(self) -> None:
        """Somebody sets a wall clock, forth or back."""
        machine = self._rng.choice([*self._world.machines, "master"])
        step_s = self._rng.choice((-86_400.0, -30.0, -2.0, 2.0, 30.0, 3_600.0))
        self._world.clocks[machine].wall_step_s += step_s
        self._hub.note(f"the wall clock of {machine} is set by {step_s} s")
