"""TensorFlow's tutorial "Parameter server training with ParameterServerStrategy": a loop with a coordinator.

python examples/parameter_server_custom_loop.py          # workers and servers as threads of this process
unisono launch -n 2 --ps 1 --chief examples/parameter_server_custom_loop.py

By hand, one shell for each task, with its type and index:

TF_CONFIG='{"cluster": {"chief": ["127.0.0.1:23455"], "worker": ["127.0.0.1:23456", "127.0.0.1:23457"],
            "ps": ["127.0.0.1:23458"]}, "task": {"type": "chief", "index": 0}}' \
    python examples/parameter_server_custom_loop.py

A label is "yes" where "avenger" is among three words.

Needs the extra `cluster`.
"""

import os
import random
import socket

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np


def pick_unused_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def create_in_process_cluster(num_workers, num_ps):
    jobs = {"worker": num_workers, "ps": num_ps}
    cluster_dict = {
        job: [f"localhost:{pick_unused_port()}" for _ in range(count)] for job, count in jobs.items()
    }
    cluster_spec = unisono.cluster_resolver.ClusterSpec(cluster_dict)
    for job, count in jobs.items():
        for i in range(count):
            unisono.Server(cluster_spec, job_name=job, task_index=i, protocol="grpc")
    return unisono.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


if "TF_CONFIG" in os.environ:
    cluster_resolver = unisono.cluster_resolver.TFConfigClusterResolver()
else:
    cluster_resolver = create_in_process_cluster(num_workers=3, num_ps=2)

variable_partitioner = unisono.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=cluster_resolver.cluster_spec().num_tasks("ps")
)

# In workers and parameter servers the constructor serves the chief, and does not return.
strategy = unisono.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]


def feature_and_label_gen(num_examples=200):
    examples: dict[str, list] = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        label = ["yes"] if "avenger" in features else ["no"]
        examples["features"].append(features)
        examples["label"].append(label)
    return examples


# changed: the lookup is NumPy's, because Keras' `StringLookup` needs TensorFlow
def preprocess(examples):
    # 0 stands for a word that is not in the vocabulary.
    features = np.array([[1 + feature_vocab.index(f) for f in row] for row in examples["features"]], "int32")
    labels = np.array([[label_vocab.index(word) for word in row] for row in examples["label"]], "int32")
    return {"features": features}, labels


def dataset_fn(_):
    examples = preprocess(feature_and_label_gen())
    return unisono.data.Dataset.from_tensor_slices(examples).shuffle(200).batch(32).repeat()


# Variables that are created in the scope live on the parameter servers.
keras.utils.set_random_seed(0)
with strategy.scope():
    model_input = keras.layers.Input(shape=(3,), dtype="int32", name="features")
    # 512 KB: on two servers each has a half.
    emb_layer = keras.layers.Embedding(input_dim=1 + len(feature_vocab), output_dim=16384)
    emb_output = keras.ops.mean(emb_layer(model_input), axis=1)
    # changed: logits, because of a probability near 0 or 1 Keras' gradient on JAX is 0
    dense_output = keras.layers.Dense(units=1)(emb_output)
    model = keras.Model({"features": model_input}, dense_output)
    optimizer = keras.optimizers.RMSprop(learning_rate=0.1)
    accuracy = keras.metrics.Accuracy()


@unisono.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with unisono.GradientTape() as tape:
            pred = model(batch_data, training=True)
            loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)
            per_example_loss = loss_fn(labels, pred)
            loss = unisono.nn.compute_average_loss(per_example_loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.0), "int32")
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(unisono.ReduceOp.SUM, losses, axis=None)


@unisono.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


coordinator = unisono.coordinator.ClusterCoordinator(strategy)
per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

num_epochs = 4
steps_per_epoch = 15
for i in range(num_epochs):
    accuracy.reset_state()
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    # Wait at epoch boundaries.
    coordinator.join()
    print(f"Finished epoch {i}, accuracy is {accuracy.result():f}.")

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print(f"Final loss is {loss.fetch():f}")

# Evaluation on the chief.
eval_accuracy = keras.metrics.Accuracy()
eval_dataset = unisono.data.Dataset.from_tensor_slices(preprocess(feature_and_label_gen(160))).batch(8)
for batch_data, labels in eval_dataset:
    pred = model(batch_data, training=False)
    actual_pred = keras.ops.cast(keras.ops.greater(pred, 0.0), "int32")
    eval_accuracy.update_state(labels, actual_pred)
print(f"Evaluation accuracy: {eval_accuracy.result():f}")
