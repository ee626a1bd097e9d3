"""Random models and steps on strategies: each gives the numbers of one device, or says first what differs."""

import pytest

from tests.random_models import checks, plans

#: A small model in batches that two replicas divide, and a smaller last one.
BASE = {
    "inputs": ("vector",),
    "first": (),
    "parts": (("vector", "dense"),),
    "heads": (("numbers", "mse", "mae"),),
    "step": "",
    "extra": "",
    "subclassed": False,
    "optimizer": "sgd",
    "batch_size": 12,
    "rows": 30,
    "epochs": 1,
    "weights": "",
    "calls": ("evaluate",),
    "replicas": 2,
    "layout": "mirrored",
    "together": 1,
}

#: What random plans have found, small: what differs from `BASE`, and the mode of whole batches.
FOUND = {
    "a loss of the model's own, evaluated": ({"extra": "compute_loss", "seed": 1}, "JOINED"),
    "a log with the name of a metric, evaluated": ({"extra": "test_step", "seed": 2}, "SPLIT"),
    "a log of the model's own beside metrics": ({"extra": "compute_metrics"}, "SPLIT"),
    "results of metrics in the logs of a step": ({"step": "with a mean"}, "SPLIT"),
    "a gradient clipped by hand": ({"step": "clipped"}, "JOINED"),
    "several entries for each row": (
        {"heads": (("folded", "folded_deviation", ""),), "step": "plain"},
        "JOINED",
    ),
    "predictions with several entries": (
        {"heads": (("folded", "folded", ""),), "rows": 13, "batch_size": 13, "calls": ("predict",)},
        "WHOLE",
    ),
    "the same noise in each step": ({"parts": (("mixing", "fixed noise"),)}, "JOINED"),
    "a derivative over all rows": ({"parts": (("mixing", "gradient of the batch"),)}, "JOINED"),
    "synchronized": ({"parts": (("normalizing", "synchronized"),)}, "SPLIT"),
    "groups of rows that a last batch's parts do not have": (
        {"parts": (("of sizes", "groups"),), "batch_size": 16, "rows": 44},
        "JOINED",
    ),
    "few rows in another way": (
        {"parts": (("of sizes", "few rows"),), "batch_size": 16, "rows": 44},
        "JOINED",
    ),
    "a loss of groups of rows": ({"heads": (("numbers", "grouped", "correlation"),)}, "SPLIT"),
    "a metric along the rows": ({"heads": (("numbers", "mse", "cosine of columns"),)}, "SPLIT"),
    "losses and states of the model's own": ({"extra": "compute_loss_and_updates"}, "JOINED"),
    "a step that is set on the object": ({"extra": "train_step of the object"}, "JOINED"),
    "a loss that is set on the object": ({"extra": "compute_loss of the object"}, "JOINED"),
    "a logarithm": ({"parts": (("state", "root of the largest"),)}, "JOINED"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_random_plans_have_found(name):
    given, mode = FOUND[name]
    verdict = checks.check(plans.draw(**{"seed": 0, **BASE, **given}))
    assert verdict.kind == "equal", verdict
    assert not verdict.result.said, verdict
    assert mode in verdict.result.modes, verdict
    assert bool(verdict.result.together) == (mode in ("JOINED", "WHOLE")) or "predict" in name, verdict


@pytest.mark.parametrize("part", [("mixing", "centered"), ("state", "rows")])
def test_steps_with_a_tape_are_read_too(part):
    verdict = checks.check(plans.draw(**{"seed": 0, **BASE, "parts": (part,), "step": "tape"}))
    assert verdict.kind == "equal", verdict
    assert verdict.result.together, verdict


@pytest.mark.parametrize(
    ("part", "step"),
    [
        (("drawing", "dropout"), ""),
        (("normalizing", "batch norm"), ""),
    ],
)
def test_what_differs_is_said_before_the_first_step(part, step):
    verdict = checks.check(plans.draw(**{"seed": 0, **BASE, "parts": (part,), "step": step}))
    assert verdict.kind == "said", verdict


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(100, 112))]
)
def test_random_plans(seed):
    verdict = checks.check(plans.draw(seed))
    assert verdict.is_well, verdict


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10, 16))
def test_random_plans_on_replicas_of_two_devices(seed):
    verdict = checks.check(plans.draw(seed), checks.grid_of)
    assert verdict.is_well, verdict
