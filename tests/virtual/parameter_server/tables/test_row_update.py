"""An optimizer's update of some rows: Keras' own for those, nothing for others."""

import jax
import keras
import numpy as np
import pytest

from unisono.parameter_server.programs._server_update import OptimizerUpdates
from unisono.parameter_server.server._programs import ExportedProgram
from unisono.parameter_server.tables._row_values import NotByRowsError

K = keras.optimizers


def built(make):
    rng = np.random.default_rng(0)
    table = keras.Variable(rng.normal(size=(9, 3)).astype("float32"), name="table")
    kernel = keras.Variable(rng.normal(size=(3, 2)).astype("float32"), name="kernel")
    optimizer = make()
    optimizer.build([kernel, table])
    return optimizer, kernel, table


# Whether rows without a gradient stay as they are where Keras updates all.
@pytest.mark.parametrize(
    ("make", "is_whole"),
    [
        (lambda: K.SGD(0.1), True),
        (lambda: K.Adagrad(0.1), True),
        (lambda: K.SGD(0.1, momentum=0.9), False),
        (lambda: K.Adam(0.1, amsgrad=True), False),
        (lambda: K.AdamW(0.1, weight_decay=0.1), False),
        (lambda: K.RMSprop(0.1, centered=True), False),
        (lambda: K.Nadam(0.1), False),
        (lambda: K.Ftrl(0.1), False),
        (lambda: K.Lion(0.1), False),
        (lambda: K.Adadelta(0.1), False),
        (lambda: K.Adam(K.schedules.ExponentialDecay(0.1, 3, 0.5), clipnorm=0.1), False),
        (lambda: K.LossScaleOptimizer(K.SGD(0.1)), True),
    ],
)
def test_touched_rows_get_what_keras_gives_them(make, is_whole):
    optimizer, _, table = built(make)
    updates = OptimizerUpdates(optimizer)
    update = updates.row_update(1)
    assert update.is_whole is is_whole
    variables = [*updates.trained, *updates.slots]
    program, rng = ExportedProgram(update.blob), np.random.default_rng(1)
    held = {id(v): np.array(v.value) for v in variables}
    # Twice: slots count.
    for count in (1, 4):
        rows = rng.choice(9, count, replace=False)
        gradient = rng.normal(size=(count, 3)).astype("float32")
        whole = np.zeros((9, 3), "float32")
        whole[rows] = gradient
        by_row = {id(v) for v in (table, *updates.slots_of(1)) if v.shape[:1] == (9,)}
        given = [held[id(variables[i])] for i in update.values]
        given = [
            x[rows] if id(variables[i]) in by_row else x for i, x in zip(update.values, given, strict=True)
        ]
        found, _ = program(given, [], [gradient, *(np.ones(count, bool) for _ in update.flags)])
        scale = getattr(optimizer, "dynamic_scale", None)
        factor = 1.0 if scale is None else held[id(scale)]
        clip, optimizer.clipnorm = optimizer.clipnorm, None
        expected = optimizer.stateless_apply(
            [held[id(v)] for v in updates.slots],
            [np.zeros((3, 2), "float32"), whole * factor],
            [held[id(v)] for v in updates.trained],
        )
        optimizer.clipnorm = clip
        after = {id(v): np.array(x) for v, x in zip(variables, [*expected[0], *expected[1]], strict=True)}
        for i, new in zip(update.values, found, strict=True):
            if id(variables[i]) in by_row:
                np.testing.assert_allclose(new, after[id(variables[i])][rows], rtol=1e-6, atol=1e-7)
            else:
                # What all variables share is changed by the update of the others.
                np.testing.assert_array_equal(new, held[id(variables[i])])
        if is_whole:
            held = after
        else:
            for i, new in zip(update.values, found, strict=True):
                if id(variables[i]) in by_row:
                    held[id(variables[i])][rows] = np.asarray(new)
            held |= {key: x for key, x in after.items() if key not in by_row}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: K.Lamb(0.1), "goes over all of its rows"),
        (lambda: K.Adafactor(0.1), "row"),
        (lambda: K.SGD(0.1, gradient_accumulation_steps=2), "several steps"),
        (lambda: K.SGD(0.1, use_ema=True), "several steps"),
    ],
)
def test_updates_that_need_other_rows_are_refused(make, why):
    optimizer, _, _ = built(make)
    with pytest.raises(NotByRowsError, match=why):
        OptimizerUpdates(optimizer).row_update(1)


def test_a_constraint_of_rows_is_kept_and_one_over_rows_is_refused():
    for axis in (1, 0):
        optimizer, _, table = built(lambda: K.SGD(0.1))
        table.constraint = keras.constraints.MaxNorm(0.5, axis)
        if axis == 0:
            with pytest.raises(NotByRowsError, match="goes over all of its rows"):
                OptimizerUpdates(optimizer).row_update(1)
            continue
        update = OptimizerUpdates(optimizer).row_update(1)
        given = [np.ones((2, 3), "float32"), np.float32(0.1)]
        found, _ = ExportedProgram(update.blob)(given, [], [np.ones((2, 3), "float32")])
        np.testing.assert_allclose(np.linalg.norm(found[0], axis=1), [0.5, 0.5], rtol=1e-5)


def test_one_program_serves_any_number_of_rows():
    optimizer, _, _ = built(lambda: K.Adagrad(0.1))
    update = OptimizerUpdates(optimizer).row_update(1)
    (aval, *_), _ = jax.export.deserialize(bytearray(update.blob)).in_avals, None
    assert not isinstance(aval.shape[0], int)
    assert aval.shape[1] == 3
