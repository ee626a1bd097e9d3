"""What a step costs between workers; run by every worker of a cluster (`tests/cluster/test_contract.py`)."""

import contextlib
import random
import re

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import IN_CLUSTER, crossentropy, digits, mirrored, mlp
from unisono.data import SHARD_HINT, AutoShardPolicy, Dataset, Options, TextLineDataset
from unisono.step._dispatch import CompiledStep
from unisono.training.groups import _constant_groups, _group_size, _step_loop
from unisono.training.groups._agreed_size import exchanges_in_loop
from unisono.training.resident import _arrays
from unisono.training.trainer import _trainer_step

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
    strategy = unisono.training._binding.strategy_of(model)
    parts = tuple(
        [v.value for v in part] for part in _trainer_step.variables_of(model, _trainer_step.TrainerTask.TRAIN)
    )
    (program,) = model.train_function._programs.values()
    state = strategy.mesh.put(parts, strategy.mesh.replicated)
    (stager,) = model.train_function.loop._stagers._stagers.values()
    stager.begin()
    stager.append((x[:rows], y[:rows], None))
    data = (strategy.mesh.put_own(np.int32(1)), stager.place())
    return program.lower(state, data).compile(), strategy.num_replicas_in_sync


#: Once in a program of several steps: how many steps the next one shall have.
WISH = 1


def messages(compiled):
    names = ("all-reduce", "all-gather", "collective-permute", "reduce-scatter", "all-to-all")
    found = {n: len(re.findall(rf" {n}(?:-start)?\(", compiled.as_text())) for n in names}
    return {n: count for n, count in found.items() if count}


def test_gradients_and_metrics_are_one_message(monkeypatch):
    """A round for each doubling of distance; XLA's own all-reduce where replicas are no power of two."""
    together, replicas = program_of()
    rounds = replicas.bit_length() - 1
    is_power = not replicas & (replicas - 1)
    in_program = {"all-reduce": WISH}
    assert messages(together) == (
        {"collective-permute": rounds, **in_program} if is_power else {"all-reduce": 1 + WISH}
    )
    monkeypatch.setattr(_trainer_step, "can_fuse", lambda model: False)
    apart, _ = program_of()
    if is_power:
        assert messages(apart) == {"collective-permute": 2 * rounds, **in_program}
    # Traced twice, computed once.
    products = [len(re.findall(r" dot\(", compiled.as_text())) for compiled in (together, apart)]
    assert products[0] == products[1] > 0


def sent(compiled):
    """The numbers of floats in a program's messages to a partner."""
    return [
        int(n) for n in re.findall(r"f32\[(\d+)\]\S* collective-permute(?:-start)?\(", compiled.as_text())
    ]


def test_moving_statistics_travel_with_the_gradients():
    plain, replicas = program_of()
    compiled, _ = program_of(batch_normalization=True)
    if not replicas & (replicas - 1):
        rounds = replicas.bit_length() - 1
        assert messages(compiled) == {"collective-permute": rounds, "all-reduce": WISH}
        # Scale, offset, mean and variance of each of the 32 features, and nothing else.
        assert sent(compiled) == [n + 4 * 32 for n in sent(plain)] != []


def test_moving_statistics_are_the_mean_of_the_replicas():
    strategy = mirrored(None)
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)])
        model.compile("sgd", "mse", metrics=["mae"])
    x = (np.arange(2 * replicas, dtype="f4") ** 2).reshape(replicas, 2)
    model.fit(x.reshape(-1, 1), x.reshape(-1, 1), batch_size=2 * replicas, shuffle=False, verbose=0)
    moving = {v.name: np.asarray(v.value).item() for v in model.layers[0].non_trainable_variables}
    np.testing.assert_allclose(moving["moving_mean"], x.mean(1).mean(), rtol=1e-6)
    np.testing.assert_allclose(moving["moving_variance"], x.var(1).mean(), rtol=1e-6)


def flat(batches):
    return [row for batch in batches for row in batch]


def rows_of(dataset):
    """What all replicas get of each batch, and how many rows that are in all."""
    strategy = mirrored(None)
    got = []
    for batch in strategy.distribute_dataset(dataset):
        got.append(np.ravel(strategy.gather(strategy.run(lambda x: x, args=(batch,)), axis=0)))
    return [g.tolist() for g in got]


def test_workers_shuffle_alike_without_a_seed_and_no_row_is_lost():
    random.seed(mirrored(None).worker_index)  # each would draw another order
    batches = rows_of(Dataset.range(50).shuffle(50).batch(12))
    assert [len(b) for b in batches] == [12, 12, 12, 12, 2]
    assert sorted(flat(batches)) == list(range(50))
    assert flat(batches) != list(range(50))


def policy(name):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return options


def test_files_are_divided_and_their_batches_joined(tmp_path):
    """Files of unequal length: when a worker has read its own, the others go on."""
    workers = mirrored(None).num_workers
    for i in range(workers + 1):
        (tmp_path / f"{i}.txt").write_text("".join(f"{10 * i + j}\n" for j in range(3 + 2 * i)))
    files = Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    numbers = files.interleave(TextLineDataset, cycle_length=1).map(np.int64)
    batches = rows_of(numbers.batch(2 * workers).with_options(policy("FILE")))
    expected = [10 * i + j for i in range(workers + 1) for j in range(3 + 2 * i)]
    assert sorted(flat(batches)) == expected
    assert len(batches[0]) == 2 * workers


@pytest.mark.parametrize("source", ["batch", "generator"])
def test_data_sharded_by_hand_are_all_used(source):
    """Each worker has its own rows; of each of its batches, its part goes into a step."""
    strategy = mirrored(None)
    workers, index = strategy.num_workers, strategy.worker_index
    own = Dataset.range(4 * workers**2).shard(workers, index)
    if source == "batch":
        data = own.batch(2 * workers)
    else:
        batches = list(own.batch(2 * workers))
        data = Dataset.from_generator(lambda: iter(batches))
    batches = rows_of(data.with_options(policy("OFF")))
    assert sorted(flat(batches)) == list(range(4 * workers**2))
    assert [len(b) for b in batches] == [2 * workers] * 2 * workers
    assert sorted(batches[0]) == list(range(2 * workers))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_distributed_data_of_a_function_train_in_fit():
    strategy = mirrored(None)
    replicas = strategy.num_replicas_in_sync
    x = np.arange(7 * replicas, dtype="f4")[:, None]

    def own(context):
        rows = Dataset.from_tensor_slices((x, x)).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return rows.batch(context.get_per_replica_batch_size(replicas))

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    data = strategy.distribute_datasets_from_function(own)
    (loss,) = model.fit(data, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, (x**2).mean(), rtol=1e-5)
    assert [s.shape for s in data.element_spec[0].values] == [(None, 1)] * len(strategy.mesh.local_replicas)


# Keras' word about a data set whose size nobody knows.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_fit_with_files_equals_fit_with_all_rows(tmp_path):
    def hinted():
        return Dataset.range(24).shard(SHARD_HINT, SHARD_HINT).map(lambda i: np.float32([i]))

    def trained(dataset):
        keras.utils.set_random_seed(1)
        with mirrored(None).scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-4), "mse")
        return model.fit(dataset.map(lambda x: (x, x)).batch(24), epochs=2, verbose=0).history["loss"]

    whole = Dataset.range(24).map(lambda i: np.float32([i]))
    np.testing.assert_allclose(trained(hinted().with_options(policy("HINT"))), trained(whole), rtol=1e-5)


def evaluated(rows, monkeypatch):
    """A model after `evaluate` and `predict` in groups of four, what they gave, and plain Keras' results."""
    monkeypatch.setattr(_group_size, "_FIRST", 4)
    monkeypatch.setattr(_group_size, "_SECONDS_SHORT", (-1.0, float("inf")))
    x, y = (a[:rows] for a in digits())
    found = []
    for scope in mirrored(None).scope(), contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        with scope:
            model = mlp()
            model.compile("sgd", crossentropy(), metrics=["accuracy"])
        size = 8 * mirrored(None).num_replicas_in_sync
        results = [
            model.evaluate(x, y, batch_size=size, verbose=0),
            model.evaluate(x, y, batch_size=size, verbose=0, sample_weight=np.linspace(0, 1, rows)),
            model.predict(x, batch_size=size, verbose=0),
        ]
        history = model.fit(
            x[:size], y[:size], batch_size=size, verbose=0, shuffle=False, validation_data=(x, y)
        )
        found.append((model, [*results, list(history.history.values())]))
    return found


def test_evaluate_and_predict_exchange_once_in_a_group(monkeypatch):
    """Full batches, a ragged last one, weights, and validation in `fit`; one message for four."""
    started, sent, original = [], {}, CompiledStep.__call__

    def counting(self, donated, kept, done=None, is_result=False):
        started.append(self)
        if self not in sent:
            sent[self] = messages(self.lower(donated, kept).compile())
            assert not exchanges_in_loop(self.jaxpr(donated, kept))
        return original(self, donated, kept, done, is_result)

    size = 8 * mirrored(None).num_replicas_in_sync
    rows = 9 * size + 1
    (model, found), (_, expected) = evaluated(rows, monkeypatch)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(CompiledStep, "__call__", counting)
    x, y = (a[:rows] for a in digits())
    for call in (
        lambda: model.evaluate(x, y, batch_size=size, verbose=0),
        lambda: model.predict(x, batch_size=size, verbose=0),
    ):
        started.clear()
        sent.clear()
        call()
        assert len(started) == 4  # 4, 4 and 1 steps, and the ragged one
        assert list(sent.values()) == [{"all-gather": 1, "all-reduce": WISH}, {}]


def test_workers_change_to_groups_of_constant_length_together(monkeypatch):
    """As on GPUs: all ask each other what they have measured, and whether the program is compiled."""
    x, y = digits()

    def trained():
        keras.utils.set_random_seed(2)
        with mirrored(None).scope():
            model = mlp()
            model.compile("adam", crossentropy(), metrics=["accuracy"])
        history = model.fit(x[:960], y[:960], batch_size=16, epochs=3, verbose=0)
        return model, history.history

    ours, expected = trained()
    monkeypatch.setattr(_step_loop, "may_loop", lambda platform: False)
    for name, value in (("_WARM_UP", 2), ("_MEASURED", 2), ("_IDLE", 0.0), ("_ASK_EVERY", 4)):
        monkeypatch.setattr(_constant_groups, name, value)
    monkeypatch.setattr(_constant_groups, "pays", lambda alone, together: True)
    compilations, original = [], _constant_groups._in_thread
    monkeypatch.setattr(
        _constant_groups,
        "_in_thread",
        lambda compile_: compilations.append(original(compile_)) or compilations[-1],
    )
    grouped, history = trained()
    for compilation in compilations:
        compilation.result(60)
    # From here on it is compiled on all workers.
    (trial,) = grouped.train_function.loop.constant._trials.values()
    assert trial.phase.name in ("COMPILE", "TRY", "TOGETHER")
    for a, b in zip(grouped.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    grouped.fit(x[:960], y[:960], batch_size=16, epochs=3, verbose=0)
    assert trial.phase.name == "TOGETHER"


@pytest.fixture
def placed(monkeypatch):
    """The arrays that a call keeps on the devices, each time that they are placed."""
    found = []
    original = _arrays.ResidentArrays._on_devices

    def noting(self):
        found.append(original(self))
        return found[-1]

    monkeypatch.setattr(_arrays.ResidentArrays, "_on_devices", noting)
    return found


def trained_on(data, **fit):
    keras.utils.set_random_seed(2)
    with mirrored(None).scope():
        model = mlp()
        model.compile("adam", crossentropy(), metrics=["accuracy"])
    history = model.fit(*data, epochs=2, verbose=0, **fit).history
    evaluation = model.evaluate(*data, verbose=0, batch_size=fit.get("batch_size"))
    return [history, evaluation, model.get_weights()], any(k.chooses for k in model.train_function._programs)


def test_spread_arrays_stay_on_the_devices_of_all_workers(monkeypatch, placed):
    """As on GPUs: each worker holds what its own devices read."""
    x, y = digits()
    x, y = x[:200], y[:200]
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("UNISONO_RESIDENT_DATA", switch)
        pipeline = Dataset.from_tensor_slices((x, y)).shuffle(200, seed=1).batch(24)
        for data, fit in (((x, y), {"batch_size": 24, "shuffle": True}), ((pipeline,), {})):
            result, chooses = trained_on(data, **fit)
            assert chooses is (switch == "1")
            found.append(result)
    for with_arrays, without in zip(found[:2], found[2:], strict=True):
        np.testing.assert_equal(with_arrays, without)
    # In `fit` and in `evaluate`, of arrays and of the pipeline.
    assert len(placed) == 4
    own = set(mirrored(None).mesh.local_devices)
    shards = [shard for leaf in placed[0] if leaf is not None for shard in leaf.addressable_shards]
    assert {shard.device for shard in shards} == own


def test_spread_arrays_stay_on_no_device_if_one_worker_has_no_room(monkeypatch, placed):
    def fails(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setenv("UNISONO_RESIDENT_DATA", "1")
    if mirrored(None).worker_index == 1:
        monkeypatch.setattr(_arrays.ResidentArrays, "_on_devices", fails)
    _, chooses = trained_on(digits(), batch_size=300)
    assert not chooses


def test_spread_workers_with_other_switches_are_an_error(monkeypatch):
    monkeypatch.setenv("UNISONO_RESIDENT_DATA", str(mirrored(None).worker_index % 2))
    with pytest.raises(unisono.ClusterError, match="UNISONO_RESIDENT_DATA"):
        trained_on(digits(), batch_size=300)
