"""Places of checkpoints that cannot be read or written for a while, in the simulation."""

import pytest
from tests.simulation._primitives import simulated
from tests.simulation._runner import run_many, run_one
from tests.simulation.mistakes_places import MISTAKES
from tests.simulation.protocols import protocols

#: Schedules of each protocol here.
COUNTS = {"places": 8, "places_in_store": 8}
#: Mistakes that few schedules show.
PLANTED = {
    "a directory that cannot be read is an empty one": 4,
    "a process that was replaced deletes its successor's claim": 2,
}


def holds(name, seeds):
    """Run schedules of a protocol; fail with the seed of one that does not hold."""
    with simulated() as look:
        tally, failures = run_many(protocols()[name], seeds, look)
    for failure in failures:
        pytest.fail(f"{name}, seed {failure.seed}: {failure.text()}")
    assert tally.schedules == len(seeds)


@pytest.mark.parametrize("name", COUNTS)
def test_protocols_hold(name):
    holds(name, range(COUNTS[name]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COUNTS)
def test_more_schedules_hold(name):
    # Behind those of `make simulate` in .ci/run.
    holds(name, range(150, 190))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = [m for m in MISTAKES if m.name == name]
    protocol = protocols()[mistake.protocol]
    with simulated() as look, mistake.planted():
        _, failures = run_many(protocol, range(PLANTED[name]), look)
    assert failures
    with simulated():
        assert run_one(protocol, failures[0].seed).error is None
