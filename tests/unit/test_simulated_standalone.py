"""Standalone servers in the simulation: every kind of task, and others that speak with them."""

import pytest
from tests.simulation._primitives import simulated
from tests.simulation._runner import run_many, run_one
from tests.simulation.mistakes_serving import MISTAKES as OF_SERVERS
from tests.simulation.mistakes_wrong_clients import MISTAKES as OF_CLIENTS
from tests.simulation.protocols import protocols

#: Schedules of each protocol here.
COUNTS = {"roles": 5, "wrong_clients": 10}
#: Mistakes, and the seeds of schedules of which one finds it.
PLANTED = {
    "a full disk at the client costs the server": (85, 157),
    "a number has no upper limit": range(20),
}


def holds(name, seeds):
    """Run schedules of a protocol; fail with the seed of one that does not hold."""
    protocol = protocols()[name]
    with simulated() as look:
        tally, failures = run_many(protocol, seeds, look)
    for failure in failures:
        pytest.fail(f"{name}, seed {failure.seed}: {failure.text()}")
    assert tally.schedules == len(seeds)
    return tally


@pytest.mark.parametrize("name", COUNTS)
def test_protocols_hold(name):
    holds(name, range(COUNTS[name]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COUNTS)
def test_protocols_hold_with_many_faults(name):
    # Behind those of `make simulate` in .ci/run.
    assert sum(holds(name, range(150, 180)).faults.values()) > 20


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = [m for m in (*OF_SERVERS, *OF_CLIENTS) if m.name == name]
    # Imported before: a protocol may add stand-ins, which the next `simulated` puts in place.
    protocol = protocols()[mistake.protocol]
    with simulated() as look, mistake.planted():
        _, failures = run_many(protocol, PLANTED[name], look)
    assert failures
    with simulated():
        assert run_one(protocol, failures[0].seed).error is None
