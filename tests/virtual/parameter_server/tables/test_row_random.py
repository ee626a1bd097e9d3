"""Random numbers of some rows are those of the whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono.parameter_server.tables._row_values import NotByRowsError, _times, random_rows

NUMBERS = jnp.array([6, 0, 3, 3])


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("shape", [(7,), (7, 5), (7, 2, 3), (7, 0)])
def test_bits_are_those_of_the_whole_array(bits, shape):
    key = jax.random.key(11)
    whole = jax.random.bits(key, shape, f"uint{bits}")
    np.testing.assert_array_equal(random_rows(key, NUMBERS, shape, bits), whole[NUMBERS])


def test_bits_of_64():
    with jax.enable_x64(True):
        key = jax.random.key(11)
        whole = jax.random.bits(key, (7, 3), "uint64")
        np.testing.assert_array_equal(random_rows(key, NUMBERS, (7, 3), 64), whole[NUMBERS])


def test_positions_beyond_32_bits():
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 1 << 32, 50, dtype="uint32")
    for factor in (1, 16, 65535, 65536, 1 << 20, (1 << 31) - 1):
        high, low = _times(jnp.asarray(numbers), factor)
        found = np.asarray(high, "uint64") << np.uint64(32) | np.asarray(low, "uint64")
        np.testing.assert_array_equal(found, numbers.astype("uint64") * np.uint64(factor))


def test_generators_whose_bits_depend_on_the_shape_are_refused():
    with pytest.raises(NotByRowsError, match="depend on its shape"):
        random_rows(jax.random.key(1, impl="rbg"), NUMBERS, (7, 3), 32)
