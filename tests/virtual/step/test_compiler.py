"""The cache of programs: what makes a new one, and the word about too many."""

import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import mirrored
from unisono.step._keras_internals import store_value, stored_value


def test_numbers_that_change_as_arrays_need_one_program(caplog):
    strategy = mirrored(2)

    def scaled(x, factor):
        return x * factor

    with caplog.at_level(logging.WARNING, logger="unisono"):
        for i in range(12):
            strategy.run(scaled, args=(np.ones(2, "f4"), np.float32(i)))
    assert not caplog.records


def test_many_programs_for_one_function_are_explained_once(caplog):
    strategy = mirrored(2)

    def scaled(x, factor):
        return x * factor

    with caplog.at_level(logging.WARNING, logger="unisono"):
        for i in range(12):
            strategy.run(scaled, args=(np.ones(2, "f4"), i))
    (record,) = caplog.records
    assert "scaled was compiled 8 times" in record.getMessage()
    assert "as a numpy array, or keep it in a `keras.Variable`" in record.getMessage()


def test_functions_of_one_name_are_counted_apart(caplog):
    strategy = mirrored(1)
    steps = [
        lambda: 0,
        lambda: 1,
        lambda: 2,
        lambda: 3,
        lambda: 4,
        lambda: 5,
        lambda: 6,
        lambda: 7,
        lambda: 8,
    ]
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert [strategy.run(step) for step in steps] == list(range(9))
    assert not caplog.records


def test_a_step_that_failed_after_an_assignment_leaves_no_old_array(monkeypatch):
    """An array that the variable had before is put back, as `fit` does after an error: it counts."""
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(1.0)

    def step():
        variable.assign_add(1.0)

    strategy.run(step)
    before = stored_value(variable)
    variable.assign(50.0)
    ((program,),) = strategy._compiler._programs._kept.values()
    with monkeypatch.context() as patched:
        patched.setattr(program.entry, "step", None)
        with pytest.raises(TypeError):
            strategy.run(step)
    store_value(variable, before)
    strategy.run(step)
    assert float(variable.value) == 3.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_variables_that_were_assigned_one_array_have_memory_of_their_own(replicas):
    """As a target network is: XLA takes no argument for two outputs."""
    strategy = mirrored(replicas)
    with strategy.scope():
        source, target, read = (keras.Variable(np.ones(3, "f4")) for _ in range(3))

    def step():
        source.assign_add(source.value)
        target.assign_add(target.value + read.value)

    strategy.run(step)
    target.assign(source.value)
    read.assign(source.value)
    strategy.run(step)
    for variable, expected in [(source, 4.0), (target, 6.0), (read, 2.0)]:
        np.testing.assert_array_equal(variable.value, np.full(3, expected))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_of_one_variable_leaves_those_that_were_assigned_its_array(replicas):
    """Such as a target network, which the step does not touch; likewise an array of the user's."""
    strategy = mirrored(replicas)
    with strategy.scope():
        source, target, other, read = (keras.Variable(np.ones(3, "f4")) for _ in range(4))
        own = unisono.Variable(np.ones(3, "f4"), aggregation="mean")
        first = jnp.ones(3)
        made, copied = keras.Variable(first), keras.Variable(source.value)
        filled = keras.Variable(lambda shape, dtype: first, shape=(3,))
    given = jnp.full(3, 5.0)

    def step():
        for variable in (source, other, own, made):
            variable.assign_add(variable.value)

    strategy.run(step)
    target.assign(source)
    read.assign(source.value)
    other.assign(given)
    snapshot = own.read_value()
    strategy.run(step)
    strategy.run(step)
    pairs = [
        (source.value, 8),
        (target.value, 2),
        (read.value, 2),
        (other.value, 20),
        (given, 5),
        (snapshot, 2),
        (first, 1),
        (made.value, 8),
        (copied.value, 1),
        (filled.value, 1),
    ]
    for value, expected in pairs:
        np.testing.assert_array_equal(value, np.full(3, expected))


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_array_of_a_variable_that_the_step_is_given_and_writes(replicas):
    """It lies on the devices already, and stays as it is."""
    strategy = mirrored(replicas)
    with strategy.scope():
        variable = keras.Variable(np.ones(3, "f4"))
    given = []
    for _ in range(5):
        given.append(variable.value)
        strategy.run(lambda x: variable.assign_add(x), args=(given[-1],))
    np.testing.assert_array_equal([*given, variable.value], [[2.0**i] * 3 for i in range(6)])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_deleted_array_is_an_error(replicas):
    strategy, given = mirrored(replicas), jnp.ones(4)
    distributed = next(iter(strategy.distribute_dataset([np.ones(4, "f4")])))
    for array in (given, distributed if replicas == 1 else distributed.stacked):
        strategy.run(lambda x: x + 1, args=(array,))
        array.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            strategy.run(lambda x: x + 1, args=(array,))


def test_an_array_that_is_assigned_or_given_in_a_trace_stays_an_array():
    """The copy that the variable gets is no part of the trace, after whose end it could not be read."""
    given, variable, made = jnp.ones(3), keras.Variable(np.zeros(3, "f4")), []

    @jax.jit
    def traced(x):
        variable.assign(given)
        made.append(keras.Variable(given))
        return x

    with mirrored(2).scope():
        traced(1.0)
    np.testing.assert_array_equal(variable.value, np.ones(3))
    np.testing.assert_array_equal(made[0].value, np.ones(3))


def test_the_same_without_a_strategy():
    source, target = (keras.Variable(np.ones(3, "f4")) for _ in range(2))

    @unisono.function
    def step():
        source.assign_add(source.value)

    step()
    target.assign(source)
    step()
    np.testing.assert_array_equal(source.value, np.full(3, 4.0))
    np.testing.assert_array_equal(target.value, np.full(3, 2.0))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"args": (np.array([1 << 40]),)}, r"args\[0\]"),
        ({"kwargs": {"x": np.array([1 << 40])}}, r"kwargs\['x'\]"),
    ],
    ids=["args", "kwargs"],
)
def test_integers_that_32_bits_cannot_hold_are_named(given, named):
    with pytest.raises(unisono.InvalidArgumentError, match=named):
        mirrored(2).run(lambda x: x, **given)


@pytest.mark.parametrize("words", [{"args": (np.array(["a"]),)}, {"kwargs": {"x": np.array(["a"])}}])
def test_arguments_that_devices_cannot_hold_are_named(words):
    place = r"args\[0\]" if "args" in words else r"kwargs\['x'\]"
    with pytest.raises(TypeError, match=f"Received: {place} with strings"):
        mirrored(2).run(lambda x: x, **words)
