"""Layers of all kinds of dependence between rows: Keras' own, functions of users, states and added losses.

An input is a `vector` (6 numbers), a `series` (4 x 6), an `image` (5 x 5 x 2) or `tokens` (5 integers).
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np

import unisono

L, ops = keras.layers, keras.ops
WIDTH, CLASSES, VOCABULARY = 6, 4, 8


class Function(keras.Layer):
    """A layer of a function without weights."""

    def __init__(self, fn, **kwargs):
        super().__init__(**kwargs)
        self._fn = fn

    def call(self, x):
        return self._fn(x)


class OfSizes(Function):
    """A function that keeps the shape of its input, and asks for the number of rows: not known to Keras."""

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class NoMask(keras.Layer):
    """Passes its input and drops the mask."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, x):
        return x

    def compute_mask(self, inputs, mask=None):
        return None


@jax.custom_vjp
def scaled_by_gradients(x):
    """The identity, whose gradient is divided by its norm over all rows."""
    return x


scaled_by_gradients.defvjp(lambda x: (x, None), lambda _, g: (g / (1e-2 + jnp.sqrt(jnp.sum(g * g))),))


@jax.custom_vjp
def reversed_gradients(x):
    """The identity, whose gradient is turned."""
    return x


reversed_gradients.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@jax.custom_jvp
def clipped(x):
    """The identity, with a derivative of its own for each entry."""
    return x * 1.0


clipped.defjvps(lambda t, out, x: t * (jnp.abs(x) < 1.0))


def rolled_in_a_loop(x):
    return jax.lax.fori_loop(0, 2, lambda i, v: 0.5 * v + 0.5 * jnp.tanh(v), x)


def chosen_features(x):
    return ops.take_along_axis(x, ops.argsort(-x, axis=-1)[:, ::-1], axis=-1)


#: Functions of vectors of which each row's result depends on this row alone.
APART = {
    "tanh": ops.tanh,
    "unit length": lambda x: x / (0.1 + ops.norm(x, axis=-1, keepdims=True)),
    "softmax": lambda x: ops.softmax(x, axis=-1),
    "sorted features": lambda x: ops.sort(x, axis=-1),
    "sorted by index": chosen_features,
    "top two": lambda x: ops.concatenate([ops.top_k(x, 2)[0], x[:, 2:]], axis=-1),
    "cumulated features": lambda x: 0.3 * ops.cumsum(x, axis=1),
    "matrix": lambda x: x @ (0.1 * jnp.arange(WIDTH * WIDTH, dtype="float32").reshape(WIDTH, WIDTH) % 0.7),
    "einsum": lambda x: ops.einsum("bi,bj->bij", x, x)[:, 0] * 0.3 + x,
    "where": lambda x: ops.where(x > 0, x, 0.1 * x),
    "vmap": jax.vmap(lambda row: jnp.tanh(row) * jnp.sum(row * row) * 0.1),
    "scan over features": lambda x: jnp.moveaxis(
        jax.lax.scan(lambda c, v: (0.5 * c + v,) * 2, x[:, 0], x.T)[1], 0, 1
    ),
    "associative scan": lambda x: jax.lax.associative_scan(lambda a, b: 0.5 * a + b, x, axis=1),
    "loop": rolled_in_a_loop,
    "spectrum": lambda x: jnp.abs(jnp.fft.fft(x, axis=-1)) * 0.3,
    "moments": lambda x: (x - ops.mean(x, -1, keepdims=True)) / (0.5 + ops.std(x, axis=-1, keepdims=True)),
    "hot": lambda x: x + 0.2 * ops.one_hot(ops.argmax(x, axis=-1), WIDTH),
    "table": lambda x: x + 0.1 * ops.take(jnp.arange(float(WIDTH)), ops.argmax(x, -1))[:, None],
    "reshaped": lambda x: ops.reshape(ops.transpose(ops.reshape(x, (-1, 2, 3)), (0, 2, 1)), (-1, WIDTH)),
    "turned features": lambda x: ops.roll(x, 1, axis=1) + 0.2 * ops.flip(x, axis=1),
    "padded": lambda x: ops.pad(x[:, 1:-1], ((0, 0), (1, 1)), constant_values=0.5),
    "tiled": lambda x: ops.tile(x[:, :2], (1, 3)),
    "repeated": lambda x: ops.repeat(x[:, :3], 2, axis=1),
    "split": lambda x: ops.concatenate(ops.split(x, 3, axis=1)[::-1], axis=1),
    "stacked": lambda x: ops.max(ops.stack([x, -x, 0.5 * x], axis=0), axis=0),
    "unstacked": lambda x: ops.stack(ops.unstack(x, axis=1)[::-1], axis=1),
    "logsumexp": lambda x: x - ops.logsumexp(x, axis=-1, keepdims=True),
    "straight through": lambda x: x + ops.stop_gradient(ops.round(x) - x),
    "searched": lambda x: x + 0.1 * jnp.searchsorted(jnp.array([-1.0, 0.0, 1.0]), x).astype("float32"),
    "histogram of features": lambda x: (
        x
        + 0.05
        * jax.vmap(lambda r: jnp.zeros(WIDTH).at[jnp.clip(jnp.abs(r) * 2, 0, 5).astype("int32")].add(1.0))(x)
    ),
    "written": lambda x: x.at[:, 1].set(x[:, 0] * 0.5),
    "multiplied": lambda x: x.at[:, 2].mul(0.5),
    "sliced": lambda x: ops.slice_update(x, (0, 1), 0.5 * x[:, 2:4]),
    "own matrices": lambda x: (
        x + 0.1 * jnp.linalg.det(jnp.eye(2) + 0.1 * x[:, :4].reshape(-1, 2, 2))[:, None]
    ),
    "solved": lambda x: (
        x
        + 0.1
        * jnp.linalg.solve(2 * jnp.eye(2) + 0.1 * x[:, :4].reshape(-1, 2, 2), x[:, 4:, None]).reshape(-1, 2)[
            :, :1
        ]
    ),
    "branch": lambda x: jax.lax.cond(jnp.float32(1.0) > 0, jnp.tanh, lambda v: v, x),
    "windows": lambda x: ops.average_pool(x[..., None], 2, 1, padding="same")[..., 0],
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "turned gradient": reversed_gradients,
    "own derivative": clipped,
    "no gradient": lambda x: x + ops.stop_gradient(0.1 * x),
    "rows of the batch": lambda x: ops.reshape(x, (ops.shape(x)[0], 2, 3)).reshape(-1, WIDTH),
    "log softplus": lambda x: ops.log(1e-3 + ops.softplus(x)),
    "erf": lambda x: ops.erf(x) + ops.relu6(x) * 0.1,
    "flattened": lambda x: ops.reshape(ops.tanh(ops.reshape(x, (-1,))), (-1, WIDTH)),
    "nan to zero": lambda x: ops.nan_to_num(ops.where(x > 5, jnp.nan, x)),
    "quantile": lambda x: x - ops.quantile(x, 0.5, axis=-1, keepdims=True),
    "median": lambda x: x - ops.median(x, axis=-1, keepdims=True),
    "ones of the batch": lambda x: x + 0.1 * ops.ones((ops.shape(x)[0], 1)),
    "power": lambda x: ops.sign(x) * ops.power(ops.abs(x) + 0.1, 0.7),
}


def minibatch_deviation(x):
    return ops.concatenate([x[:, 1:], ops.zeros_like(x[:, :1]) + ops.mean(ops.std(x, axis=0))], axis=1)


def nearest(x):
    distances = ops.sum(ops.square(x[:, None] - x[None]), axis=-1)
    return x - 0.3 * ops.take(x, ops.argmin(distances + 1e3 * ops.eye(ops.shape(x)[0]), axis=1), axis=0)


def shuffled(x):
    return 0.7 * x + 0.3 * jnp.take(x, jax.random.permutation(jax.random.key(3), x.shape[0]), axis=0)


def sorted_batch(x):
    return x[ops.argsort(x[:, 0])]


def cumulated_rows(x):
    return 0.2 * jax.lax.scan(lambda c, v: (0.5 * c + v,) * 2, jnp.zeros(WIDTH), x)[1]


def numbered(x):
    return x + 0.05 * ops.cast(ops.arange(ops.shape(x)[0]), "float32")[:, None]


def in_groups(x):
    """Center groups of rows, as "ghost" normalization does: of four, or two, or of all."""
    size = next((n for n in (4, 2) if x.shape[0] % n == 0), x.shape[0])
    groups = ops.reshape(x, (-1, size, x.shape[1]))
    return ops.reshape(groups - ops.mean(groups, axis=1, keepdims=True), x.shape)


def of_group_means(x):
    """The deviation within groups of rows that stand apart, as in StyleGAN's discriminator."""
    size = next(n for n in (4, 3, 2, 1) if x.shape[0] % n == 0)
    groups = ops.reshape(x, (size, -1, x.shape[1]))
    return x - ops.tile(ops.mean(groups, axis=0), (size, 1))


def few_rows_centered(x):
    return ops.tanh(x) if x.shape[0] > 6 else x - ops.mean(x, axis=0)


def dispatched(x):
    """Two experts that take so many rows each, in the order of the batch."""
    hot = ops.one_hot(ops.cast(x[:, 0] > 0, "int32"), 2)
    place = ops.sum(ops.cumsum(hot, axis=0) * hot, axis=1)
    taken = ops.cast(place <= int(0.6 * x.shape[0]) + 1, "float32")[:, None]
    return x + 0.3 * taken * (hot[:, :1] * ops.tanh(x) - hot[:, 1:] * x)


def hardest(x):
    """Rows move towards those that are farthest from them."""
    distances = ops.sum(ops.square(x[:, None] - x[None]), axis=-1)
    return 0.8 * x + 0.2 * ops.take(x, ops.argmax(distances, axis=1), axis=0)


def balanced(x):
    """Sinkhorn's assignment of rows to features."""
    found = ops.exp(ops.tanh(x))
    for _ in range(3):
        found = found / ops.sum(found, axis=0, keepdims=True)
        found = found / ops.sum(found, axis=1, keepdims=True)
    return x * found


def whitened(x):
    centered = x - ops.mean(x, axis=0)
    covariance = ops.transpose(centered) @ centered / ops.cast(ops.shape(x)[0], "float32")
    factor = ops.cholesky(covariance + 0.5 * ops.eye(WIDTH))
    return ops.transpose(ops.solve_triangular(factor, ops.transpose(centered), lower=True))


#: More entries than a batch has rows.
TABLE = np.random.default_rng(0).normal(size=(48, WIDTH)).astype("float32")


def added(values):
    """Add what a function returns for a number of rows."""
    return lambda x: x + 0.3 * values(x.shape[0])


def segments(x):
    """The deviation within neighbouring rows, four each."""
    numbers = jnp.arange(x.shape[0]) // 4
    sums = jax.ops.segment_sum(x, numbers, x.shape[0] // 4 + 1)
    return x - 0.2 * sums[numbers]


#: Functions of vectors that compute numbers of rows in different ways.
OF_SIZES = {
    "groups": in_groups,
    "groups apart": of_group_means,
    "few rows": few_rows_centered,
    "capacity": dispatched,
    "segments": segments,
    "table": added(lambda rows: jnp.asarray(TABLE)[:rows]),
    "end of a table": added(lambda rows: jnp.asarray(TABLE)[-rows:]),
    "every third of a table": added(lambda rows: jnp.tile(jnp.asarray(TABLE), (3, 1))[: 3 * rows : 3]),
    "table by numbers": added(lambda rows: jnp.asarray(TABLE)[jnp.arange(rows) * 5 % 48]),
    "slice of a table": added(lambda rows: jax.lax.dynamic_slice_in_dim(jnp.asarray(TABLE), 3, rows)),
    "largest of a table": added(lambda rows: jax.lax.top_k(jnp.asarray(TABLE[:, 0]), rows)[0][:, None]),
    "split table": added(lambda rows: jnp.split(jnp.asarray(TABLE), [rows])[0]),
    "table of another size": added(lambda rows: jax.image.resize(TABLE[:8], (rows, WIDTH), "linear")),
    "table in the rows' order": added(lambda rows: jnp.resize(jnp.asarray(TABLE[:5]), (rows, WIDTH))),
    "matrix of rows": lambda x: 0.5 * x + 0.1 * jnp.asarray(TABLE @ TABLE.T)[: len(x), : len(x)] @ x,
    "triangle": lambda x: jnp.tril(jnp.ones((len(x), len(x)))) @ x / len(x),
    "shifted": lambda x: jnp.concatenate([jnp.asarray(TABLE[:1]), x])[:-1],
    "shifted back": lambda x: jnp.concatenate([jnp.asarray(TABLE[:3]), x])[3:],
    "padded rows": lambda x: jnp.pad(x, ((0, -len(x) % 16), (0, 0)))[: len(x)],
    "window": lambda x: x * (0.5 + jnp.hanning(x.shape[0] + 2)[1:-1, None]),
    "distances": added(lambda rows: jnp.linspace(0.0, 1.0, rows)[:, None]),
    "odd rows": added(lambda rows: (jnp.arange(rows) & 1).astype("float32")[:, None]),
    "last rows": lambda x: jnp.where((jnp.arange(x.shape[0]) < x.shape[0] // 2)[:, None], x, 0.5 * x),
    "power": lambda x: x * jnp.float32(0.95) ** x.shape[0],
    "product": lambda x: x * jnp.prod(jnp.full((x.shape[0],), 0.95)),
    "loop": lambda x: jax.lax.fori_loop(0, x.shape[0], lambda i, v: 0.95 * v + 0.01, x),
    "scan": lambda x: jax.lax.scan(lambda v, _: (0.95 * v + 0.01, None), x, length=x.shape[0])[0],
    "while": lambda x: jax.lax.while_loop(
        lambda s: s[0] < x.shape[0], lambda s: (s[0] + 1, 0.95 * s[1]), (0, x)
    )[1],
    "divisible": lambda x: jnp.where(jnp.int32(x.shape[0]) % 4 == 0, x, 0.5 * x),
    "integers": lambda x: x * (1 + jnp.sum(jnp.ones(x.shape[0], "int32") * 3 // 2) // 5),
    "harmonic": lambda x: x * jnp.sum(1.0 / (1.0 + jnp.arange(x.shape[0]))),
    "logarithm": lambda x: x / jnp.log(1.0 + jnp.float32(x.shape[0])),
    "length of a table": lambda x: x / jnp.linalg.norm(jnp.asarray(TABLE)[: x.shape[0]]),
    "mean of a table": lambda x: x - jnp.mean(jnp.asarray(TABLE)[: x.shape[0]], axis=0),
    "diagonal": lambda x: x + 0.1 * jnp.diagonal(x @ x.T)[:, None],
    "trace": lambda x: x * jnp.tanh(0.1 * jnp.trace(jnp.eye(x.shape[0]))),
    "sorted table": added(lambda rows: jnp.sort(jnp.asarray(TABLE)[:rows], axis=0)),
    "cumulated table": added(lambda rows: jnp.cumsum(jnp.asarray(TABLE)[:rows], axis=0) * 0.1),
    "written table": added(lambda rows: jnp.asarray(TABLE).at[:rows].set(0.0)[:rows] + 0.1),
    "rows written to a table": lambda x: jnp.asarray(TABLE).at[: len(x)].add(x)[: len(x)],
    "first rows written": lambda x: x.at[:2].multiply(0.5),
    "spectrum of positions": added(lambda rows: jnp.sin(jnp.arange(rows) / rows)[:, None]),
    "random table": added(lambda rows: jax.random.normal(jax.random.key(4), (48, WIDTH))[:rows]),
    "bins": lambda x: x + 0.1 * jnp.bincount(jnp.arange(x.shape[0]) % 3, length=3)[0] / 10,
}

#: Functions of vectors of which the rows matter to each other.
MIXING = {
    "centered": lambda x: x - ops.mean(x, axis=0),
    "scaled": lambda x: x / (0.5 + ops.std(x, axis=0)),
    "softmax over rows": lambda x: ops.softmax(x, axis=0),
    "pairs": lambda x: ops.softmax(x @ ops.transpose(x), axis=1) @ x,
    "sorted rows": lambda x: ops.sort(x, axis=0),
    "sorted batch": sorted_batch,
    "rolled rows": lambda x: 0.5 * (x + ops.roll(x, 1, axis=0)),
    "flipped rows": lambda x: 0.5 * x + 0.5 * ops.flip(x, axis=0),
    "cumulated rows": lambda x: 0.2 * ops.cumsum(x, axis=0),
    "scan over rows": cumulated_rows,
    "largest row": lambda x: x - ops.max(x, axis=0),
    "length of the batch": lambda x: x / (0.1 + ops.norm(x)),
    "first row": lambda x: x - x[:1],
    "times rows": lambda x: 0.1 * x * ops.cast(ops.shape(x)[0], "float32"),
    "numbered": numbered,
    "minibatch deviation": minibatch_deviation,
    "nearest": nearest,
    "shuffled": shuffled,
    "drawn for the batch": lambda x: (
        x * jax.random.uniform(jax.random.key(1), (1, WIDTH)) + 0 * ops.mean(x, 0)
    ),
    "fixed noise": lambda x: x + 0.3 * jax.random.normal(jax.random.key(2), x.shape),
    "fixed noise of Keras": lambda x: x + 0.3 * keras.random.normal(ops.shape(x), seed=5),
    "gradient of the batch": scaled_by_gradients,
    "covariance": lambda x: x @ (ops.transpose(x) @ x) / ops.cast(ops.shape(x)[0], "float32"),
    "mean of the positive": lambda x: (
        x - ops.sum(ops.relu(x), 0) / (1.0 + ops.sum(ops.cast(x > 0, "float32"), 0))
    ),
    "whitened": lambda x: x - ops.mean(x, axis=0) * jax.lax.cond(jnp.sum(x) > 0, lambda: 1.0, lambda: 0.5),
    "batched in pairs": lambda x: (
        x + 0.2 * ops.concatenate([x[ops.shape(x)[0] // 2 :], x[: ops.shape(x)[0] // 2]])
    ),
    "product of rows": lambda x: x * ops.tanh(ops.prod(x, axis=0)),
    "any row": lambda x: ops.where(ops.any(x > 1.5, axis=0), x, 0.5 * x),
    "dimension": lambda x: ops.transpose(ops.softmax(ops.transpose(x), axis=-1)),
    "hardest": hardest,
    "balanced": balanced,
    "decorrelated": whitened,
}


class Noise(keras.Layer):
    """Draws numbers in training."""

    def __init__(self, kind):
        super().__init__()
        self._kind = kind
        self.draws = keras.random.SeedGenerator(7)

    def call(self, x, training=False):
        if not training:
            return x
        match self._kind:
            case "normal":
                return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.draws)
            case "factor of the batch":
                return x * keras.random.uniform((), 0.8, 1.2, seed=self.draws)
            case "batch shuffle":
                return 0.6 * x + 0.4 * keras.random.shuffle(x, axis=0, seed=self.draws)
            case "mixup":
                return x + keras.random.uniform((ops.shape(x)[0], 1), seed=self.draws) * ops.flip(x, axis=0)
        raise ValueError(self._kind)


#: Layers that draw numbers; the last ones relate rows, too.
DRAWING = {
    "dropout": lambda: L.Dropout(0.3),
    "gaussian noise": lambda: L.GaussianNoise(0.2),
    "gaussian dropout": lambda: L.GaussianDropout(0.2),
    "one mask for all": lambda: L.Dropout(0.3, noise_shape=(1, WIDTH)),
    **{
        name: (lambda name=name: Noise(name))
        for name in ("normal", "factor of the batch", "batch shuffle", "mixup")
    },
}

#: Batch normalization in its forms: `synchronized`, frozen and called for inference are as on one device.
NORMALIZING = {
    "batch norm": lambda: L.BatchNormalization(),
    # Without a strategy Keras has no such layer on JAX, and rows are all there.
    "synchronized": lambda: L.BatchNormalization(**{"synchronized": True} if unisono.has_strategy() else {}),
    "frozen": lambda: L.BatchNormalization(trainable=False),
    "for inference": lambda: lambda x: L.BatchNormalization()(x, training=False),
}

#: Keras' own layers of vectors.
VECTOR = {
    "dense": lambda: L.Dense(WIDTH, activation="tanh"),
    "relu": lambda: L.Dense(WIDTH, activation="relu"),
    "regularized": lambda: L.Dense(WIDTH, kernel_regularizer="l2", activity_regularizer="l2"),
    "layer norm": lambda: L.LayerNormalization(),
    "rms norm": lambda: L.RMSNormalization(),
    "spectral": lambda: L.SpectralNormalization(L.Dense(WIDTH)),
    "prelu": lambda: L.PReLU(),
    "unit norm": lambda: L.UnitNormalization(),
    "activity": lambda: L.ActivityRegularization(l1=0.01, l2=0.02),
    "lambda": lambda: L.Lambda(lambda x: x * 0.5 + 0.1),
    "wide": lambda: keras.Sequential([L.Dense(40, activation="gelu"), L.Dense(WIDTH)]),
    "residual": lambda: lambda x: L.Add()([x, L.Dense(WIDTH)(x)]),
    "gated": lambda: lambda x: L.Multiply()([x, L.Dense(WIDTH, "sigmoid")(x)]),
}


def attended(x):
    return L.MultiHeadAttention(2, 3)(x, x)


def attended_causally(x):
    return L.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)


#: Layers of series, which stay series.
SERIES = {
    "conv1d": lambda: L.Conv1D(WIDTH, 2, padding="same"),
    "lstm": lambda: L.LSTM(WIDTH, return_sequences=True),
    "bidirectional": lambda: L.Bidirectional(L.GRU(3, return_sequences=True)),
    "attention": lambda: attended,
    "causal attention": lambda: attended_causally,
    "time distributed": lambda: L.TimeDistributed(L.Dense(WIDTH)),
    "group norm": lambda: L.GroupNormalization(2),
    "spatial dropout": lambda: L.SpatialDropout1D(0.3),
    "max pool": lambda: L.MaxPooling1D(2),
}
#: Those from series to vectors.
FROM_SERIES = {
    "gru": lambda: L.GRU(WIDTH),
    "last lstm": lambda: L.LSTM(WIDTH),
    "average": lambda: L.GlobalAveragePooling1D(),
    "largest": lambda: L.GlobalMaxPooling1D(),
    "flat": lambda: lambda x: L.Dense(WIDTH)(L.Flatten()(NoMask()(x))),
}
IMAGE = {
    "conv": lambda: L.Conv2D(4, 3, padding="same", activation="relu"),
    "depthwise": lambda: L.DepthwiseConv2D(2),
    "separable": lambda: L.SeparableConv2D(4, 2, padding="same"),
    "pool": lambda: L.AveragePooling2D(2, padding="same"),
    "max pool 2d": lambda: L.MaxPooling2D(2, padding="same"),
    "group norm 2d": lambda: L.GroupNormalization(1),
    "batch norm 2d": lambda: L.BatchNormalization(),
    "transpose": lambda: L.Conv2DTranspose(4, 2, padding="same"),
    "up": lambda: L.UpSampling2D(2),
}
