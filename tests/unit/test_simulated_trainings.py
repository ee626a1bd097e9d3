"""Chiefs that train with Keras, in the simulated world; and whether it finds mistakes."""

import subprocess
import sys

import pytest
from tests.simulation._primitives import simulated
from tests.simulation._runner import report, run_many, run_one
from tests.simulation.mistakes_trainings import MISTAKES
from tests.simulation.protocols import protocols

#: Schedules of each: programs are traced in each one, and compiled once.
COUNTS = {"fits": 2, "fits_and_restarts": 1, "named_steps": 2}


@pytest.mark.parametrize("name", COUNTS)
def test_protocols_hold(name):
    protocol = protocols()[name]
    with simulated() as look:
        tally, failures = run_many(protocol, range(COUNTS[name]), look)
        text = failures and report(name, run_one(protocol, failures[0].seed, is_recorded=True))
    assert not failures, text
    assert tally.schedules == COUNTS[name]
    assert sum(tally.faults.values())


@pytest.mark.exhaustive
def test_processes_search_them_side_by_side():
    """Forked before JAX has started: after that they would wait for ever."""
    command = [sys.executable, "-m", "tests.simulation", "--protocol", "named_steps", "--schedules", "5"]
    done = subprocess.run([*command, "--jobs", "2"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 5 " in done.stdout.splitlines()[1]


#: Mistakes, and the schedules that show them; others take longer: `python -m tests.simulation --mistakes`.
PLANTED = {"an answer without a step draws random numbers": 10}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = (m for m in MISTAKES if m.name == name)
    protocol = protocols()[mistake.protocol]
    with simulated() as look, mistake.planted():
        _, failures = run_many(protocol, range(PLANTED[name]), look)
    assert failures
    # Without the mistake the same seed holds.
    with simulated():
        assert run_one(protocol, failures[0].seed).error is None
