"""An Estimator of TensorFlow 1, trained and evaluated on two devices, or by each task of a cluster.

python estimator.py
unisono launch -n 2 --evaluator estimator.py --model-dir /tmp/model

Needs nothing beyond Unisono.
"""

import argparse
import tempfile

import unisono  # first: Keras then computes with JAX

# isort: split
import keras
import numpy as np

from unisono import estimator as tf_estimator
from unisono.data import Dataset
from unisono.estimator import ModeKeys, train


def model_fn(features, labels, mode, params):
    """Return what one batch of one replica gives: it is compiled, and run again for each program."""
    network = keras.Sequential([keras.layers.Dense(params["units"], "relu"), keras.layers.Dense(10)])
    logits = network(features, training=mode == ModeKeys.TRAIN)
    predictions = {"class": keras.ops.argmax(logits, axis=1), "probability": keras.ops.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return tf_estimator.EstimatorSpec(mode, predictions=predictions)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    accuracy.update_state(labels, logits)
    optimizer = train.AdamOptimizer(params["rate"])
    return tf_estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=optimizer.minimize(loss, train.get_global_step()),
        eval_metric_ops={"accuracy": accuracy},
    )


def digits(rows, seed):
    """Return noisy pictures of ten random patterns, and their numbers."""
    patterns = np.random.default_rng(0).normal(size=(10, 64)).astype("float32")
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, rows)
    return patterns[labels] + rng.normal(size=(rows, 64)).astype("float32"), labels


def main():
    """Train for some steps, evaluate each checkpoint, predict, and export."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model-dir", default=None)
    arguments = parser.parse_args()
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    if unisono.cluster_resolver.TFConfigClusterResolver().cluster_spec():
        strategy = unisono.MultiWorkerMirroredStrategy()
    config = tf_estimator.RunConfig(tf_random_seed=1, save_checkpoints_steps=100, train_distribute=strategy)
    estimator = tf_estimator.Estimator(
        model_fn, arguments.model_dir or tempfile.mkdtemp(), config, {"units": 32, "rate": 0.01}
    )

    # Batches are for one replica each; `shuffle` gives each worker another order.
    def train_input():
        return Dataset.from_tensor_slices(digits(2000, 1)).shuffle(2000).repeat().batch(32)

    def test_input():
        return Dataset.from_tensor_slices(digits(500, 2)).batch(100)

    train_spec = tf_estimator.TrainSpec(train_input, max_steps=arguments.steps)
    eval_spec = tf_estimator.EvalSpec(test_input, steps=None, start_delay_secs=0, throttle_secs=0)
    metrics, _ = tf_estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    if metrics is None:
        return  # the evaluator of the cluster has them
    print(f"step {metrics['global_step']}: accuracy {metrics['accuracy']:.3f}")
    first = next(estimator.predict(test_input))
    print(f"the first picture shows {first['class']}, probability {first['probability'].max():.2f}")
    receiver_fn = tf_estimator.build_raw_serving_input_receiver_fn(digits(1, 3)[0])
    path = estimator.export_saved_model(tempfile.mkdtemp(), receiver_fn)
    served = unisono.export.load(path)
    print("the exported model agrees:", int(served(digits(500, 2)[0][:1])["class"][0]) == first["class"])


if __name__ == "__main__":
    main()
