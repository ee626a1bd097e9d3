"""Checks plans of random models on all workers; prints how each compares with one device."""

import dataclasses
import sys

import unisono

# First: it starts the cluster. Sharded state needs the strategy that made it.
strategies = {
    name: unisono.MultiWorkerMirroredStrategy(state_layout=name)
    for name in ("mirrored", "sharded", "fully_sharded")
}

from tests.random_models import checks, plans

replicas = strategies["mirrored"].num_replicas_in_sync
verdicts = []
for seed in map(int, sys.argv[1:]):
    plan = plans.draw(seed)
    if plan.layout == "mirrored":
        # Each layout is drawn for some plans.
        plan = dataclasses.replace(plan, layout=[*strategies][seed % len(strategies)])
    plan = dataclasses.replace(plan, replicas=replicas)
    verdicts.append(checks.check(plan, lambda plan: strategies[plan.layout]))
    print(verdicts[-1], flush=True)
sys.exit(not all(verdict.is_well for verdict in verdicts))
