"""Programs of each kind as GPUs and TPUs get them: JAX lowers them where there is no such device.

The programs are those that the library itself starts (`tests/lowering.py`); the tables say what each holds.
"""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests import ps_cluster
from tests.lowering import Counts, programs_on
from tests.virtual.estimator.test_counts import training
from tests.virtual.training.test_counts import HostReads
from unisono import export
from unisono._mesh import ReplicaMesh
from unisono.collectives._cross_device import CommunicationOptions, PackedAllReduce
from unisono.parameter_server.strategy._serve import load_program
from unisono.parameter_server.worker._step_worker import StepWorker
from unisono.step._run_ahead import RUN_AHEAD, run_ahead_of

pytestmark = pytest.mark.numbers

L = keras.layers
TWO = ["cpu:0", "cpu:1"]
FOUR = [*TWO, "cpu:2", "cpu:3"]
UP_AND_DOWN = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(optimizer="adam"):
    model = keras.Sequential([keras.Input((6,)), L.Dense(4, activation="relu"), L.Dense(3)])
    model.compile(optimizer, crossentropy(), metrics=["accuracy"])
    return model


def two_in_a_row():
    """Two products in a row, large enough to be divided over the devices of a replica."""
    layers = [L.Dense(256, activation="relu", name="up"), L.Dense(3, name="down")]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    return model


def cnn():
    """Each kind of convolution that is rewritten on CPUs, pooling, moving statistics and random numbers."""
    layers = [keras.Input((9, 9, 2)), L.Conv2D(4, 3), L.MaxPooling2D(3, 2), L.BatchNormalization()]
    layers += [L.Conv2D(4, 1, data_format="channels_first"), L.SpatialDropout2D(0.2), L.DepthwiseConv2D(2)]
    model = keras.Sequential([*layers, L.Flatten(), L.Dropout(0.5), L.Dense(3)])
    model.compile("sgd", crossentropy())
    return model


def transformer():
    """Products over several dimensions, an embedding, and gradients that are clipped by their norm."""
    ids = keras.Input((5,), dtype="int32")
    x = L.Embedding(11, 4)(ids)
    x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True))
    model = keras.Model(ids, L.Dense(11)(L.Dense(4, activation="gelu")(x)))
    model.compile(keras.optimizers.SGD(clipnorm=1.0), crossentropy())
    return model


class Tapes(keras.Model):
    """A step in TensorFlow's form."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with unisono.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


def tapes():
    model = Tapes()
    model.compile("sgd", crossentropy())
    return model


def fitted(strategy, build, x, y, rows=8, policy="float32"):
    """Train on one batch, or on some of which the last one does not divide; evaluate and predict likewise."""
    before = keras.config.dtype_policy()
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            model = build()
    finally:
        keras.config.set_dtype_policy(before)
    x, y = x[:rows], y[:rows]
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return history["loss"], model


def everything(strategy):
    losses, model = fitted(strategy, mlp, numbers(21, 6), np.arange(21) % 3, rows=21)
    x, y = numbers(21, 6), np.arange(21) % 3
    return losses, model.evaluate(x, y, batch_size=8, verbose=0), model.predict(x, batch_size=8, verbose=0)


def one_batch(build, x, y, **options):
    return lambda strategy: fitted(strategy, build, x, y, **options)[0]


def by_hand(compiled):
    """`run` with a batch that divides and one that does not, in a function or by itself."""

    def loop(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, optimizer = keras.Sequential([keras.Input((6,)), L.Dense(3)]), keras.optimizers.Adam()
            seen = keras.metrics.Mean()

        def step(x):
            with unisono.GradientTape() as tape:
                loss = unisono.nn.compute_average_loss(keras.ops.sum(model(x) ** 2, axis=1))
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            seen.update_state(loss)
            return loss

        whole = compiled(lambda x: strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None))
        return [float(whole(x)) for x in strategy.distribute_dataset([numbers(8, 6), numbers(3, 6)])]

    return loop


def asked_for(strategy):
    """Collectives that a replica asks for, and the derivative of a gather."""

    def step(x):
        context = unisono.get_replica_context()
        loss = lambda x: jnp.sum(context.all_gather(x, 0) ** 2)  # noqa: E731
        return context.all_reduce("mean", jax.grad(loss)(x))

    (x,) = strategy.distribute_dataset([numbers(8, 6)])
    return [np.asarray(v) for v in strategy.local_results(strategy.run(step, args=(x,)))]


MLP = numbers(21, 6), np.arange(21) % 3
SCENARIOS = {
    "fit": everything,
    "cnn": one_batch(cnn, numbers(8, 9, 9, 2), np.arange(8) % 3),
    "transformer": one_batch(transformer, np.arange(40).reshape(8, 5) % 11, np.arange(40).reshape(8, 5) % 11),
    "bfloat16": one_batch(mlp, *MLP, policy="mixed_bfloat16"),
    "float16": one_batch(mlp, *MLP, policy="mixed_float16"),
    "two in a row": one_batch(two_in_a_row, numbers(8, 32), np.arange(8) % 3),
    "accumulated": one_batch(lambda: mlp(keras.optimizers.Adam(gradient_accumulation_steps=2)), *MLP),
    "tape in fit": one_batch(tapes, *MLP),
    "run": by_hand(lambda step: step),
    "function": by_hand(unisono.function),
    "asked for": asked_for,
}
STRATEGIES = {
    "mirrored": lambda: unisono.MirroredStrategy(TWO),
    "sharded": lambda: unisono.MirroredStrategy(TWO, state_layout="sharded"),
    "central": lambda: unisono.CentralStorageStrategy(TWO),
    # As between processes, where a bucket of 32 MiB is the rule on CPUs.
    "workers": lambda: unisono.MirroredStrategy(TWO, PackedAllReduce(CommunicationOptions(), "gpu", False)),
    "packed": lambda: unisono.MirroredStrategy(TWO, unisono.NcclAllReduce(num_packs=1)),
    "one": lambda: unisono.OneDeviceStrategy("cpu:1"),
    "grid": lambda: unisono.MirroredStrategy(FOUR, devices_per_replica=2, layout_map=UP_AND_DOWN),
    "automatic grid": lambda: unisono.MirroredStrategy(FOUR, devices_per_replica=2),
}
DOTS, EXCHANGED = "dot_general f32", "all_reduce"

#: For each program that a scenario starts: arrays of state, all donated; operations on matrices and windows;
#: and collectives, as how many there are and the bytes that a device gives into them. XLA combines those of
#: one kind. A batch that does not divide is computed by each device, without any.
HELD = {
    ("mirrored", "fit", "gpu"): [
        # 43 weights and the sums of two metrics, in float32.
        (18, {DOTS: 5}, {EXCHANGED: (8, 188)}),
        (18, {DOTS: 5}, {}),
        (8, {DOTS: 2}, {"all_gather": (1, 16)}),
        (8, {DOTS: 2}, {}),
        (4, {DOTS: 2}, {}),
        (4, {DOTS: 2}, {}),
    ],
    # As above, but several steps in a loop, of which an evaluation gathers the metrics together.
    ("mirrored", "fit", "tpu"): [
        (18, {DOTS: 5}, {EXCHANGED: (8, 188)}),
        (18, {DOTS: 5}, {}),
        (8, {DOTS: 2}, {"all_gather": (1, 512)}),
        (8, {DOTS: 2}, {}),
        (4, {DOTS: 2}, {}),
        (4, {DOTS: 2}, {}),
    ],
    # Parts are padded to even numbers; sums of metrics are not divided.
    ("sharded", "fit", "gpu"): [
        (18, {DOTS: 5}, {"reduce_scatter": (4, 176), "all_gather": (4, 88), EXCHANGED: (4, 16)}),
        (18, {DOTS: 5}, {"all_gather": (4, 88)}),
        (8, {DOTS: 2}, {"all_gather": (1, 16)}),
        (8, {DOTS: 2}, {}),
        (4, {DOTS: 2}, {}),
        (4, {DOTS: 2}, {}),
    ],
    ("mirrored", "cnn", "gpu"): [
        (18, {"convolution f32": 8, DOTS: 3, "select_and_scatter f32": 1}, {EXCHANGED: (14, 820)})
    ],
    ("mirrored", "transformer", "gpu"): [(19, {DOTS: 24}, {EXCHANGED: (17, 836)})],
    ("mirrored", "bfloat16", "gpu"): [(18, {"dot_general bf16": 5}, {EXCHANGED: (8, 188)})],
    ("mirrored", "float16", "gpu"): [(22, {"dot_general f16": 5}, {EXCHANGED: (8, 188)})],
    ("mirrored", "accumulated", "gpu"): [(22, {DOTS: 5}, {EXCHANGED: (8, 188)})],
    ("mirrored", "tape in fit", "gpu"): [(5, {DOTS: 3}, {EXCHANGED: (4, 92)})],
    # 21 weights and the mean of the losses.
    ("mirrored", "run", "gpu"): [(9, {DOTS: 3}, {EXCHANGED: (4, 92)}), (9, {DOTS: 6}, {})],
    ("mirrored", "function", "gpu"): [(9, {DOTS: 3}, {EXCHANGED: (4, 92)}), (9, {DOTS: 6}, {})],
    ("sharded", "run", "gpu"): [
        (9, {DOTS: 3}, {"reduce_scatter": (2, 88), "all_gather": (2, 44), EXCHANGED: (2, 8)}),
        (9, {DOTS: 6}, {}),
    ],
    ("central", "run", "gpu"): [(9, {DOTS: 3}, {EXCHANGED: (4, 92)}), (9, {DOTS: 6}, {})],
    ("workers", "run", "gpu"): [(9, {DOTS: 3}, {EXCHANGED: (4, 92)}), (9, {DOTS: 6}, {})],
    ("packed", "run", "gpu"): [(9, {DOTS: 3}, {EXCHANGED: (2, 92)}), (9, {DOTS: 6}, {})],
    ("one", "run", "gpu"): [(9, {DOTS: 3}, {}), (9, {DOTS: 3}, {})],
    # Gradients in parts: 32 x 128, 128 and 128 x 3 numbers, 3 of a whole bias, and 4 of metrics. What the
    # devices of a replica send each other is not in this program: XLA's partitioner adds it.
    ("grid", "two in a row", "gpu"): [(18, {DOTS: 5}, {EXCHANGED: (8, 18460)})],
    ("automatic grid", "two in a row", "gpu"): [(18, {DOTS: 5}, {EXCHANGED: (8, 18460)})],
    ("mirrored", "asked for", "gpu"): [
        (0, {}, {"all_gather": (1, 96), "reduce_scatter": (1, 192), EXCHANGED: (1, 96)})
    ],
}


@functools.cache
def on_one_cpu(scenario):
    return SCENARIOS[scenario](unisono.OneDeviceStrategy("cpu:0"))


@pytest.mark.parametrize("case", HELD, ids=" ".join)
def test_what_programs_hold(case):
    """No rewriting for CPUs, no call of Python, state in its own memory, and the collectives meant."""
    name, scenario, platform = case
    with programs_on(platform) as programs:
        result = SCENARIOS[scenario](STRATEGIES[name]())
    for target in ("cuda", "tpu"):
        found = [program.counts(target) for program in programs]
        assert [(held.donated, held.products, held.exchanges) for held in found] == HELD[case]
        assert [program.num_state for program in programs] == [held.donated for held in found]
        assert not any(held.calls for held in found)
    # The path for accelerators, which ran on CPUs here, gives the numbers of one device.
    if scenario in ("fit", "run", "two in a row"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, on_one_cpu(scenario))


def test_the_counts_see_what_is_rewritten_for_cpus():
    with programs_on("gpu") as programs:
        SCENARIOS["cnn"](STRATEGIES["one"]())
    (program,) = programs
    found = {target: program.counts(target).products for target in ("cuda", "cpu")}
    assert found["cuda"]["select_and_scatter f32"] == 1
    assert "select_and_scatter f32" not in found["cpu"]
    # A convolution of 1x1 is a product of matrices there.
    assert found["cpu"][DOTS] > found["cuda"][DOTS]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_estimators_steps(platform, tmp_path):
    with programs_on(platform) as programs:
        training(STRATEGIES["mirrored"](), 4, 4, tmp_path).run()
    (program,) = programs
    # A weight and a bias, the loss beside them.
    assert program.counts("cuda").exchanges[EXCHANGED][1] == 16


def test_what_a_step_costs_the_host_on_gpus(monkeypatch):
    """One transfer of the numbers of its rows, and no wait but for the step sixteen before it.

    The arrays are placed once, which is waited for: there may be no room for them.
    """
    put, placed = ReplicaMesh.put, []
    monkeypatch.setattr(
        ReplicaMesh, "put", lambda mesh, x, sharding: placed.append(x) or put(mesh, x, sharding)
    )
    with programs_on("gpu") as programs:
        strategy = STRATEGIES["mirrored"]()
        with strategy.scope():
            model = mlp()
        for steps in (8, 24):
            reads = HostReads()
            rows = 8 * steps
            x, y = numbers(rows, 6), np.arange(rows) % 3
            placed.clear()
            run_ahead_of(strategy.mesh)._tokens.clear()
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[reads])
            # Loss and accuracy at the end of the epoch.
            waits = [name for name in reads.reads if name != "array"]
            assert waits == ["block_until_ready"] * (1 + max(0, steps - RUN_AHEAD)), reads.reads
            sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(x)) for x in placed]
            assert sizes.count(8 * 4) >= steps
            assert len(placed) - steps <= 5, sizes
    assert len(programs) == 1


@pytest.mark.parametrize(("platform", "platforms"), [("cpu", ("cpu",)), ("cuda", ("cpu", "cuda"))])
def test_workers_of_parameter_servers(monkeypatch, platform, platforms):
    """Their programs are for what they compute on; those of servers are for CPUs."""
    loaded = []

    def load(*program):
        loaded.append(load_program(*program))
        return loaded[-1]

    monkeypatch.setattr(ps_cluster, "load_program", load)
    monkeypatch.setattr(ps_cluster, "StepWorker", functools.partial(StepWorker, platform=platform))
    with ps_cluster.local_strategy(workers=1, servers=1) as strategy:
        SCENARIOS["cnn"](strategy)
    (program,) = loaded
    assert program.exported.platforms == platforms
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.exported.in_avals]
    lowered = jax.jit(program.exported.call).trace(*specs).lower(lowering_platforms=platforms[-1:])
    held = Counts.of(lowered.compiler_ir("stablehlo"))
    assert held.products.get("select_and_scatter f32", 0) == (platform == "cuda")
    assert not held.calls


def test_exports_call_no_python(tmp_path):
    """One file for all platforms, in which each finds its own operations."""
    model = cnn()
    export.export(model, tmp_path / "model")
    served = export.load(tmp_path / "model")
    assert set(served.platforms) == {"cpu", "cuda", "tpu", "rocm"}
    for target in ("cuda", "tpu"):
        traced = jax.jit(served).trace(jax.ShapeDtypeStruct((4, 9, 9, 2), "float32"))
        held = Counts.of(traced.lower(lowering_platforms=(target,)).compiler_ir("stablehlo"))
        # JAX's check of the batch's size, which is computed when a program is compiled.
        assert held.calls == {"shape_assertion"}
        assert not held.exchanges
