"""Initial values by few programs have the bits of Keras' own, and compile nothing for a shape seen before."""

import jax
import keras
import numpy as np
import pytest

from unisono.step._keras_internals import with_names
from unisono.training import _initial_values
from unisono.training._initial_values import uniform, wraps

SHAPES = [
    (1,),
    (3, 3, 3, 16),
    (3, 3, 1, 32),
    (7, 5),
    (784, 256),
    (128, 10),
    (1, 1, 16, 32),
    (65536,),
    (65537,),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-0.05, 0.05), (-0.08627, 0.08627), (1e-3, 3e8)])
def test_uniform_numbers_are_those_of_keras(shape, bounds):
    own = uniform(shape, *bounds, "float32", 4_294_967_295)
    kerass = jax.random.uniform(np.array([4_294_967_295, 0], np.uint32), shape, "float32", *bounds)
    assert own.dtype == kerass.dtype
    assert not own.weak_type
    np.testing.assert_array_equal(np.asarray(own).view("u4"), np.asarray(kerass).view("u4"))


@pytest.mark.parametrize(
    "name", ["GlorotUniform", "HeUniform", "RandomUniform", "GlorotNormal", "Zeros", "Ones"]
)
def test_initializers_give_the_bits_of_keras(name):
    cls = getattr(keras.initializers, name)
    make = {owner: wrapper for owner, _, wrapper in wraps()}
    owner = next(c for c in cls.__mro__ if c in make)
    # Keras' own method: a strategy that another test made may have wrapped it.
    original = vars(owner)["__call__"]
    original = getattr(original, "__wrapped__", original)
    initializer = cls() if name in ("Zeros", "Ones") else cls(seed=12)
    for shape in [(3, 4), (3, 3, 16, 16)]:
        for dtype in (None, "float32", "float16", "bfloat16"):
            own, kerass = (
                make[owner](original, initializer, shape, dtype),
                original(initializer, shape, dtype),
            )
            assert (own.dtype, own.weak_type) == (kerass.dtype, kerass.weak_type)
            assert np.asarray(own).tobytes() == np.asarray(kerass).tobytes()


@pytest.mark.parametrize(
    "arguments", [("float16", 3), ("float32", None), ("float32", -1), ("float32", 1 << 32)]
)
def test_other_types_and_seeds_are_left_to_keras(arguments):
    assert uniform((2,), 0.0, 1.0, *arguments) is None


def test_long_and_empty_arrays_are_left_to_keras():
    assert uniform((1 << 10, 1 << 11), 0.0, 1.0, "float32", 1) is None
    assert uniform((0, 4), 0.0, 1.0, "float32", 1) is None


@pytest.mark.parametrize("shape", [5, (-3, 4), (None, 4), (2.0, 4)])
def test_unusual_shapes_are_left_to_keras(shape):
    """Keras takes a number as a shape; of negative ones it tells."""
    assert uniform(shape, 0.0, 1.0, "float32", 1) is None
    received = []
    _initial_values.constant_value(lambda *args: received.append(args[1]), None, shape)
    assert received == [shape]


def test_bounds_that_are_arrays_are_left_to_keras():
    assert uniform((3, 4), np.zeros(4), 1.0, "float32", 1) is None
    assert uniform((3, 4), 0.0, np.ones(4), "float32", 1) is None


def test_inside_a_trace_keras_computes():
    seen = []
    jax.eval_shape(lambda: seen.append(uniform((4,), 0.0, 1.0, "float32", 1)) or 0)
    assert seen == [None]


def test_another_generator_is_left_to_keras():
    with jax.default_prng_impl("rbg"):
        assert uniform((2,), 0.0, 1.0, "float32", 1) is None


def test_a_new_shape_compiles_no_program():
    uniform((5, 5), -1.0, 1.0, "float32", 1)
    compiled = []

    def note(event, seconds, fun_name=None, **_):
        compiled.append((event, fun_name))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        uniform((11, 13), -1.0, 1.0, "float32", 1)
        _initial_values.constant_value(None, keras.initializers.Zeros(), (11, 13), "float32")
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not [name for event, name in compiled if "compile" in event]


def test_a_function_without_the_name_stays_itself():
    assert with_names(len, random=str) is len
    assert with_names(test_inside_a_trace_keras_computes, random=str) is test_inside_a_trace_keras_computes
