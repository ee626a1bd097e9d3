"""Programs as the chief exports them, without Keras."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from unisono.parameter_server.server._programs import digest_of


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def blob(function, *specs, **options):
    return bytes(jax.export.export(jax.jit(function), **options)(*specs).serialize())


def momentum(values, slots, gradients):
    """v = 0.5 v + g; w -= rate v; slots are the rate, a counter, and a velocity for each value."""
    rate, count, *velocities = slots
    velocities = [0.5 * v + g for v, g in zip(velocities, gradients, strict=True)]
    values = [w - rate * v for w, v in zip(values, velocities, strict=True)]
    return values, [rate, count + 1, *velocities]


@functools.cache
def momentum_blob(*shapes):
    like = [spec(*s) for s in shapes]
    return blob(momentum, like, [spec(), spec(dtype="int32"), *like], like)


@functools.cache
def momentum_rows_blob(width):
    """For any number of rows of tables of this width."""
    (n,) = jax.export.symbolic_shape("n")
    rows = [spec(n, width)]
    return blob(momentum, rows, [spec(), spec(dtype="int32"), *rows], rows)


@functools.cache
def ramp_blob(rows, width):
    """An initializer of tables: each row is its own number."""

    def ramp(begin):
        return jnp.broadcast_to((begin + jnp.arange(rows, dtype="float32"))[:, None], (rows, width))

    return blob(ramp, spec(dtype="int32"))


def by_hand(values, velocities, gradients, rate=0.1):
    """The same as `momentum` in NumPy; changes the lists."""
    for i, g in enumerate(gradients):
        velocities[i] = np.float32(0.5) * velocities[i] + g
        values[i] = values[i] - np.float32(rate) * velocities[i]


digest = functools.cache(digest_of)
