"""An optimizer's update, divided over servers, gives the numbers of Keras' own update."""

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.parameter_server.chief._dict_cluster import DictCluster
from unisono.parameter_server.chief._placement import Division, VariablePart
from unisono.parameter_server.programs._preparation import prepare_gradients
from unisono.parameter_server.programs._server_update import OptimizerUpdates

#: XLA fuses a server's part of the update in another way than the whole of it: a few units in the last place
#: of float32 for each of the steps.
CLOSE = {"rtol": 2e-6, "atol": 2e-7}

K = keras.optimizers
OPTIMIZERS = {
    "SGD": lambda: K.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda: K.AdamW(K.schedules.ExponentialDecay(0.01, 2, 0.5), weight_decay=0.1),
    "Nadam": lambda: K.Nadam(0.01),
    "RMSprop": lambda: K.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.01),
    "global_clipnorm": lambda: K.Adam(0.01, global_clipnorm=0.2, loss_scale_factor=4.0),
    "ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: K.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.05),
    "loss_scale": lambda: K.LossScaleOptimizer(
        K.Adam(0.01, global_clipnorm=0.2), 8.0, dynamic_growth_steps=2
    ),
    "multi": lambda: K.MultiOptimizer(
        K.OptimizerMap(K.SGD(0.1), {"kernel": K.Adam(0.01, global_clipnorm=0.1)})
    ),
}

SHAPES = {"kernel": (4, 3), "bias": (3,), "table": (5, 2)}


def weights():
    rng = np.random.default_rng(0)
    return [keras.Variable(rng.normal(size=s).astype("float32"), name=n) for n, s in SHAPES.items()]


def built(name):
    variables = weights()
    optimizer = OPTIMIZERS[name]()
    optimizer.build(variables)
    return optimizer, variables


def gradients(step, scale=1.0):
    rng = np.random.default_rng(step + 1)
    return [np.float32(scale) * rng.normal(size=s).astype("float32") for s in SHAPES.values()]


def push(cluster, optimizer, grads):
    """What a worker and the servers do with gradients."""
    values = [cluster.read(v) for v in optimizer.variables]
    given, extras = prepare_gradients(optimizer, list(map(jax.numpy.asarray, grads)), values)
    trained = cluster.updates[id(optimizer)].trained
    pushed = {id(v): g for v, g in zip(trained, given, strict=True) if g is not None}
    pushed |= extras
    present = tuple(g is not None for g in given)
    cluster.update(optimizer, present, pushed)


# The first two are trained with in `test_worker_step`, as are others. With three shards on two servers each
# has two of the table's.
@pytest.mark.parametrize(
    ("name", "shards"),
    [(name, 1) for name in list(OPTIMIZERS)[2:]]
    + [(n, 3) for n in ("SGD", "AdamW", "RMSprop", "ema", "loss_scale", "multi")],
)
def test_servers_update_as_keras_does(name, shards):
    optimizer, variables = built(name)
    cluster = DictCluster(variables, [optimizer], 2, shards)
    values, trained = [v.value for v in optimizer.variables], [v.value for v in variables]
    update = jax.jit(optimizer.stateless_apply)
    for step in range(4):
        # In the third step a scaled loss overflows.
        grads = gradients(step, np.inf if name == "loss_scale" and step == 2 else 1.0)
        push(cluster, optimizer, grads)
        trained, values = update(values, grads, trained)
    for variable, value in zip([*variables, *optimizer.variables], [*trained, *values], strict=True):
        for part in cluster.divisions[id(variable)].parts:
            np.testing.assert_allclose(
                cluster.servers[part.server][id(variable), part],
                part.of(np.asarray(value)),
                **CLOSE,
                err_msg=variable.path,
            )


def on(*servers):
    """Return where variables lie: each on one server, or in parts of its rows."""
    return [s if isinstance(s, Division) else Division.copies([s]) for s in servers]


def in_parts(*parts):
    return Division(tuple(VariablePart(server, (begin, end)) for server, begin, end in parts))


def test_slots_lie_beside_their_variable_and_counters_everywhere():
    optimizer = K.Adam(0.01, amsgrad=True)
    optimizer.build(weights())
    homes = OptimizerUpdates(optimizer).divisions(on(0, 1, 2))
    named = {
        v.path.rpartition("/")[2]: list(h.servers) for v, h in zip(optimizer.variables, homes, strict=True)
    }
    assert named == {
        "iteration": [0, 1, 2],
        "learning_rate": [0, 1, 2],
        **{f"kernel_{slot}": [0] for slot in ("momentum", "velocity", "velocity_hat")},
        **{f"bias_{slot}": [1] for slot in ("momentum", "velocity", "velocity_hat")},
        **{f"table_{slot}": [2] for slot in ("momentum", "velocity", "velocity_hat")},
    }


def test_a_server_takes_and_gives_only_its_own():
    optimizer, (kernel, bias, table) = built("AdamW")
    update = OptimizerUpdates(optimizer).program(1, on(0, 1, 1))
    assert [v.path for v in update.gradients] == [bias.path, table.path]
    assert kernel.path not in " ".join(v.path for v in update.values)
    assert optimizer.iterations.path in [v.path for v in update.writes]
    fixed = OptimizerUpdates(built("SGD")[0]).program(0, on(0, 1, 1))
    # The learning rate is read, and stays as it is.
    assert "learning_rate" in " ".join(v.path for v in fixed.values)
    assert "learning_rate" not in " ".join(v.path for v in fixed.writes)


def test_variables_without_a_gradient_are_skipped_with_keras_warning():
    optimizer, variables = built("SGD")
    cluster = DictCluster(variables, [optimizer], 2)
    grads = gradients(0)
    grads[1] = None
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['bias'\]"):
        expected, values = optimizer.stateless_apply(
            [v.value for v in optimizer.variables], grads, [v.value for v in variables]
        )
    given, _ = prepare_gradients(optimizer, grads, [v.value for v in optimizer.variables])
    assert [g is None for g in given] == [False, True, False]
    pushed = {id(v): g for v, g in zip(variables, given, strict=True) if g is not None}
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        cluster.update(optimizer, (True, False, True), pushed)
    for variable, value in zip([*variables, *optimizer.variables], [*expected, *values], strict=True):
        np.testing.assert_allclose(cluster.read(variable), value, **CLOSE, err_msg=variable.path)


def test_no_gradient_at_all_is_an_error():
    optimizer, _ = built("SGD")
    # Keras' own text, or that of the library where a strategy has wrapped the optimizer before.
    said = "No gradients provided for any variable|must get a gradient for at least one variable"
    with pytest.raises(ValueError, match=said):
        OptimizerUpdates(optimizer).program(0, on(0, 0, 0), [False] * 3)


def test_norm_of_accumulated_gradients_needs_one_server():
    optimizer = K.SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=0.1)
    optimizer.build(weights())
    with pytest.raises(unisono.UnsupportedError, match=r"SGD.*Use one parameter server"):
        OptimizerUpdates(optimizer).program(0, on(0, 1, 1))
    assert len(OptimizerUpdates(optimizer).program(0, on(0, 0, 0)).gradients) == 3


def test_an_optimizer_that_mixes_variables_is_refused():
    class Mean(K.SGD):
        def update_step(self, gradient, variable, learning_rate):
            others = [keras.ops.mean(v) for v in self._trainable_variables]
            super().update_step(gradient + sum(others), variable, learning_rate)

    optimizer = Mean(0.1, momentum=0.9)
    optimizer.build(weights())
    with pytest.raises(unisono.UnsupportedError, match=r"several parameter servers.*Mean"):
        OptimizerUpdates(optimizer).program(0, on(0, 1, 1))


def test_each_server_updates_its_rows_and_slots_are_divided_alike():
    optimizer, (kernel, bias, table) = built("AdamW")
    divisions = [in_parts((0, 0, 2), (1, 2, 4)), *on(1), in_parts((1, 0, 2), (0, 2, 4), (1, 4, 5))]
    slots = OptimizerUpdates(optimizer).divisions(divisions)
    named = {v.path.rpartition("/")[2]: d for v, d in zip(optimizer.variables, slots, strict=True)}
    assert [d for name, d in named.items() if "kernel" in name] == [divisions[0]] * 2
    assert [d for name, d in named.items() if "table" in name] == [divisions[2]] * 2
    assert named["iteration"].servers == (0, 1)
    update = OptimizerUpdates(optimizer).program(1, divisions)
    found = [(p.variable, p.part.rows) for p in update.gradients]
    assert [id(v) for v, _ in found] == [id(kernel), id(bias), id(table), id(table)]
    assert [rows for _, rows in found] == [(2, 4), None, (0, 2), (4, 5)]
    assert [p.path for p in update.writes].count(optimizer.iterations.path) == 1


class Noisy(K.SGD):
    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(variable.shape, seed=1)
        super().update_step(gradient + noise, variable, learning_rate)


class Centered(K.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / variable.shape[0], variable, learning_rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda: K.Adafactor(0.01),
        lambda: K.Lamb(0.01),
        lambda: K.Muon(0.01),
        lambda: K.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.1),
        lambda: Noisy(0.1),
        lambda: Centered(0.1),
    ],
)
def test_an_optimizer_that_mixes_rows_is_refused_for_what_is_divided(make):
    optimizer, variables = make(), weights()
    optimizer.build(variables)
    updates = OptimizerUpdates(optimizer)
    assert len(updates.divisions(on(0, 0, 0))) == len(optimizer.variables)
    with pytest.raises(unisono.UnsupportedError, match=f"row's gradient.*{type(optimizer).__name__}.*'table"):
        updates.program(0, [*on(0, 0), in_parts((0, 0, 3), (1, 3, 5))])


def test_a_constraint_over_rows_is_refused_and_one_of_rows_is_not():
    for axis in (0, 1):
        variable = keras.Variable(np.ones((4, 3)), name="kernel")
        variable.constraint = keras.constraints.MaxNorm(1, axis)
        optimizer = K.SGD(0.1)
        optimizer.build([variable])
        divided = [in_parts((0, 0, 2), (1, 2, 4))]
        if axis:
            assert len(OptimizerUpdates(optimizer).program(0, divided).writes) == 2
            continue
        with pytest.raises(unisono.UnsupportedError, match=r"update of 'kernel'.*constraint"):
            OptimizerUpdates(optimizer).program(0, divided)


def test_an_unbuilt_optimizer_is_refused():
    with pytest.raises(unisono.InvalidArgumentError, match="must be built"):
        OptimizerUpdates(K.SGD(0.1))


def test_the_update_leaves_the_optimizer_as_it_was():
    optimizer, _ = built("loss_scale")
    OptimizerUpdates(optimizer).program(0, on(0, 0, 0))
    inner = optimizer.inner_optimizer
    assert not {"stateless_apply", "_clip_gradients", "check_finite"} & {*vars(inner), *vars(optimizer)}
    other = built("global_clipnorm")[0]
    OptimizerUpdates(other).program(0, on(0, 0, 0))
    assert other.loss_scale_factor == 4.0
