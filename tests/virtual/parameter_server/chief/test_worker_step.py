"""Keras' steps as programs of workers, with dictionaries as servers: the numbers of one device."""

import pickle
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.parameter_server.chief._dict_cluster import DictStrategy, cluster_of, trained
from unisono.parameter_server.programs._worker_step import WorkerStep
from unisono.training.trainer._trainer_step import TrainerTask

L, K = keras.layers, keras.optimizers

#: Gradients and update are two programs here and one in Keras, which XLA fuses in other ways: a few units in
#: the last place of float32 for each of the steps.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def mlp():
    model = keras.Sequential([keras.Input((6,)), L.Dense(8, "relu"), L.Dense(3)])
    return model, K.SGD(0.1, momentum=0.9)


def cnn():
    layers = [L.Conv2D(4, 3, activation="relu"), L.BatchNormalization(), L.MaxPooling2D(), L.Flatten()]
    model = keras.Sequential([keras.Input((6, 1)), L.Reshape((6, 1, 1)), L.ZeroPadding2D((0, 2))])
    for layer in [*layers, L.Dropout(0.4), L.Dense(8), L.Dropout(0.2), L.Dense(3)]:
        model.add(layer)
    return model, K.AdamW(K.schedules.ExponentialDecay(0.01, 2, 0.5), global_clipnorm=0.5)


def frozen():
    model = keras.Sequential([keras.Input((6,)), L.Dense(8, "relu"), L.BatchNormalization(), L.Dense(3)])
    model.layers[0].trainable = False
    return model, K.LossScaleOptimizer(K.Lion(0.01, clipnorm=0.1), 16.0, dynamic_growth_steps=2)


class Adversaries(keras.Model):
    """Two parts with an optimizer each; the second one's loss is of what the first has become.

    Args:
        rounds: how often the second one is updated in a step.
    """

    def __init__(self, rounds=1):
        super().__init__()
        self.rounds = rounds
        self.first, self.second = L.Dense(3), L.Dense(3)
        self.second_optimizer = K.Adam(0.02)
        for layer in (self.first, self.second):
            layer.build((None, 6))
        self.second.trainable = False
        self.target = self.add_weight(shape=(6, 3), trainable=False, name="target")
        self.built = True
        self.second_optimizer.build(self.second.variables)

    def call(self, x):
        return self.first(x) - self.second(x)

    @property
    def non_trainable_variables(self):
        # Keras' state has room for what another optimizer updates.
        return [*super().non_trainable_variables, *self.second_optimizer.variables]

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y = data
        named = dict(zip(map(id, self.non_trainable_variables), others, strict=True))
        second = [named[id(v)] for v in self.second.variables]
        slots = [named[id(v)] for v in self.second_optimizer.variables]

        def loss_of(first, second):
            pairs = [*zip(self.first.variables, first, strict=True)]
            with keras.StatelessScope([*pairs, *zip(self.second.variables, second, strict=True)]):
                return jnp.mean(self.loss(y, self(x)))

        loss, grads = jax.value_and_grad(loss_of)(trainable, second)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        for _ in range(self.rounds):
            grads = jax.grad(loss_of, argnums=1)(trainable, second)
            second, slots = self.second_optimizer.stateless_apply(slots, [-g for g in grads], second)
        named[id(self.target)] = 0.9 * named[id(self.target)] + 0.1 * trainable[0]
        new = [*second, *slots]
        variables = [*self.second.variables, *self.second_optimizer.variables]
        named.update(zip(map(id, variables), new, strict=True))
        logs = {"loss": loss, "norm": jnp.sum(second[0]), "steps": slots[0]}
        return logs, (trainable, list(named.values()), optimizer, metrics)


class Custom(keras.Model):
    """A `train_step` of its own, which adds noise to the gradients and counts its steps."""

    def __init__(self):
        super().__init__()
        self.dense, self.seeds = L.Dense(3), keras.random.SeedGenerator(4)
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, name="steps")
        self.last = self.add_weight(shape=(), trainable=False, name="last")
        self.dense.build((None, 6))
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, fixed, optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            y_pred, _ = self.stateless_call(trainable, fixed, x)
            return jnp.mean(self.loss(y, y_pred))

        loss, grads = jax.value_and_grad(loss_of)(trainable)
        pairs = zip(self.non_trainable_variables, fixed, strict=True)
        with keras.StatelessScope(pairs) as scope:
            noise = keras.random.normal((3,), seed=self.seeds)
            self.steps.assign_add(1)
            self.last.assign(loss)
        grads = [grads[0], grads[1] + 0.01 * noise]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        new = [scope.get_current_value(v) for v in self.non_trainable_variables]
        return {"loss": loss}, (trainable, new, optimizer, metrics)


MODELS = {
    "mlp": (mlp, 1),
    "cnn": (cnn, 2),
    "frozen": (frozen, 3),
    "custom": (lambda: (Custom(), K.Adafactor(0.05)), 2),
    "adversaries": (lambda: (Adversaries(), K.Adam(0.01, clipnorm=0.1)), 2),
    "critic": (lambda: (Adversaries(rounds=3), K.Adam(0.01, clipnorm=0.1)), 2),
}


def batches(rows=24):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 3, rows).astype("int32")
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, rows, 8)]


def compiled(make):
    keras.utils.set_random_seed(1)
    model, optimizer = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    # Keras makes the metrics' variables with the first batch.
    x, y = (keras.KerasTensor(a.shape, str(a.dtype)) for a in batches()[0])
    model._symbolic_build(data_batch=(x, y))
    return model


def compiled_in(strategy, make):
    with strategy.scope():
        return compiled(make)


def plain_training(make, given):
    """The logs of each step and the variables at the end, of Keras itself."""
    model, found = compiled(make), []

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(dict(logs))

    x, y = (np.concatenate([b[i] for b in given]) for i in range(2))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Logs()])
    return found, [np.asarray(v.value) for v in state_of(model)]


def state_of(model):
    others = model.second_optimizer.variables if hasattr(model, "second_optimizer") else []
    return [*model.variables, *model.optimizer.variables, *others]


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_device(name):
    make, num_servers = MODELS[name]
    # The last batch of the MLP is smaller.
    given = batches(29 if name == "mlp" else 24)
    expected, values = plain_training(make, given)
    strategy = DictStrategy()
    model = compiled_in(strategy, make)
    logs, cluster, step = trained(model, strategy, given, num_servers)
    for ours, theirs in zip(logs, expected, strict=True):
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, **CLOSE, err_msg=key)
    for variable, expected in zip(state_of(model), values, strict=True):
        # Counters and random states are equal.
        close = {} if np.issubdtype(expected.dtype, np.integer) else CLOSE
        np.testing.assert_allclose(
            cluster.read(variable), expected, **{"rtol": 0, "atol": 0, **close}, err_msg=variable.path
        )
    assert step.num_programs == (2 if name == "mlp" else 1)


def test_a_program_is_found_by_the_shapes_of_the_batch_and_the_state():
    strategy = DictStrategy()
    model = compiled_in(strategy, mlp)
    step = WorkerStep(model, strategy._replicas, TrainerTask.TRAIN)
    first, *_, last = batches(29)
    program = step.program(first)
    assert step.program(first) is program
    assert step.program(last) is not program
    as_specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
    assert step.program(as_specs) is program
    # A frozen layer, which Keras' lists of variables show.
    model.layers[0].trainable = False
    assert [len(part) for part in step.look()] == [2, 2, 6, 4]
    with pytest.raises(ValueError, match="trainable variables"):
        step.program(first)


def test_operations_are_lowered_as_in_this_process():
    strategy = DictStrategy()
    model = compiled_in(strategy, cnn)
    program = WorkerStep(model, strategy._replicas, TrainerTask.TRAIN).program(batches()[0])
    text = jax.export.deserialize(bytearray(program.blob)).mlir_module()
    # XLA's gradient of max pooling, instead of which `_lowering` compares and adds.
    assert "stablehlo.convolution" in text
    assert "stablehlo.select_and_scatter" not in text


def test_a_program_takes_only_what_it_reads():
    strategy = DictStrategy()
    model = compiled_in(strategy, frozen)
    batch = batches()[0]
    train = WorkerStep(model, strategy._replicas, TrainerTask.TRAIN).program(batch)
    names = [v.path for v in train.reads]
    assert not [n for n in names if "momentum" in n or "velocity" in n or "learning_rate" in n]
    # A frozen layer is read, and gets nothing.
    assert model.layers[0].kernel.path in names
    assert id(model.layers[0].kernel) not in {id(v) for _, v in train.gradients}
    moving = {model.layers[1].moving_mean.path, model.layers[1].moving_variance.path}
    assert moving <= {v.path for v in train.adds}
    assert not train.assigns
    assert not train.streams
    predict = WorkerStep(model, strategy._replicas, TrainerTask.PREDICT).program(batch)
    # The targets are left out.
    assert predict.arrays == (0,)
    assert train.arrays == (0, 1)
    assert {id(v) for v in predict.reads} == {id(v) for v in model.weights}
    assert not (predict.gradients)
    assert not (predict.adds)
    assert not (predict.assigns)


def test_evaluate_and_predict_are_those_of_one_device():
    strategy = DictStrategy()
    plain, model = compiled(cnn), compiled_in(strategy, cnn)
    cluster = cluster_of(model, 2)
    test = WorkerStep(model, strategy._replicas, TrainerTask.TEST)
    predict = WorkerStep(model, strategy._replicas, TrainerTask.PREDICT)
    for batch in batches():
        logs = cluster.run(test.program(batch), jax.tree.leaves(batch))
        outputs = cluster.run(predict.program(batch), jax.tree.leaves(batch))
        np.testing.assert_allclose(outputs, plain.predict_on_batch(batch[0]), **CLOSE)
    x, y = (np.concatenate([b[i] for b in batches()]) for i in range(2))
    theirs = plain.evaluate(x, y, batch_size=8, return_dict=True, verbose=0)
    assert set(logs) == set(theirs)
    for key, value in theirs.items():
        np.testing.assert_allclose(logs[key], value, **CLOSE)


def test_each_run_has_dropout_masks_of_its_own():
    def make():
        model = keras.Sequential([keras.Input((6,)), L.Dropout(0.5, seed=3), L.Dense(3)])
        return model, K.SGD(0.1)

    strategy = DictStrategy()
    model = compiled_in(strategy, make)
    program = WorkerStep(model, strategy._replicas, TrainerTask.TRAIN).program(batches()[0])
    (stream,) = program.streams
    np.testing.assert_array_equal(stream.increment, [0, 1])
    state = np.asarray(stream.variable.value)
    np.testing.assert_array_equal(stream.advanced(state), [3, 1])
    cluster = cluster_of(model, 1)
    first, *others = (cluster.compute(program, batches()[0])[0] for _ in range(3))
    assert all((first != other).any() for other in others)
    # A repeated run gets the same state.
    cluster.write(stream.variable, state)
    np.testing.assert_array_equal(cluster.compute(program, batches()[0])[0], first)


class Broken(Custom):
    """A training step that no worker can run by itself.

    Args:
        fault: what it does.
    """

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.second = K.SGD(0.2, name="other")
        self.second.build(self.trainable_variables)

    def train_step(self, state, data):
        trainable, fixed, optimizer, metrics = state
        grads = [jnp.ones_like(w) for w in trainable]
        if self.fault == "draws":
            pairs = zip(self.non_trainable_variables, fixed, strict=True)
            with keras.StatelessScope(pairs) as scope:
                self.seeds.state.assign(self.seeds.state + keras.ops.cast(data[0][0, 0], "uint32"))
            fixed = [scope.get_current_value(v) for v in self.non_trainable_variables]
        if self.fault == "decays":
            trainable = [0.9 * w for w in trainable]
        new, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs = {"loss": jnp.zeros(())}
        if self.fault == "clips":
            new = [jnp.clip(w, -1, 1) for w in new]
        if self.fault == "two optimizers":
            slots = [v.value for v in self.second.variables]
            new, _ = self.second.stateless_apply(slots, grads, new)
        if self.fault == "discards":
            new = trainable
        if self.fault == "clips between":
            new = [jnp.clip(w, -1, 1) for w in new]
            new, optimizer = self.optimizer.stateless_apply(optimizer, grads, new)
        if self.fault == "prints":
            jax.debug.print("{}", trainable[0])
        return logs, (new, fixed, optimizer, metrics)


FAULTS = {
    "decays": r"by that update alone.*/kernel",
    "clips": r"by that update alone.*/kernel",
    "discards": r"by that update alone.*/kernel",
    "clips between": r"by that update alone.*/kernel",
    "two optimizers": r"'sgd.*' and 'other' update '.*/kernel'. Let one optimizer",
    "draws": "same number of random values",
    "prints": "must not call Python",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_worker_can_do_is_refused(fault):
    strategy = DictStrategy()
    model = compiled_in(strategy, lambda: (Broken(fault), K.SGD(0.1)))
    with pytest.raises(unisono.UnsupportedError, match=FAULTS[fault]):
        WorkerStep(model, strategy._replicas, TrainerTask.TRAIN).program(batches()[0])


def test_a_strategy_without_servers_is_refused():
    strategy = unisono.OneDeviceStrategy("cpu:0")
    model = compiled_in(strategy, mlp)
    with pytest.raises(unisono.UnsupportedError, match="variables lie on servers"):
        WorkerStep(model, strategy._replicas, TrainerTask.TRAIN)


#: Runs programs as a worker and a server do, which have neither Keras nor the user's code.
ALONE = """
import pickle, sys
import jax, jax.export, numpy
jax.config.update("jax_platforms", "cpu")
jobs = pickle.load(open(sys.argv[1], "rb"))
found = []
for blob, given in jobs:
    results = jax.export.deserialize(bytearray(blob)).call(*given)
    found.append([numpy.asarray(x) for x in jax.tree.leaves(results)])
assert "keras" not in sys.modules and "unisono" not in sys.modules
pickle.dump(found, open(sys.argv[1] + ".out", "wb"))
"""


def test_a_process_without_keras_runs_the_programs(tmp_path):
    strategy = DictStrategy()
    model = compiled_in(strategy, cnn)
    batch = batches()[0]
    program = WorkerStep(model, strategy._replicas, TrainerTask.TRAIN).program(batch)
    cluster = cluster_of(model, 2)
    update = cluster.update_program(0, model.optimizer, program.has_gradient(program.updates[0]))
    given = [*map(cluster.read, program.reads), *(cluster.read(s.variable) for s in program.streams)]
    values, gradients = (
        [np.full(p.spec.shape, 0.5, p.spec.dtype) for p in pieces]
        for pieces in (update.values, update.gradients)
    )
    path = tmp_path / "jobs"
    path.write_bytes(pickle.dumps([(program.blob, [*given, *batch]), (update.blob, [values, [], gradients])]))
    subprocess.run([sys.executable, "-c", ALONE, str(path)], check=True, timeout=300)
    found = pickle.loads((tmp_path / "jobs.out").read_bytes())
    for ours, theirs in zip(cluster.compute(program, batch), found[0], strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    assert [x.shape for x in found[1]] == [piece.spec.shape for piece in update.values]
