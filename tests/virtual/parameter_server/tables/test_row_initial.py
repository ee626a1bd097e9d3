"""First values that are made row by row: those of Keras."""

import os

import jax
import keras
import numpy as np
import pytest

import unisono
from unisono.parameter_server.programs import _push_layout
from unisono.parameter_server.server._programs import ExportedProgram
from unisono.parameter_server.tables._row_program import rows_of
from unisono.step._keras_internals import stored_value
from unisono.step._value_handle import DeferredValue

pytestmark = pytest.mark.numbers

K = keras.initializers
#: Larger than what the library computes for few lengths.
SHAPE = (70_000, 16)


def made(rows, begin, count):
    """Return rows as a server makes them."""
    program, parts, at = ExportedProgram(rows(begin)), [], 0
    while at < count:
        parts.append(np.asarray(program(np.int32(at))[0]))
        at += len(parts[-1])
    return np.concatenate(parts)[:count]


@pytest.mark.parametrize(
    "initializer",
    [K.RandomUniform(seed=3), K.RandomNormal(seed=4), K.TruncatedNormal(seed=5), K.GlorotUniform(seed=6),
     K.HeNormal(seed=7), K.LecunUniform(seed=8)],
    ids=lambda i: type(i).__name__,
)  # fmt: skip
def test_rows_have_the_bits_of_the_whole(initializer):
    whole = np.asarray(initializer(SHAPE, dtype="float32"))
    value = DeferredValue(initializer, SHAPE, "float32")
    assert value.fill is None
    rows = rows_of(value)
    # One program scales normal numbers by one factor, Keras' two by two; without XLA's optimizations they are
    # four last places of float32 apart.
    quick = "optimization_level=0" in os.environ["XLA_FLAGS"]
    close = {"rtol": 0 if "Uniform" in type(initializer).__name__ else 5e-7 if quick else 2e-7}
    np.testing.assert_allclose(made(rows, 0, 100), whole[:100], **close)
    np.testing.assert_allclose(made(rows, 30_000, 40_000), whole[30_000:], **close)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_types(dtype):
    initializer = K.RandomUniform(seed=3)
    whole = np.asarray(initializer(SHAPE, dtype=dtype))
    np.testing.assert_array_equal(
        made(rows_of(DeferredValue(initializer, SHAPE, dtype)), 69_000, 1000), whole[69_000:]
    )


@pytest.mark.parametrize(("initializer", "fill"), [(K.Zeros(), 0), (K.Ones(), 1), (K.Constant(0.25), 0.25)])
def test_constants_are_numbers(initializer, fill):
    assert DeferredValue(initializer, SHAPE, "float32").fill == fill


def test_what_cannot_be_made_by_rows_is_made_as_a_whole():
    value = DeferredValue(K.Orthogonal(seed=1), (64, 32), "float32")
    assert rows_of(value) is None
    np.testing.assert_array_equal(value.whole(), K.Orthogonal(seed=1)((64, 32)))


def test_large_variables_of_a_cluster_are_made_later(monkeypatch):
    monkeypatch.setattr(_push_layout, "MADE_LATER", 1000)
    from tests.virtual.parameter_server.chief._dict_cluster import DictStrategy

    with DictStrategy().scope():
        large = keras.Variable(K.RandomUniform(seed=3), shape=(100, 16), dtype="float32")
        small = keras.Variable(K.RandomUniform(seed=3), shape=(10, 16), dtype="float32")
        drawn = keras.Variable(
            K.RandomUniform(seed=keras.random.SeedGenerator(3)), shape=(100, 16), dtype="float32"
        )
        given = keras.Variable(np.zeros((100, 16), "float32"))
        own = keras.Variable(lambda shape, dtype: jax.numpy.ones(shape, dtype), shape=(100, 16))
    assert isinstance(stored_value(large), DeferredValue)
    assert not any(isinstance(stored_value(v), DeferredValue) for v in (small, drawn, given, own))
    assert (large.shape, large.dtype) == ((100, 16), "float32")
    # Read as any other, and assigned.
    np.testing.assert_array_equal(large.numpy(), K.RandomUniform(seed=3)((100, 16)))
    large.assign(np.ones((100, 16)))
    np.testing.assert_array_equal(large.numpy(), np.ones((100, 16)))
    with unisono.OneDeviceStrategy("cpu:0").scope():
        other = keras.Variable(K.RandomUniform(seed=3), shape=(100, 16), dtype="float32")
    assert not isinstance(stored_value(other), DeferredValue)
