"""`LocalUpdates` in the simulated world: workers that fail, and mistakes that are found."""

import pytest
from tests.simulation._local_twin import WEIGHTS, Twin
from tests.simulation._primitives import simulated
from tests.simulation._runner import report, run_many, run_one
from tests.simulation._stub_programs import Wires
from tests.simulation._world import World
from tests.simulation.mistakes_local import MISTAKES
from tests.simulation.protocol_local import local_updates

from unisono import LocalUpdates

#: Within how many schedules; the others are tried by `python -m tests.simulation --mistakes`.
PLANTED = {
    "a fragment is applied where a group of steps ends, not after its steps": 20,
    "a fragment that a callback has cut short is not exchanged again": 20,
    "a backup between two phases has nothing of what is being sent": 20,
}


# Behind those of `make simulate` in .ci/run.
FURTHER = pytest.param(range(150, 200), marks=pytest.mark.exhaustive, id="150 to 200")


@pytest.mark.parametrize("seeds", [pytest.param(range(30), id="30"), FURTHER])
def test_all_workers_have_what_all_have_sent(seeds):
    with simulated() as look:
        tally, failures = run_many(local_updates, seeds, look)
        text = failures and report(
            "local_updates", run_one(local_updates, failures[0].seed, is_recorded=True)
        )
    assert not failures, text
    assert sum(tally.faults.values()) > len(seeds) // 2


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = (m for m in MISTAKES if m.name == name)
    with simulated() as look, mistake.planted():
        _, failures = run_many(local_updates, range(PLANTED[name]), look)
    assert failures
    with simulated():
        assert run_one(local_updates, failures[0].seed).error is None


def test_the_twin_takes_the_mean_of_all():
    twin = Twin(LocalUpdates(2), [list(WEIGHTS)], has_outer=False, size=2)
    begun = {name: twin.shared[name] for name in WEIGHTS}
    twin.step()
    assert all(twin.shared[name] is begun[name] for name in WEIGHTS)
    rows = [dict(each) for each in twin.rows]
    assert rows[0]["w0"][0] != rows[1]["w0"][0]
    twin.end()
    assert twin.shared["w0"][0] == (rows[0]["w0"][0] + rows[1]["w0"][0]) / 2
    assert twin.shared["metric"][0] == rows[0]["metric"][0] + rows[1]["metric"][0]
    assert twin.shared["counter"][0] == 1


def test_a_worker_that_ended_is_waited_for_until_its_last_message():
    world = World(0)
    found = []

    def worker(wires, rank, ends):
        wires.join(rank, world.current.process)
        found.append(wires.gather("numbers", rank, rank))
        if not ends:
            with pytest.raises(RuntimeError, match="closed by peer, worker 0"):
                wires.gather("numbers", rank, rank)

    def main():
        wires = Wires(world, 2)
        for process in [world.process(f"w{i}", lambda i=i: worker(wires, i, ends=i == 0)) for i in range(2)]:
            process.wait()
            assert process.error is None

    world.run(main)
    assert found == [[0, 1], [0, 1]]
