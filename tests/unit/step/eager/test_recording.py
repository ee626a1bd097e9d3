"""What a tape in eager code records; expectations are those of TensorFlow 2.21, see test_tensorflow_cases."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from unisono.step.variables._recorders import current_recorder

Tape = unisono.GradientTape


def test_assignments_separate_a_variable_from_what_it_was_assigned():
    x, v = jnp.asarray(3.0), keras.Variable(2.0)
    before = v.value
    with Tape() as tape:
        tape.watch(x)
        y = v * v
        v.assign(x * 2)
        z = y + v * 3 + v * before
    by_x, by_v = tape.gradient(z, [x, v])
    assert by_x is None
    # Of both values that were read: 2 * 2 + 3 + 2. What was read before the tape is a constant.
    assert float(by_v) == 9.0


def test_nothing_is_kept():
    x = jnp.ones((3,))
    with Tape() as tape:
        tape.watch(x)
        y = jnp.exp(x)
    kept = weakref.ref(y)
    assert current_recorder() is None
    tape.gradient(y, x)
    del y
    gc.collect()
    assert kept() is None


def test_an_exception_in_the_block_ends_the_recording():
    with pytest.raises(ZeroDivisionError), Tape():
        1 / 0  # noqa: B018
    assert current_recorder() is None
    assert isinstance(jnp.ones(()) + 1, jax.Array)


def test_operations_of_other_threads_are_not_recorded():
    x, found = jnp.asarray(2.0), []
    with Tape() as tape:
        tape.watch(x)
        thread = threading.Thread(target=lambda: found.append(x * x))
        thread.start()
        thread.join(30)
        y = x * x * x
    assert float(tape.gradient(y, x)) == 12.0
    assert found[0] == 4.0


def test_a_numpy_array_that_changes_later_counts_as_it_was():
    x, factor = jnp.ones((2,)), np.array([2.0, 3.0], "float32")
    with Tape() as tape:
        tape.watch(x)
        y = jnp.multiply(x, factor)
    factor[:] = 0
    np.testing.assert_array_equal(tape.gradient(y, x), [2.0, 3.0])


def test_donated_arrays_are_kept_for_the_derivative():
    x = jnp.ones((4,))
    square = jax.jit(lambda a: a * a, donate_argnums=0)
    with Tape() as tape:
        tape.watch(x)
        y = square(x)
    np.testing.assert_array_equal(tape.gradient(y, x), [2.0] * 4)


def test_an_array_that_was_given_away_is_named():
    x = jnp.ones((4,))
    with Tape() as tape:
        tape.watch(x)
        y = x * x
    jax.jit(lambda a: a + 1, donate_argnums=0)(x)
    with pytest.raises(unisono.TapeError, match="used its memory again"):
        tape.gradient(y, x)


def test_control_flow_and_custom_derivatives():
    x = jnp.asarray(0.5)
    with Tape(persistent=True) as tape:
        tape.watch(x)
        scanned, _ = jax.lax.scan(lambda c, _: (jax.nn.relu(c * x), None), x, None, length=3)
        chosen = jax.lax.cond(x > 0, lambda a: a * 3, lambda a: a, x)
        summed = jax.nn.logsumexp(jnp.stack([x, 2 * x]))
    assert float(tape.gradient(scanned, x)) == pytest.approx(4 * 0.5**3)
    assert float(tape.gradient(chosen, x)) == 3.0
    expected = jax.grad(lambda a: jax.nn.logsumexp(jnp.stack([a, 2 * a])))(x)
    assert float(tape.gradient(summed, x)) == pytest.approx(float(expected))


def test_transformations_in_the_block():
    z = jnp.asarray(3.0)
    with Tape(persistent=True) as tape:
        tape.watch(z)
        slope = jax.grad(lambda a: a**3 * z)(z)
        mapped = jax.vmap(lambda a: a * z)(jnp.arange(3.0))
        again = jax.checkpoint(jnp.sin)(z)
    # The slope is 3 z ** 3.
    assert [float(tape.gradient(y, z)) for y in (slope, mapped)] == [81.0, 3.0]
    assert float(tape.gradient(again, z)) == pytest.approx(np.cos(3.0))


def test_python_follows_values():
    x = jnp.asarray(2.0)
    with Tape() as tape:
        tape.watch(x)
        y = x * x
        while float(y) < 100:
            y = y * x
    # 2 ** 7
    assert float(tape.gradient(y, x)) == 7 * 2.0**6


def test_errors():
    with pytest.raises(unisono.TapeError, match="not entered"):
        Tape().gradient(jnp.ones(()), jnp.ones(()))
    with Tape() as tape:
        with pytest.raises(unisono.TapeError, match="once at a time"):
            tape.__enter__()
        with pytest.raises(TypeError, match="convert_to_tensor"):
            tape.watch(np.ones(3))
    tape.gradient(jnp.ones(()), jnp.ones(()))
    with pytest.raises(unisono.TapeError, match="persistent=True"):
        tape.gradient(jnp.ones(()), jnp.ones(()))
    with pytest.raises(unisono.TapeError, match="one that does not"), tape.stop_recording():
        pass
    with Tape() as tape, pytest.raises(TypeError, match="A target is"):
        tape.gradient(None, jnp.ones(()))


def test_watched_variables_are_known_after_the_gradient():
    variable = unisono.Variable(2.0)
    with Tape() as tape:
        y = variable**2
    assert tape.watched_variables() == (variable,)
    tape.gradient(y, variable)
    assert tape.watched_variables() == (variable,)


def test_a_target_is_computed_and_a_source_is_no_layer():
    layer = keras.layers.Dense(1)
    with unisono.GradientTape(persistent=True) as tape:
        loss = jnp.sum(layer(np.ones((2, 3), "f4")))
    with pytest.raises(unisono.InvalidTypeError, match=r"Received: Dense .*trainable_variables"):
        tape.gradient(loss, [layer])
    with pytest.raises(unisono.InvalidTypeError, match=r"Received: 2\.5"):
        tape.gradient(2.5, layer.trainable_variables)
