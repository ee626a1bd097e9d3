"""Metrics of replicas count the rows of all of them."""

import jax.numpy as jnp
import numpy as np
import pytest

import unisono
from unisono.estimator import metrics
from unisono.estimator.metrics._answers import _evenly, chosen, counts_at

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("rows", [4, 5, 1])
def test_sums_add_up(rows):
    two = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    y, p = RNG.integers(0, 2, rows), RNG.uniform(size=rows).astype("f4")
    with two.scope():
        mean = metrics.mean(np.zeros(1, "f4")).metric
        area = metrics.auc([0], [0.5]).metric
        mean.reset_state()
        area.reset_state()

    def step(batch):
        y, p = batch
        mean.update_state(total=jnp.sum(p), count=jnp.float32(p.size))
        area.update_state(**chosen(counts_at(y, p, _evenly(200), None), "tp fp tn fn"))

    (batch,) = two.distribute_dataset([(y, p)])
    for _ in range(2):
        two.run(step, args=(batch,))
    np.testing.assert_allclose(mean.result(), p.mean(), rtol=1e-6)
    np.testing.assert_allclose(area.result(), metrics.auc(np.tile(y, 2), np.tile(p, 2))[1], rtol=1e-5)
    assert float(mean.variables[1].value) == 2 * rows
