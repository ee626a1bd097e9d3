"""TensorFlow's custom loop: `strategy.run` in a `tf.function`, Keras on TensorFlow."""

import os

from peers import Peer


def start(place):
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf

    from peers.keras_fit import tf_strategy

    strategy = tf_strategy(place.devices)
    x, y = place.data()

    def batches(rows):
        dataset = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).shuffle(rows, seed=1)
        dataset = dataset.batch(place.batch).prefetch(tf.data.AUTOTUNE)
        return strategy.experimental_distribute_dataset(dataset)

    with strategy.scope():
        model = place.workload.keras_model()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        optimizer = keras.optimizers.Adam()
        # A tf.function that makes variables in its first call fails here (TensorFlow 2.21).
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = tf.nn.compute_average_loss(loss_fn(labels, predictions), global_batch_size=place.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def distributed_train_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def epoch(dataset):
        accuracy.reset_state()
        losses = [distributed_train_step(batch) for batch in dataset]
        return float(sum(losses)), float(accuracy.result())

    dataset = batches(len(x))
    return Peer(
        first=lambda: epoch(batches(place.batch)),
        actions={"loop": (lambda: epoch(dataset), len(x))},
        steps=lambda: int(optimizer.iterations.numpy()),
        training={"loop": place.workload.steps},
    )
