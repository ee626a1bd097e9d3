"""Layers with states of all kinds, and layers that add losses."""

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tests.random_models.layers import WIDTH

ops = keras.ops


class State(keras.Layer):
    """A layer with a state.

    Args:
        start: the first value of the state.
        new: from the state and the input to the new state.
        use: from the input, the state before and after to the output; None for the input.
        in_training: whether the state is written in training alone.
    """

    def __init__(self, start, new, use=None, in_training=False):
        super().__init__()
        # A program may be given the memory of a variable's first value.
        start = np.asarray(start)
        self._new, self._use, self._in_training = new, use, in_training
        self.state = self.add_weight(
            shape=start.shape,
            dtype=str(start.dtype),
            initializer=lambda shape, dtype: jnp.asarray(start, dtype),
            trainable=False,
            name="state",
        )

    def call(self, x, training=False):
        before = self.state.value
        after = before
        if training or not self._in_training:
            after = ops.cast(self._new(before, x), before.dtype)
            self.state.assign(after)
        return x if self._use is None else self._use(x, before, after)


class CodeBook(keras.Layer):
    """Vector quantization: codes that follow the means of the rows nearest to them."""

    def __init__(self):
        super().__init__()
        kinds = {"codes": "random_normal", "counts": "ones", "sums": "random_normal"}
        shapes = {"codes": (3, WIDTH), "counts": (3,), "sums": (3, WIDTH)}
        for name, kind in kinds.items():
            setattr(self, name, self.add_weight(shapes[name], kind, trainable=False, name=name))

    def call(self, x, training=False):
        distances = ops.sum(ops.square(x[:, None] - self.codes[None]), axis=-1)
        hot = ops.one_hot(ops.argmin(distances, axis=1), 3)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(hot, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.transpose(hot) @ x)
            self.codes.assign(self.sums / (self.counts[:, None] + 1e-2))
        quantized = hot @ self.codes
        self.add_loss(0.1 * ops.mean(ops.square(x - ops.stop_gradient(quantized))))
        return x + ops.stop_gradient(0.5 * (quantized - x))


class Ring(keras.Layer):
    """A memory of rows with a pointer to the next place, and a loss of the distance to what it holds."""

    def __init__(self):
        super().__init__()
        self.memory = self.add_weight((64, WIDTH), "random_normal", trainable=False, name="memory")
        self.place = self.add_weight((), "zeros", dtype="int32", trainable=False, name="place")

    def call(self, x, training=False):
        self.add_loss(0.1 * ops.mean(ops.logsumexp(x @ ops.transpose(self.memory), axis=-1)))
        if training:
            places = (self.place.value + jnp.arange(x.shape[0])) % 64
            self.memory.assign(self.memory.value.at[places].set(jax.lax.stop_gradient(x)))
            self.place.assign((self.place + x.shape[0]) % 64)
        return x


ZERO, ZEROS, COUNT = jnp.float32(0), jnp.zeros(WIDTH), jnp.int32(0)


def rows(x):
    return ops.shape(x)[0]


def classes(x):
    return ops.argmax(x, axis=-1)


def bins(x):
    return ops.cast(ops.clip(2 * ops.reshape(x, (-1,)) + 2, 0, 4), "int32")


def queue(s, x):
    return ops.concatenate([x, s], axis=0)[:5]


#: States, by name.
STATES = {
    "largest": lambda: State(-9 * jnp.ones(()), lambda s, x: ops.maximum(s, ops.max(x))),
    "smallest of features": lambda: State(9 * jnp.ones(WIDTH), lambda s, x: ops.minimum(s, ops.min(x, 0))),
    "largest size": lambda: State(ZERO, lambda s, x: ops.maximum(s, ops.max(ops.abs(x)))),
    "steps": lambda: State(COUNT, lambda s, x: s + 1),
    "rows": lambda: State(COUNT, lambda s, x: s + rows(x)),
    "float rows": lambda: State(ZERO, lambda s, x: s + ops.cast(rows(x), "float32")),
    "positive": lambda: State(COUNT, lambda s, x: s + ops.sum(ops.cast(x > 0, "int32"))),
    "float positive": lambda: State(ZERO, lambda s, x: s + ops.sum(ops.cast(x > 0, "float32"))),
    "scattered classes": lambda: State(jnp.zeros(WIDTH), lambda s, x: s.at[classes(x)].add(1.0)),
    "integer classes": lambda: State(jnp.zeros(WIDTH, "int32"), lambda s, x: s.at[classes(x)].add(1)),
    "hot classes": lambda: State(ZEROS, lambda s, x: s + ops.sum(ops.one_hot(classes(x), WIDTH), 0)),
    "bins": lambda: State(ZEROS, lambda s, x: s + jnp.bincount(classes(x), length=WIDTH).astype("float32")),
    "mean": lambda: State(ZEROS, lambda s, x: 0.9 * s + 0.1 * ops.mean(x, axis=0)),
    "moved mean": lambda: State(ZEROS, lambda s, x: s + 0.1 * (ops.mean(x, axis=0) - s)),
    "sum": lambda: State(ZEROS, lambda s, x: 0.9 * s + 0.1 * ops.sum(x, axis=0)),
    "of the largest": lambda: State(ZERO, lambda s, x: 0.9 * s + 0.1 * ops.max(x)),
    "minus the largest": lambda: State(ZERO, lambda s, x: 0.9 * s - 0.1 * ops.max(x)),
    "queue": lambda: State(jnp.zeros((5, WIDTH)), queue),
    "used queue": lambda: State(
        jnp.zeros((5, WIDTH)), queue, lambda x, s, _: x + 0.1 * ops.softmax(x @ s.T) @ s
    ),
    "assigned sum": lambda: State(ZEROS, lambda s, x: ops.sum(x, axis=0)),
    "assigned mean": lambda: State(ZEROS, lambda s, x: ops.mean(x, axis=0), lambda x, s, _: x - 0.5 * s),
    "assigned and used": lambda: State(ZEROS, lambda s, x: ops.mean(x, axis=0), lambda x, _, s: x - 0.5 * s),
    "used mean": lambda: State(ZEROS, lambda s, x: 0.9 * s + 0.1 * ops.mean(x, 0), lambda x, s, _: x - s),
    "used largest": lambda: State(
        ZERO, lambda s, x: ops.maximum(s, ops.max(x)), lambda x, s, _: x / (1 + s * s)
    ),
    "used count": lambda: State(ZERO, lambda s, x: s + rows(x), lambda x, s, _: x / (1 + 0.01 * s)),
    "in training": lambda: State(ZEROS, lambda s, x: 0.9 * s + 0.1 * ops.mean(x, axis=0), None, True),
    "count in training": lambda: State(COUNT, lambda s, x: s + rows(x), None, True),
    "ever seen": lambda: State(jnp.zeros(WIDTH, bool), lambda s, x: ops.logical_or(s, ops.any(x > 1, 0))),
    "always": lambda: State(jnp.ones(WIDTH, bool), lambda s, x: ops.logical_and(s, ops.all(x > -2, 0))),
    "seen by a number": lambda: State(jnp.zeros((), bool), lambda s, x: ops.max(x) > 1.0),
    "largest is over": lambda: State(jnp.zeros(()), lambda s, x: ops.cast(ops.max(x) > 0.5, "float32")),
    "seen by a sum": lambda: State(
        jnp.zeros(WIDTH, bool), lambda s, x: jax.lax.convert_element_type(ops.max(x, 0), bool)
    ),
    "root of the largest": lambda: State(ZERO, lambda s, x: ops.log(ops.max(x[:, 0] - 0.3))),
    "variance": lambda: State(ZERO, lambda s, x: 0.9 * s + 0.1 * ops.var(x)),
    "root": lambda: State(ZERO, lambda s, x: ops.sqrt(ops.mean(ops.square(x)))),
    "last row": lambda: State(ZEROS, lambda s, x: x[-1]),
    "first row": lambda: State(ZEROS, lambda s, x: x[0]),
    "product": lambda: State(jnp.ones(()), lambda s, x: s * ops.tanh(ops.sum(x))),
    "less": lambda: State(ZERO, lambda s, x: s - ops.sum(x)),
    "turned": lambda: State(ZERO, lambda s, x: ops.sum(x) - s),
    "share": lambda: State(ZERO, lambda s, x: ops.mean(ops.cast(x > 0, "float32"))),
    "norm": lambda: State(ZERO, lambda s, x: ops.max(ops.norm(x, axis=-1)) * 2.0 + 1.0),
    "two": lambda: State(jnp.zeros(2), lambda s, x: ops.stack([ops.max(x), ops.min(x)])),
    "two sums": lambda: State(jnp.zeros(2), lambda s, x: s + ops.stack([ops.sum(x), ops.sum(ops.abs(x))])),
    "concatenated": lambda: State(jnp.zeros(2), lambda s, x: ops.stack([ops.sum(x), ops.mean(x)])),
    "covariance": lambda: State(
        jnp.zeros((WIDTH, WIDTH)), lambda s, x: 0.9 * s + 0.1 * ops.transpose(x) @ x / rows(x)
    ),
    "integer mean": lambda: State(COUNT, lambda s, x: ops.cast(ops.mean(10 * x), "int32")),
    "rounded sum": lambda: State(COUNT, lambda s, x: s + ops.cast(ops.sum(x), "int32")),
    "parity": lambda: State(COUNT, lambda s, x: (s + ops.sum(ops.cast(x > 0, "int32"))) % 7),
    "largest class": lambda: State(
        COUNT, lambda s, x: ops.maximum(s, ops.max(ops.cast(classes(x), "int32")))
    ),
    "small counter": lambda: State(jnp.uint8(250), lambda s, x: s + ops.cast(rows(x), "uint8")),
    "largest by class": lambda: State(jnp.zeros(WIDTH), lambda s, x: s.at[classes(x)].max(ops.max(x, -1))),
    "last by class": lambda: State(jnp.zeros(WIDTH), lambda s, x: s.at[classes(x)].set(ops.max(x, -1))),
    "clipped largest": lambda: State(ZERO, lambda s, x: ops.clip(ops.max(x), -1.0, 1.0)),
    "code book": CodeBook,
    "ring": Ring,
    "bins of values": lambda: State(
        jnp.zeros(5, "int32"), lambda s, x: s + ops.sum(ops.one_hot(bins(x), 5, dtype="int32"), axis=0)
    ),
    "range": lambda: State(
        ZERO, lambda s, x: 0.9 * s + 0.1 * ops.max(ops.abs(x)), lambda x, s, _: x / (1.0 + s)
    ),
}


class Loss(keras.Layer):
    """Adds a loss of its input."""

    def __init__(self, fn):
        super().__init__()
        self._fn = fn

    def call(self, x):
        self.add_loss(self._fn(x))
        return x


def pairs_loss(x):
    return 0.01 * ops.mean(ops.square(x @ ops.transpose(x)))


#: Losses that layers add.
ADDED = {
    "mean": lambda x: 0.1 * ops.mean(ops.square(x)),
    "sum": lambda x: 0.01 * ops.sum(ops.square(x)),
    "sum over rows": lambda x: 0.1 * ops.sum(ops.abs(x)) / ops.cast(rows(x), "float32"),
    "each row": lambda x: 0.01 * ops.sum(ops.square(x), axis=-1),
    "root": lambda x: 0.1 * ops.sqrt(0.1 + ops.mean(ops.square(x))),
    "norm": lambda x: 0.1 * ops.norm(x),
    "pairs": pairs_loss,
    "largest": lambda x: 0.1 * ops.max(x),
    "two": lambda x: 0.1 * ops.mean(x) + 0.01 * ops.sum(ops.abs(x)),
    "entropy": lambda x: (
        0.1 * ops.sum(ops.mean(ops.softmax(x), axis=0) * ops.log(ops.mean(ops.softmax(x), axis=0)))
    ),
    "squared mean": lambda x: 0.1 * ops.square(ops.mean(x)),
    "constant": lambda x: ops.ones(()) * 0.3,
}
