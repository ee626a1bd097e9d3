"""Losses and metrics, with pairs of rows and without, and steps of users' own."""

import jax
import jax.numpy as jnp
import keras

ops = keras.ops
K = keras.losses


def scalar_mean(y, p):
    return ops.mean(ops.square(y - p))


def scalar_sum(y, p):
    return ops.sum(ops.abs(y - p)) / 16.0


def each_row(y, p):
    return ops.mean(ops.square(y - p), axis=-1)


def squeezed(y, p):
    return ops.mean(ops.abs(ops.squeeze(y) - ops.squeeze(p)))


def largest_error(y, p):
    return ops.max(ops.abs(y - p))


def root(y, p):
    return ops.sqrt(0.1 + ops.mean(ops.square(y - p)))


def correlation(y, p):
    a, b = y - ops.mean(y, axis=0), p - ops.mean(p, axis=0)
    return 1.0 - ops.sum(a * b) / (1.0 + ops.norm(a) * ops.norm(b))


def folded(y, p):
    """Loss of an output with several entries for each row."""
    return ops.mean(ops.square(ops.reshape(y, (-1, 1)) - p), axis=-1)


def folded_deviation(y, p):
    return ops.std(ops.reshape(y, (-1, 1)) - p)


def ranked(y, p):
    gap = (y[:, None, 0] - y[None, :, 0]) * (p[:, None, 0] - p[None, :, 0])
    return ops.mean(ops.softplus(-gap))


def weighted_by_targets(y, p):
    return ops.sum(ops.abs(y) * ops.square(y - p)) / (1.0 + ops.sum(ops.abs(y)))


def by_rows(y, p):
    return ops.sum(ops.square(y - p)) / ops.cast(ops.shape(y)[0], "float32")


def grouped(y, p):
    """Distances within groups of rows, as of a class each: of four, of two, or of all."""
    size = next((n for n in (4, 2) if p.shape[0] % n == 0), p.shape[0])
    groups = ops.reshape(p, (-1, size, p.shape[1]))
    return ops.mean(ops.square(groups - ops.mean(groups, axis=1, keepdims=True)))


def balanced(y, p):
    """Cross-entropy with an assignment of rows to columns in which all columns have as much (SwAV)."""
    found = ops.exp(ops.tanh(p))
    for _ in range(3):
        found = found / ops.sum(found, axis=0, keepdims=True)
        found = found / ops.sum(found, axis=1, keepdims=True)
    return -ops.mean(ops.sum(ops.stop_gradient(found) * ops.log_softmax(p), axis=-1))


class Triplet(keras.Loss):
    """The farthest row of a row's class against the nearest one of another."""

    def call(self, y, p):
        labels = ops.reshape(y, (-1,))
        distances = ops.sum(ops.square(p[:, None] - p[None]), axis=-1)
        same = ops.cast(labels[:, None] == labels[None], "float32")
        nearest = -ops.top_k(-(distances + 1e3 * same), 1)[0][:, 0]
        return ops.relu(ops.max(distances * same, axis=1) - ops.minimum(nearest, 9.0) + 0.3)


class Contrastive(keras.Loss):
    """Pulls embeddings of one class together, and pushes others apart."""

    def call(self, y, p):
        p = p / (0.1 + ops.norm(p, axis=-1, keepdims=True))
        labels = ops.reshape(y, (-1,))
        same = ops.cast(labels[:, None] == labels[None], "float32")
        each = ops.log_softmax(p @ ops.transpose(p), axis=-1)
        return -ops.sum(same * each, axis=-1) / ops.sum(same, axis=-1)


def focal(y, p):
    return ops.mean(y * (1 - p) ** 2 * -ops.log(p + 1e-3), axis=-1)


def matched(y, p):
    """Loss over an output of shape (rows, rows): the diagonal is right."""
    return ops.mean(ops.logsumexp(p, axis=-1) - ops.diagonal(p))


#: Losses by kind of head.
LOSSES = {
    "numbers": {
        "mse": K.MeanSquaredError,
        "mae": lambda: "mae",
        "sum": lambda: K.Huber(reduction="sum"),
        "mean": lambda: K.MeanSquaredError(reduction="mean"),
        "mean of weights": lambda: K.LogCosh(reduction="mean_with_sample_weight"),
        "cosine": K.CosineSimilarity,
        **{
            fn.__name__: (lambda fn=fn: fn)
            for fn in (
                scalar_mean,
                scalar_sum,
                each_row,
                squeezed,
                largest_error,
                root,
                correlation,
                ranked,
                weighted_by_targets,
                by_rows,
                grouped,
                balanced,
            )
        },
    },
    "classes": {
        "sparse": K.SparseCategoricalCrossentropy,
        "sparse sum": lambda: K.SparseCategoricalCrossentropy(reduction="sum"),
        "ignored": lambda: K.SparseCategoricalCrossentropy(ignore_class=1),
        "contrastive": Contrastive,
        "triplet": Triplet,
        "contrastive sum": lambda: Contrastive(reduction="sum"),
    },
    "hot": {
        "cross-entropy": lambda: K.CategoricalCrossentropy(label_smoothing=0.1),
        "focal": lambda: focal,
        "focal of Keras": K.CategoricalFocalCrossentropy,
        "divergence": K.KLDivergence,
        "dice": K.Dice,
        "tversky": lambda: K.Tversky(axis=(1,)),
        "hinge": K.CategoricalHinge,
    },
    "truths": {
        "binary": K.BinaryCrossentropy,
        "hinge": K.Hinge,
        "focal": lambda: K.BinaryFocalCrossentropy(reduction="sum"),
    },
    "pairs": {"matched": lambda: matched},
    "folded": {"folded": lambda: folded, "folded_deviation": lambda: folded_deviation},
}

M = keras.metrics


class LargestError(keras.Metric):
    """The largest error of all rows."""

    def __init__(self):
        super().__init__(name="largest_error")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y - p))))

    def result(self):
        return self.largest.value


class Ratio(keras.Metric):
    """A mean over batches of a ratio over each batch's rows."""

    def __init__(self):
        super().__init__(name="ratio")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y - p)) / (1.0 + ops.sum(ops.abs(y))))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


class Confusion(keras.Metric):
    """Counts of pairs of classes."""

    def __init__(self):
        super().__init__(name="confusion")
        self.counts = self.add_variable((4, 4), "zeros", dtype="int32", name="counts")

    def update_state(self, y, p, sample_weight=None):
        hot = [ops.one_hot(ops.argmax(x, axis=-1), 4) for x in (y, p)]
        self.counts.assign(self.counts + ops.cast(ops.transpose(hot[0]) @ hot[1], "int32"))

    def result(self):
        counts = ops.cast(self.counts, "float32")
        return ops.sum(ops.diagonal(counts)) / ops.sum(counts)


class Variance(keras.Metric):
    """Welford's variance of all predictions."""

    def __init__(self):
        super().__init__(name="variance")
        names = ("count", "center", "total")
        self.count, self.center, self.total = (self.add_variable((), "zeros", name=n) for n in names)

    def update_state(self, y, p, sample_weight=None):
        count, center = ops.cast(ops.size(p), "float32"), ops.mean(p)
        every, gap = self.count + count, center - self.center
        inside = ops.sum(ops.square(p - center))
        self.total.assign(self.total + inside + gap * gap * self.count * count / every)
        self.center.assign(self.center + gap * count / every)
        self.count.assign(every)

    def result(self):
        return self.total / self.count


class LastRows(keras.Metric):
    """The mean of the last five predictions."""

    def __init__(self):
        super().__init__(name="last_rows")
        self.rows = self.add_variable((5,), "zeros", name="rows")

    def update_state(self, y, p, sample_weight=None):
        self.rows.assign(ops.concatenate([self.rows, p[:, 0]])[-5:])

    def result(self):
        return ops.mean(self.rows)


def share(y, p):
    return ops.mean(ops.cast(p > y, "float32"), axis=-1)


METRICS = {
    "numbers": {
        "mae": lambda: "mae",
        "rmse": M.RootMeanSquaredError,
        "r2": M.R2Score,
        "share": lambda: share,
        "largest": LargestError,
        "ratio": Ratio,
        "cosine": M.CosineSimilarity,
        "cosine of columns": lambda: M.CosineSimilarity(axis=0),
        "correlation": M.PearsonCorrelation,
        "variance": Variance,
        "last rows": LastRows,
    },
    "classes": {"accuracy": lambda: "accuracy", "top": lambda: M.SparseTopKCategoricalAccuracy(2)},
    "hot": {
        "accuracy": lambda: "accuracy",
        "f1": M.F1Score,
        "auc": M.AUC,
        "largest": LargestError,
        "confusion": Confusion,
    },
    "truths": {
        "accuracy": lambda: "accuracy",
        "precision": M.Precision,
        "auc": lambda: M.AUC(num_thresholds=9),
        "ratio": Ratio,
    },
    "pairs": {},
    "folded": {},
}


# --- steps of users ----------------------------------------------------------------------------------------


def _gradients(model, state, data, trainable=None):
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    trained, others, optimizer, metrics = state
    fn = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
    (_, aux), gradients = fn(
        trained if trainable is None else trainable, others, metrics, x, y, weight,
        training=True, optimizer_variables=optimizer,
    )  # fmt: skip
    return gradients, aux, (x, y, weight)


def _finish(model, state, gradients, aux, given):
    loss, outputs, others, metrics = aux
    x, y, weight = given
    trained, optimizer = model.optimizer.stateless_apply(state[2], gradients, state[0])
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, outputs, weight)
    return logs, (trained, others, optimizer, metrics)


def plain(model, state, data):
    return _finish(model, state, *_gradients(model, state, data))


def clipped(model, state, data):
    gradients, aux, given = _gradients(model, state, data)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
    scale = jnp.minimum(1.0, 0.1 / (norm + 1e-6))
    return _finish(model, state, [g * scale for g in gradients], aux, given)


def clipped_by_value(model, state, data):
    gradients, aux, given = _gradients(model, state, data)
    return _finish(model, state, [jnp.clip(g, -0.02, 0.02) for g in gradients], aux, given)


def sharpness(model, state, data):
    gradients, *_ = _gradients(model, state, data)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients)) + 1e-6
    moved = [w + 0.05 * g / norm for w, g in zip(state[0], gradients, strict=True)]
    return _finish(model, state, *_gradients(model, state, data, moved))


def by_hand(model, state, data):
    gradients, (loss, outputs, others, metrics), (x, y, weight) = _gradients(model, state, data)
    trained = [w - 0.05 * g for w, g in zip(state[0], gradients, strict=True)]
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, outputs, weight)
    return logs, (trained, others, state[2], metrics)


def centralized(model, state, data):
    gradients, aux, given = _gradients(model, state, data)
    gradients = [g - jnp.mean(g, axis=0, keepdims=True) if g.ndim > 1 else g for g in gradients]
    return _finish(model, state, gradients, aux, given)


def scaled(model, state, data):
    gradients, aux, given = _gradients(model, state, data)
    return _finish(
        model, state, [0.5 * g + 0.001 * w for g, w in zip(gradients, state[0], strict=True)], aux, given
    )


def with_logs(model, state, data):
    gradients, aux, given = _gradients(model, state, data)
    logs, new = _finish(model, state, gradients, aux, given)
    return {**logs, "norm": jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))}, new


def with_mean_log(model, state, data):
    gradients, aux, given = _gradients(model, state, data)
    logs, new = _finish(model, state, gradients, aux, given)
    return {**logs, "size": jnp.mean(jnp.square(jax.tree.leaves(aux[1])[0]))}, new


def mixed_rows(model, state, data):
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    mixed = [jax.tree.map(lambda a: 0.7 * a + 0.3 * a[::-1], part) for part in (x, y)]
    return _finish(model, state, *_gradients(model, state, (*mixed, weight)))


def in_halves(model, state, data):
    """Gradients accumulated over two parts of the batch."""
    rows = jax.tree.leaves(data)[0].shape[0] // 2 or 1
    first, last = (
        jax.tree.map(lambda a, part=part: a[part], data) for part in (slice(rows), slice(-rows, None))
    )
    one, (_, _, others, metrics), _ = _gradients(model, state, first)
    two, aux, given = _gradients(model, (state[0], others, state[2], metrics), last)
    return _finish(model, state, [(a + b) / 2 for a, b in zip(one, two, strict=True)], aux, given)


def skipping(model, state, data):
    gradients, aux, given = _gradients(model, state, data)
    logs, (trained, *rest) = _finish(model, state, gradients, aux, given)
    kept = [jnp.where(aux[0] < 1.0, a, b) for a, b in zip(trained, state[0], strict=True)]
    return logs, (kept, *rest)


def projected(model, state, data):
    """One gradient without its part against another one's (PCGrad)."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    gradients, aux, given = _gradients(model, state, data)
    others, *_ = _gradients(model, state, (jax.tree.map(lambda a: 0.5 * a, x), y, weight))
    dot, size = (sum(jnp.vdot(a, b) for a, b in zip(g, others, strict=True)) for g in (gradients, others))
    factor = jnp.minimum(dot, 0.0) / (size + 1e-3)
    return _finish(model, state, [a - factor * b for a, b in zip(gradients, others, strict=True)], aux, given)


#: Steps of users' own, with JAX.
STEPS = {
    "plain": plain,
    "clipped": clipped,
    "clipped by value": clipped_by_value,
    "sharpness": sharpness,
    "by hand": by_hand,
    "centralized": centralized,
    "scaled": scaled,
    "with logs": with_logs,
    "with a mean": with_mean_log,
    "mixed rows": mixed_rows,
    "in halves": in_halves,
    "skipping": skipping,
    "projected": projected,
}


class Own:
    """Mixed into a model: a step of its own, chosen by `own_step`, and perhaps a `test_step`."""

    own_step = "plain"

    def train_step(self, state, data):
        return STEPS[self.own_step](self, state, data)


class OwnTest:
    """Mixed into a model: evaluates by hand."""

    def test_step(self, state, data):
        trained, others, metrics = state
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        outputs, _ = self.stateless_call(trained, others, x, training=False)
        first = ops.mean(ops.abs(jax.tree.leaves(outputs)[0]))
        logs = {"loss": first}
        if self.own_test != "loss":
            logs["more"] = ops.max(jax.tree.leaves(outputs)[0]) if self.own_test == "largest" else first
        return logs, (trained, others, metrics)


class Tape:
    """Mixed into a model: a step in TensorFlow's form."""

    def train_step(self, data):
        import unisono

        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with unisono.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, outputs, weight)


class OwnLoss:
    """Mixed into a model: computes the loss of the batch itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        first = jax.tree.leaves(y_pred)[0]
        if self.own_loss == "root":
            return loss + 0.1 * ops.sqrt(0.1 + ops.mean(ops.square(first)))
        return loss + 0.1 * ops.mean(ops.square(first))


class OwnUpdates:
    """Mixed into a model: computes the loss and new states itself, as Keras on JAX calls it."""

    def compute_loss_and_updates(self, *args, **kwargs):
        loss, (_, outputs, others, metrics) = super().compute_loss_and_updates(*args, **kwargs)
        first = jax.tree.leaves(outputs)[0]
        loss = loss + 0.1 * ops.sqrt(0.1 + ops.mean(ops.square(first)))
        return loss, (loss, outputs, others, metrics)


def set_on_the_object(model, method):
    """Give a model a method of its own, without a class."""
    if method == "train_step":
        model.train_step = lambda state, data: clipped(model, state, data)
        return
    loss_of_keras = model.compute_loss

    def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = loss_of_keras(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.sqrt(0.1 + ops.mean(ops.square(jax.tree.leaves(y_pred)[0])))

    model.compute_loss = compute_loss


class OwnMetrics:
    """Mixed into a model: adds a log to those of the metrics."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        first = jax.tree.leaves(y_pred)[0]
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "size": ops.mean(ops.square(first))}
