"""What a step costs between workers; run by every worker of a cluster (`tests/cluster/test_contract.py`)."""

import re

import keras
import pytest

import unisono
from tests.virtual.training._digits import IN_CLUSTER, crossentropy, digits, mirrored, mlp
from unisono.training import _fit

pytestmark = pytest.mark.skipif(not IN_CLUSTER, reason="needs a cluster of processes")


def program_of(batch_normalization=False):
    """The compiled training step of a model with two metrics."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(None)
    with strategy.scope():
        model = mlp(*([keras.layers.BatchNormalization()] if batch_normalization else []))
        model.compile("adam", crossentropy(), metrics=["accuracy"])
    x, y = digits()
    rows = 8 * strategy.num_replicas_in_sync
    model.fit(x[:rows], y[:rows], batch_size=rows, verbose=0)
    strategy = unisono.training._bind.strategy_of(model)
    parts = tuple([v.value for v in part] for part in _fit.variables_of(model, _fit.Task.TRAIN))
    (program,) = model.train_function._programs.values()
    state = strategy.mesh.put(parts, strategy.mesh.replicated)
    batch = strategy.mesh.put((x[:rows], y[:rows], None), strategy.mesh.sharded)
    return program.lower(state, batch).compile(), strategy.num_replicas_in_sync


def messages(compiled):
    names = ("all-reduce", "all-gather", "collective-permute", "reduce-scatter", "all-to-all")
    found = {n: len(re.findall(rf" {n}(?:-start)?\(", compiled.as_text())) for n in names}
    return {n: count for n, count in found.items() if count}


def test_gradients_and_metrics_are_one_message(monkeypatch):
    """A round for each doubling of distance; XLA's own all-reduce where replicas are no power of two."""
    together, replicas = program_of()
    rounds = replicas.bit_length() - 1
    is_power = not replicas & (replicas - 1)
    assert messages(together) == ({"collective-permute": rounds} if is_power else {"all-reduce": 1})
    monkeypatch.setattr(_fit, "can_join", lambda model: False)
    apart, _ = program_of()
    if is_power:
        assert messages(apart) == {"collective-permute": 2 * rounds}
    # Traced twice, computed once.
    products = [len(re.findall(r" dot\(", compiled.as_text())) for compiled in (together, apart)]
    assert products[0] == products[1] > 0


def test_moving_statistics_take_one_more():
    compiled, replicas = program_of(batch_normalization=True)
    if not replicas & (replicas - 1):
        assert messages(compiled) == {"collective-permute": 2 * (replicas.bit_length() - 1)}
