"""A supervised cluster goes on after faults, with the weights of a run that nothing disturbed.

The program is that of `benchmarks/recovery.py`, which prints how long it takes. `UNISONO_KILL_SEEDS=20`
runs more random plans.
"""

import os
import sys
from pathlib import Path

import pytest

from tests import forked
from unisono.testing import FaultPlan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import recovery

recovery.run = lambda command, env: forked.run(command[1:], Path.cwd(), recovery.LIMIT, env)

SEEDS = int(os.environ.get("UNISONO_KILL_SEEDS", "1"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of a run without faults; backups are made all the same."""
    return recovery.undisturbed(tmp_path_factory.mktemp("undisturbed"))[0]


PLANS = {
    "the first worker is killed, then the second": recovery.Plan(
        FaultPlan().kill("worker:0", 40).kill("worker:1", 90, 1)
    ),
}
RANDOM = {f"seed {seed}": recovery.random_plan(seed) for seed in range(SEEDS)}


@pytest.mark.timeout(recovery.LIMIT + 60)
@pytest.mark.parametrize("name", [*PLANS, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in RANDOM)])
def test_the_next_generation_goes_on_at_the_exact_next_batch(tmp_path, expected, name):
    plan = (PLANS | RANDOM)[name]
    records, events, _ = recovery.outcome(tmp_path, plan, steady=False)
    assert recovery.last_weights(records) == expected
    assert len(expected) == 1
    # The faults have happened: else this test would show nothing.
    assert {r.generation for r in records} == set(range(plan.restarts + 1))
    assert sum(e["event"] == "restart" for e in events) == plan.restarts
