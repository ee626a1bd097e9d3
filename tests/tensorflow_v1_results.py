"""What TensorFlow's `tf.compat.v1` gives for losses, metrics, optimizers and learning rates.

`python tests/tensorflow_v1_results.py`, where TensorFlow is installed, writes the results to
tests/unit/estimator/tensorflow_v1_results.json.
"""

import json
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "unit" / "estimator" / "tensorflow_v1_results.json"


def values():
    """What the expressions are about."""
    rng = np.random.default_rng(0)

    def uniform(*shape):
        return rng.uniform(size=shape).astype("float32")

    return {
        "A": rng.normal(size=(4, 3)).astype("float32"),
        "B": rng.normal(size=(4, 3)).astype("float32") * 2,
        "P": uniform(4, 3),
        "Q": np.array([0.0, 1.0, 0.5, 0.25, 0.25, 0.9], "float32"),
        "L": np.array([1, 1, 0, 0, 1, 1], "int32"),
        "Z": np.array([[1, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]], "float32"),
        "H": np.eye(3, dtype="float32")[[0, 2, 1, 1]],
        "C": np.array([0, 2, 1, 1], "int32"),
        "D": np.array([0, 1, 1, 0], "int32"),
        "E": np.array([0, 1, 1, 0], "float32"),
        "w": np.array([1.0, 0.0, 2.5, 0.5], "float32"),
        "W": uniform(4, 3) * (uniform(4, 3) > 0.4),
        "v": np.array([1.0, 0.0, 2.0, 0.5, 1.0, 3.0], "float32"),
        "S": uniform(4, 6),
        "M": np.array([[1, 2], [5, 5], [0, 3], [4, -1]], "int64"),
        "N": np.array([[1, 2], [5, 5], [0, 3], [4, 1]], "int64"),
        "G": np.array([0, 2, 1, 1], "int64"),
        "K": np.array([[1, 2], [0, 5], [3, 3], [4, 1]], "int64"),
    }


_LOSSES = """
absolute_difference(A, B)
absolute_difference(A, B, 0.5)
absolute_difference(A, B, 0.0)
absolute_difference(A, B, W)
absolute_difference(A, B, w[:, None])
absolute_difference(A, B, W * 0)
mean_squared_error(A, B)
mean_squared_error(labels=A, predictions=B, weights=W)
mean_squared_error(A, B, W, reduction=R.SUM)
mean_squared_error(A, B, W, reduction=R.MEAN)
mean_squared_error(A, B, W, reduction=R.NONE)
mean_squared_error(A, B, W, reduction=R.SUM_OVER_BATCH_SIZE)
mean_squared_error(A, B, W, reduction=R.SUM_OVER_NONZERO_WEIGHTS)
mean_squared_error(A[0, 0], B[0, 0])
mean_squared_error(A, B, 2.0, reduction=R.MEAN)
huber_loss(A, B)
huber_loss(A, B, w[:, None], delta=0.5)
log_loss(Z, P)
log_loss(Z, P, W, epsilon=1e-3)
hinge_loss(Z, A)
hinge_loss(labels=Z, logits=B, weights=W)
cosine_distance(A, B, axis=1)
cosine_distance(A, B, axis=0, weights=W[:1])
cosine_distance(A, B, dim=1, weights=w[:, None])
mean_pairwise_squared_error(A, B)
mean_pairwise_squared_error(A, B, 0.5)
mean_pairwise_squared_error(A, B, w[:, None])
mean_pairwise_squared_error(A, B, 0.0)
sigmoid_cross_entropy(Z, A)
sigmoid_cross_entropy(Z, B, W, label_smoothing=0.2)
sigmoid_cross_entropy(multi_class_labels=Z, logits=B * 30)
softmax_cross_entropy(H, A)
softmax_cross_entropy(onehot_labels=H, logits=B, weights=w, label_smoothing=0.1)
softmax_cross_entropy(H, B, w, reduction=R.NONE)
sparse_softmax_cross_entropy(C, A)
sparse_softmax_cross_entropy(labels=C, logits=B, weights=w)
sparse_softmax_cross_entropy(C[:, None], B, w[:, None])
sparse_softmax_cross_entropy(C, B, 3.0, reduction=R.SUM)
compute_weighted_loss(A)
compute_weighted_loss(A, W)
"""

_METRICS = """
mean(A)
mean(A, W)
mean(A, 0.5)
mean(A, 0.0)
mean(A, w)
accuracy(C, D)
accuracy(C, D, w)
accuracy(labels=C[:, None], predictions=D)
accuracy(C, E)
mean_absolute_error(A, B, W)
mean_squared_error(A, B)
mean_squared_error(A, B, w[:, None])
root_mean_squared_error(A, B)
root_mean_squared_error(A, B, W)
mean_relative_error(A, B, Z)
mean_cosine_distance(A, B, 1)
mean_cosine_distance(A, B, 1, w[:, None])
percentage_below(A, 0.1)
percentage_below(A, 0.1, W)
mean_tensor(A)
mean_tensor(A, W)
mean_per_class_accuracy(C, D, 3)
mean_per_class_accuracy(C, D, 4, w)
mean_iou(C, D, 3)
mean_iou(C, D, 4, w)
true_positives(L, Q)
true_positives(L, Q, v)
false_positives(L, Q)
false_positives(L, Q, v)
true_negatives(L, Q)
true_negatives(L, 0 * Q, v)
false_negatives(L, Q)
false_negatives(L, 0 * Q, v)
true_positives_at_thresholds(L, Q, [0.0, 0.25, 0.6], v)
false_positives_at_thresholds(L, Q, [0.0, 0.25, 0.6])
true_negatives_at_thresholds(L, Q, [0.0, 0.25, 0.6])
false_negatives_at_thresholds(L, Q, [0.0, 0.25, 0.6])
precision(L, Q)
precision(L, Q, v)
precision(L, 0 * Q)
recall(L, Q)
recall(L, Q, v)
recall(0 * L, Q)
precision_at_thresholds(L, Q, [0.0, 0.25, 0.6, 1.0], v)
recall_at_thresholds(L, Q, [0.0, 0.25, 0.6, 1.0])
auc(L, Q)
auc(Z, P)
auc(Z, P, W)
auc(Z, P, W, curve='PR')
auc(Z, P, curve='PR', summation_method='careful_interpolation')
auc(L, Q, summation_method='minoring')
auc(L, Q, v, summation_method='majoring', num_thresholds=20)
auc(Z, P, thresholds=[0.7, 0.3])
auc(0 * L, Q)
sensitivity_at_specificity(Z, P, 0.6)
sensitivity_at_specificity(Z, P, 0.9, W, num_thresholds=20)
specificity_at_sensitivity(Z, P, 0.6)
specificity_at_sensitivity(Z, P, 0.9, W, num_thresholds=20)
precision_at_k(M, S, 2)
precision_at_k(M, S, 3, class_id=5)
precision_at_k(M, S, 2, weights=w)
recall_at_k(M, S, 2)
recall_at_k(G, S, 3, weights=w)
recall_at_k(M, S, 4, class_id=1)
precision_at_top_k(M, K)
recall_at_top_k(M, K)
average_precision_at_k(N, S, 4)
average_precision_at_k(G, S, 3, w)
"""

_OPTIMIZERS = """
GradientDescentOptimizer(0.1)
GradientDescentOptimizer(exponential_decay(0.2, step, 5, 0.5, staircase=True))
MomentumOptimizer(0.1, 0.9)
MomentumOptimizer(0.1, 0.9, use_nesterov=True)
MomentumOptimizer(polynomial_decay(0.2, step, 10, 0.01), 0.5)
AdamOptimizer()
AdamOptimizer(0.1, beta1=0.8, beta2=0.9, epsilon=0.1)
AdamOptimizer(cosine_decay(0.1, step, 30))
AdagradOptimizer(0.3)
AdagradOptimizer(0.3, initial_accumulator_value=1.0)
AdadeltaOptimizer()
AdadeltaOptimizer(1.0, rho=0.9, epsilon=1e-4)
RMSPropOptimizer(0.05)
RMSPropOptimizer(0.05, decay=0.8, momentum=0.5, epsilon=1e-3)
RMSPropOptimizer(0.05, centered=True, momentum=0.9)
FtrlOptimizer(0.3)
FtrlOptimizer(0.3, l1_regularization_strength=0.05, l2_regularization_strength=0.1)
FtrlOptimizer(0.3, learning_rate_power=-0.7, l2_shrinkage_regularization_strength=0.1)
ProximalGradientDescentOptimizer(0.1, 0.05, 0.1)
ProximalAdagradOptimizer(0.3)
ProximalAdagradOptimizer(0.3, 0.2, l1_regularization_strength=0.05, l2_regularization_strength=0.1)
"""

_DECAYS = """
exponential_decay(0.5, step, 7, 0.9)
exponential_decay(0.5, step, 7, 0.9, staircase=True)
natural_exp_decay(0.5, step, 7, 0.9)
natural_exp_decay(0.5, step, 7, 0.9, staircase=True)
inverse_time_decay(0.5, step, 7, 0.9)
inverse_time_decay(0.5, step, 7, 0.9, staircase=True)
polynomial_decay(0.5, step, 7)
polynomial_decay(0.5, step, 7, 0.1, power=2.0)
polynomial_decay(0.5, step, 7, 0.1, cycle=True)
cosine_decay(0.5, step, 20)
cosine_decay(0.5, step, 20, alpha=0.3)
cosine_decay_restarts(0.5, step, 4)
cosine_decay_restarts(0.5, step, 4, t_mul=1.0, m_mul=0.5, alpha=0.1)
linear_cosine_decay(0.5, step, 20)
linear_cosine_decay(0.5, step, 20, num_periods=2, alpha=0.1, beta=0.01)
piecewise_constant(step, [3, 10], [0.5, 0.2, 0.1])
"""

#: The steps at which learning rates are asked for.
STEPS = (0, 1, 3, 4, 7, 10, 14, 20, 33)

#: The expressions of each kind.
CASES = {
    kind: text.strip().splitlines()
    for kind, text in {
        "losses": _LOSSES, "metrics": _METRICS, "optimizers": _OPTIMIZERS, "decays": _DECAYS,
    }.items()
}  # fmt: skip

#: Steps of each optimizer.
TRAINED = 20


def halves():
    """The values of both batches of a metric: some turned round in the second."""
    first = values()
    second = {
        name: value[::-1] if isinstance(value, np.ndarray) and name in "BDEPQSWvw" else value
        for name, value in first.items()
    }
    return first, second


def start():
    """The first weights, and the inputs and targets of a regression."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(TRAINED, 4, 3)).astype("float32")
    return np.array([0.5, -0.1, 0.0], "float32"), x, (x @ np.array([1.0, -2.0, 0.5])).astype("float32")


def _losses(tf):
    def results(expression):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            own = {"R": tf.compat.v1.losses.Reduction, **values()}
            given = {n: own[n] for n in ("A", "B", "P")}
            tensors = {n: tf.constant(v) for n, v in given.items()}
            loss = eval(f"losses.{expression}", {"losses": tf.compat.v1.losses, **own, **tensors})
            grads = tf.gradients(loss, list(tensors.values()))
            return session.run([loss, *(g for g in grads if g is not None)])

    return {e: [np.asarray(a).tolist() for a in results(e)] for e in CASES["losses"]}


def _metrics(tf):
    def results(expression):
        first, second = halves()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            holders = {
                n: tf.compat.v1.placeholder(v.dtype, v.shape)
                for n, v in first.items()
                if isinstance(v, np.ndarray)
            }
            value, update = eval(f"metrics.{expression}", {"metrics": tf.compat.v1.metrics, **holders})
            session.run(tf.compat.v1.local_variables_initializer())
            for batch in (first, second):
                session.run(update, {holders[n]: batch[n] for n in holders})
            return np.asarray(session.run(value))

    return {e: results(e).tolist() for e in CASES["metrics"]}


def _optimizers(tf):
    v1 = tf.compat.v1

    def results(expression):
        first, x, y = start()
        with tf.Graph().as_default(), v1.Session() as session:
            step = v1.train.get_or_create_global_step()
            weights = tf.Variable(first)
            rows, targets = v1.placeholder("float32", (4, 3)), v1.placeholder("float32", (4,))
            loss = v1.losses.mean_squared_error(targets, tf.linalg.matvec(rows, weights))
            names = {n: getattr(v1.train, n) for n in dir(v1.train) if not n.startswith("_")}
            train_op = eval(expression, {**names, "step": step}).minimize(loss, step)
            session.run(v1.global_variables_initializer())
            path = []
            for i in range(TRAINED):
                session.run(train_op, {rows: x[i], targets: y[i]})
                path.append(session.run(weights).tolist())
        return path

    return {e: results(e) for e in CASES["optimizers"]}


def _decays(tf):
    names = {n: getattr(tf.compat.v1.train, n) for n in dir(tf.compat.v1.train) if not n.startswith("_")}
    results = {}
    for expression in CASES["decays"]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            step = tf.compat.v1.placeholder("int64", ())
            rate = eval(expression, {**names, "step": step})
            results[expression] = [float(session.run(rate, {step: s})) for s in STEPS]
    return results


def main():
    import tensorflow as tf

    made = {"losses": _losses, "metrics": _metrics, "optimizers": _optimizers, "decays": _decays}
    parts = []
    for kind, make in made.items():
        lines = [f"{json.dumps(e)}: {json.dumps(_short(r))}" for e, r in make(tf).items()]
        parts.append(f"{json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n}")
    RESULTS.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _short(result):
    """Numbers with seven digits."""
    if isinstance(result, list):
        return [_short(part) for part in result]
    return float(f"{result:.7g}") if isinstance(result, float) else result


if __name__ == "__main__":
    main()
