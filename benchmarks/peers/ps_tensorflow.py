"""TensorFlow's ParameterServerStrategy: one task of a cluster, as TF_CONFIG says; the chief measures.

Run by `parameter_server.py` with the sizes of the hidden layers, the batch, and the numbers of steps to warm
up and to measure. The chief prints one line of JSON: `{"steps_per_second": …}`.
"""

import itertools
import json
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf


def main():
    hidden, batch, warm, steps = json.loads(sys.argv[1])
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    sizes = [784, *hidden, 10]
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights, slots = [], []
        for rows, columns in itertools.pairwise(sizes):
            for value in (rng.normal(0, rows**-0.5, (rows, columns)), np.zeros(columns)):
                weights.append(tf.Variable(value.astype("float32")))
                slots.append([tf.Variable(np.zeros(value.shape, "float32")) for _ in range(2)])

    def dataset_fn():
        x = rng.random((batch * 16, 784), np.float32)
        y = rng.integers(0, 10, batch * 16)
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch).prefetch(4)

    @tf.function
    def step_fn(iterator):
        def replica_fn(x, y):
            with tf.GradientTape() as tape:
                h = x
                for i in range(0, len(weights), 2):
                    h = h @ weights[i] + weights[i + 1]
                    if i < len(weights) - 2:
                        h = tf.nn.relu(h)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, h))
            gradients = tape.gradient(loss, weights)
            # The fused kernel of Adam, which is the fastest way that TensorFlow has.
            for w, (m, v), g in zip(weights, slots, gradients, strict=True):
                tf.raw_ops.ResourceApplyAdam(
                    var=w.handle, m=m.handle, v=v.handle, beta1_power=0.9, beta2_power=0.999,
                    lr=0.001, beta1=0.9, beta2=0.999, epsilon=1e-7, grad=g,
                )  # fmt: skip
            return loss

        x, y = next(iterator)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_fn, args=(x, y)), axis=None)

    @tf.function
    def per_worker_dataset():
        return strategy.distribute_datasets_from_function(lambda context: dataset_fn())

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset))

    def run(count):
        began = time.perf_counter()
        for _ in range(count):
            loss = coordinator.schedule(step_fn, args=(iterator,))
        coordinator.join()
        assert np.isfinite(float(loss.fetch()))
        return count / (time.perf_counter() - began)

    run(warm)
    print(json.dumps({"steps_per_second": run(steps)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
