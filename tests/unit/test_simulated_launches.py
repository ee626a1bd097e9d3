"""The simulated kernel, and launches on it: processes, pipes, signals, locks."""

import os
import signal

import pytest
from tests.simulation._disk import Disk
from tests.simulation._file_doors import FileDoors, Machine
from tests.simulation._kernel import Kernel
from tests.simulation._primitives import simulated
from tests.simulation._runner import run_many, run_one
from tests.simulation._world import World
from tests.simulation.mistakes_processes import MISTAKES as OF_PROCESSES
from tests.simulation.mistakes_serving import MISTAKES as OF_SERVERS
from tests.simulation.mistakes_watch import MISTAKES as OF_WATCHERS
from tests.simulation.protocols import protocols

PROTOCOLS = ("processes", "serving", "watch")
#: Mistakes, and the seeds of schedules of which one finds it.
PLANTED = {
    "a pipe of a task stays open": range(20),
    "a spare that has ended is an error": range(28, 38),
    "a server leaves its spares": range(5),
    "an exception is lost where the disk is full": range(5, 8),
    "the end is not waited for": range(10),
}


def in_kernel(body, seed=0):
    """Run `body(kernel, world)` in a process of a simulated machine; return what it returns."""
    world = World(seed)

    def main():
        machine = Machine(world, "host", {"disk": Disk(world)})
        kernel = Kernel(world, machine, {})
        with FileDoors(world, Machine(world, "checker", machine.disks)), kernel.doors():
            entry = kernel.start("first", lambda: body(kernel, world))
            entry.process.wait()
            if entry.process.error is not None:
                raise entry.process.error
            return entry.process.result

    return world.run(main)


def test_a_child_is_a_zombie_until_it_is_waited_for():
    def body(kernel, world):
        child = kernel.start("child", lambda: 3, parent=kernel.current)
        world.sleep(1.0)
        os.kill(child.pid, signal.SIGTERM)
        seen = child.code, child.is_reaped
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert child.pid in kernel.table
        kernel.wait(child)
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
        return seen

    assert in_kernel(body) == (3, False)


def test_a_group_has_the_children_of_its_leader():
    def body(kernel, world):
        leader = kernel.start("leader", lambda: world.sleep(100.0), parent=kernel.current)
        child = kernel.start("child", lambda: world.sleep(100.0), parent=leader, group=leader.group)
        other = kernel.start("other", lambda: world.sleep(100.0), parent=leader)
        os.killpg(leader.pid, signal.SIGKILL)
        world.sleep(1.0)
        return leader.code, child.code, other.code

    assert in_kernel(body) == (-9, -9, None)


def test_who_asks_for_it_is_killed_with_its_parent():
    def body(kernel, world):
        parent = kernel.start("parent", lambda: world.sleep(1.0))
        children = [kernel.start(f"c{i}", lambda: world.sleep(100.0), parent=parent) for i in range(2)]
        children[0].death_signal = signal.SIGKILL
        world.sleep(2.0)
        return [each.code for each in children]

    assert in_kernel(body) == [-9, None]


def test_a_pipe_ends_with_its_last_writer():
    def body(kernel, world):
        read, write = os.pipe()
        other = kernel.start("writer", lambda: world.sleep(2.0), parent=kernel.current)
        kernel.give(write, other)
        os.write(write, b"abc")
        os.close(write)
        first = os.read(read, 10)
        # The other process has the end, too, until it ends.
        assert (os.read(read, 10), world.now) == (b"", 2.0)
        os.set_blocking(read, False)
        with pytest.raises(OSError, match="Bad file"):
            os.write(write, b"x")
        os.close(read)
        return first, kernel.held(kernel.current)

    assert in_kernel(body) == (b"abc", [])


def test_a_number_is_used_again_after_some_seconds():
    def body(kernel, world):
        world.choose = lambda n, kind="data": n - 1
        first = kernel.start("first", lambda: 0)
        world.sleep(1.0)
        second = kernel.start("second", lambda: world.sleep(100.0))
        world.sleep(6.0)
        third = kernel.start("third", lambda: 0)
        return first.pid == third.pid, first.pid == second.pid

    assert in_kernel(body) == (True, False)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_hold(name):
    holds(name, range(20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_hold_with_many_faults(name):
    # Behind those of `make simulate` in .ci/run.
    tally = holds(name, range(150, 200))
    assert sum(tally.faults.values()) > 33


def holds(name, seeds):
    """Run schedules of a protocol; fail with the seed of one that does not hold."""
    protocol = protocols()[name]
    with simulated() as look:
        tally, failures = run_many(protocol, seeds, look)
    for failure in failures:
        pytest.fail(f"{name}, seed {failure.seed}: {failure.text()}")
    assert tally.schedules == len(seeds)
    return tally


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = [m for m in (*OF_PROCESSES, *OF_SERVERS, *OF_WATCHERS) if m.name == name]
    # Imported before: a protocol may add stand-ins, which the next `simulated` puts in place.
    protocol = protocols()[mistake.protocol]
    with simulated() as look, mistake.planted():
        _, failures = run_many(protocol, PLANTED[name], look)
    assert failures
    with simulated():
        assert run_one(protocol, failures[0].seed).error is None
